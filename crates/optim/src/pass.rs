//! The pass over gradient, masters, states and model weights that every rule makes.

use oxizero_device::kernels::row::{self, At, ROW, Row};
use oxizero_device::kernels::{exact_reciprocal, quotients};
use oxizero_device::simd::vectorised;
use oxizero_device::{View, ViewMut};

use crate::tiny::{TINY, zero_below};

/// A reduced gradient, and what is still to be done to it: an element is
/// `(value / divisor) * factor`, a true division and a multiplication in f32.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The sums over ranks and micro-batches, in any dtype.
    pub values: View<'a>,
    /// What the sums are divided by: contributions times loss scale. Positive.
    pub divisor: f32,
    /// The clip factor, at most 1, which leaves the quotient as it is.
    pub factor: f32,
}

/// The weights of the gradient's elements, and what belongs to them, in one memory: the host's for
/// the rules of this crate, a device's for those of a front-end that computes there.
#[derive(Debug)]
pub struct Weights<'a> {
    /// The master weights, in f32.
    pub master: ViewMut<'a>,
    /// The f32 states, one a name of [`state_names`](crate::Optimizer::state_names), each as long
    /// as the masters.
    pub states: &'a mut [ViewMut<'a>],
    /// The model weights, to which the new masters are written, rounded to nearest even. `None`
    /// where the masters are the model weights.
    pub model: Option<ViewMut<'a>>,
}

impl Gradient<'_> {
    /// The smallest value whose element is [`TINY`]; smaller ones are not even divided.
    fn floor(&self) -> f32 {
        let floor = f64::from(TINY) * f64::from(self.divisor) / f64::from(self.factor);
        (floor as f32).max(f32::MIN_POSITIVE)
    }
}

/// Updates each master weight and its states by `rule`, which from a gradient, a weight and its
/// states makes the new weight and states; then writes the new masters to the model weights. All of
/// them lie on the host.
#[inline(always)]
pub(crate) fn update_each<const STATES: usize>(
    grad: Gradient<'_>,
    weights: Weights<'_>,
    rule: impl Fn(f32, f32, [f32; STATES]) -> (f32, [f32; STATES]),
) {
    let Weights { master, states, model } = weights;
    let master = slice(master);
    let numel = master.len();
    assert_eq!(grad.values.numel().0, numel, "the gradient's length is not the master weights'");
    let states: &mut [_; STATES] =
        states.try_into().expect("one state is given for each of the rule's state names");
    let mut states = states.each_mut().map(|state| slice(state.reborrow()));
    for state in &states {
        assert_eq!(state.len(), numel, "a state's length is not the master weights'");
    }
    let Some(model) = model else {
        return update_rows(
            grad,
            master,
            &mut states,
            rule,
            #[inline(always)]
            |_, _| (),
        );
    };
    let model_numel = model.as_view().numel().0;
    assert_eq!(model_numel, numel, "the model weights' length is not the master weights'");
    row::output(model, |output| {
        update_rows(
            grad,
            master,
            &mut states,
            rule,
            #[inline(always)]
            |weights, at| {
                output.put(weights, at);
            },
        );
    });
}

/// Calls `publish` with each row of new masters, and where it is.
#[inline(always)]
fn update_rows<const STATES: usize>(
    grad: Gradient<'_>,
    master: &mut [f32],
    states: &mut [&mut [f32]; STATES],
    rule: impl Fn(f32, f32, [f32; STATES]) -> (f32, [f32; STATES]),
    mut publish: impl FnMut(&Row, At),
) {
    let Gradient { values, divisor, factor } = grad;
    let (floor, reciprocal) = (grad.floor(), exact_reciprocal(divisor));
    vectorised(
        #[inline(always)]
        || {
            row::each(
                master.len(),
                #[inline(always)]
                |at| {
                    row::ask(values, at);
                    row::ask_of(master, at);
                    for state in states.iter() {
                        row::ask_of(state, at);
                    }
                    let mut grads = row::read(values, at);
                    for grad in &mut grads {
                        *grad = zero_below(floor, *grad);
                    }
                    let grads = quotients(grads, divisor, reciprocal);
                    let mut weights = row::read_of(master, at);
                    // Loops where closures would read better: those are not all inlined.
                    let mut rows = [[0.0; ROW]; STATES];
                    for (row, state) in rows.iter_mut().zip(states.iter()) {
                        *row = row::read_of(state, at);
                    }
                    for lane in 0..ROW {
                        let mut before = [0.0; STATES];
                        for (before, row) in before.iter_mut().zip(&rows) {
                            *before = row[lane];
                        }
                        let (weight, after) = rule(grads[lane] * factor, weights[lane], before);
                        weights[lane] = weight;
                        for (row, after) in rows.iter_mut().zip(after) {
                            row[lane] = after;
                        }
                    }
                    row::put(&weights, master, at);
                    for (row, state) in rows.iter().zip(states.iter_mut()) {
                        row::put(row, state, at);
                    }
                    publish(&weights, at);
                },
            );
        },
    );
}

/// f32 elements of the host.
fn slice(values: ViewMut<'_>) -> &mut [f32] {
    match values {
        ViewMut::F32(values) => values,
        other => panic!("a rule of the host updates f32, and was given {:?}", other.as_view()),
    }
}
