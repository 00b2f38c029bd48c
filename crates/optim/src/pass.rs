//! The pass over gradient, masters, states and model weights that every rule makes.

use oxizero_device::kernels::cast;
use oxizero_device::{View, ViewMut};

use crate::tiny::{TINY, zero_below};

/// Elements that a rule updates at once; a few blocks of f32 fit in a core's first-level cache.
const BLOCK: usize = 512;

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
    /// Writes the elements from `start` on, ready to use, over `block`.
    fn write_block(&self, start: usize, block: &mut [f32]) {
        let floor = self.floor();
        cast(self.values.range(start..start + block.len()), ViewMut::F32(block));
        for element in block {
            *element = zero_below(floor, *element) / self.divisor * self.factor;
        }
    }

    /// The smallest value whose element is [`TINY`]; smaller ones are not even divided.
    fn floor(&self) -> f32 {
        let floor = f64::from(TINY) * f64::from(self.divisor) / f64::from(self.factor);
        (floor as f32).max(f32::MIN_POSITIVE)
    }
}

/// Calls `rule` with the gradients, masters and states of a block at a time, in order, and then
/// writes the block's new masters to the model weights. All of them lie on the host.
pub(crate) fn update_blocks<const STATES: usize>(
    grad: Gradient<'_>,
    weights: Weights<'_>,
    rule: impl Fn(&[f32], &mut [f32], [&mut [f32]; STATES]),
) {
    let Weights { master, states, mut model } = weights;
    let master = slice(master);
    let numel = master.len();
    assert_eq!(grad.values.numel().0, numel, "the gradient's length is not the master weights'");
    let states: &mut [_; STATES] =
        states.try_into().expect("one state is given for each of the rule's state names");
    let mut states = states.each_mut().map(|state| slice(state.reborrow()));
    for state in &states {
        assert_eq!(state.len(), numel, "a state's length is not the master weights'");
    }
    if let Some(model) = &model {
        let model_numel = model.as_view().numel().0;
        assert_eq!(model_numel, numel, "the model weights' length is not the master weights'");
    }
    let mut elements = [0.0; BLOCK];
    for start in (0..numel).step_by(BLOCK) {
        let block = start..numel.min(start + BLOCK);
        let elements = &mut elements[..block.len()];
        grad.write_block(start, elements);
        let master = &mut master[block.clone()];
        rule(elements, master, states.each_mut().map(|state| &mut state[block.clone()]));
        if let Some(model) = &mut model {
            cast(View::F32(master), model.reborrow().range(block));
        }
    }
}

/// f32 elements of the host.
fn slice(values: ViewMut<'_>) -> &mut [f32] {
    match values {
        ViewMut::F32(values) => values,
        other => panic!("a rule of the host updates f32, and was given {:?}", other.as_view()),
    }
}
