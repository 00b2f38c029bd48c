//! Runs of a rule that are compared with the same formula, element by element.

use std::ops::Range;

use oxizero_core::{DType, Numel};
use oxizero_device::kernels::cast;
use oxizero_device::{Buffer, View, ViewMut};
use proptest::prelude::*;

use crate::{Gradient, Hyper, Optimizer, Weights};

/// Some updates of one parameter.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The masters before the first update.
    pub(crate) master: Vec<f32>,
    /// The gradient of each update.
    pub(crate) grads: Vec<Vec<f32>>,
    pub(crate) grad_dtype: DType,
    pub(crate) model_dtype: Option<DType>,
    pub(crate) divisor: f32,
    pub(crate) factor: f32,
    pub(crate) hyper: Hyper,
    /// Where the parameter is cut in two, each part updated by a call of its own.
    pub(crate) cut: usize,
}

/// What a case leaves.
#[derive(Debug, PartialEq)]
pub(crate) struct After {
    pub(crate) master: Vec<f32>,
    pub(crate) states: Vec<Vec<f32>>,
    /// The model weights, widened.
    pub(crate) model: Option<Vec<f32>>,
}

impl Case {
    /// Gradients in f32 that are used as they are.
    pub(crate) fn of(master: &[f32], grads: &[&[f32]]) -> Self {
        Self {
            master: master.to_vec(),
            grads: grads.iter().map(|grad| grad.to_vec()).collect(),
            grad_dtype: DType::F32,
            model_dtype: None,
            divisor: 1.0,
            factor: 1.0,
            hyper: Hyper { lr: 0.1, weight_decay: 0.0 },
            cut: 0,
        }
    }

    /// Makes the updates.
    pub(crate) fn run(&self, optimizer: &dyn Optimizer) -> After {
        let numel = self.master.len();
        let mut master = self.master.clone();
        let mut states =
            vec![vec![optimizer.initial_state(); numel]; optimizer.state_names().len()];
        let mut model = self.model_dtype.map(|dtype| Buffer::heap(Numel(numel), dtype));
        for (step, grad) in (1..).zip(&self.grads) {
            let grad = narrow(grad, self.grad_dtype);
            for part in [0..self.cut, self.cut..numel] {
                let grad = Gradient {
                    values: grad.range(part.clone()),
                    divisor: self.divisor,
                    factor: self.factor,
                };
                let mut states: Vec<_> = parts(&mut states, &part).map(ViewMut::F32).collect();
                let weights = Weights {
                    master: ViewMut::F32(&mut master[part.clone()]),
                    states: &mut states,
                    model: model.as_mut().map(|model| model.range_mut(part)),
                };
                optimizer.update(self.hyper, step, grad, weights);
            }
        }
        After { master, states, model: model.map(|model| widen(&model)) }
    }

    /// Makes the updates, and compares them with `formula`, which from an element's gradient,
    /// weight and states makes its new weight and states.
    pub(crate) fn assert_follows<const STATES: usize>(
        &self,
        optimizer: &dyn Optimizer,
        formula: impl Fn(Hyper, u64, (f32, f32), [f32; STATES]) -> (f32, [f32; STATES]),
    ) {
        assert_eq!(optimizer.state_names().len(), STATES);
        let after = self.run(optimizer);
        let grads: Vec<_> =
            self.grads.iter().map(|grad| widen(&narrow(grad, self.grad_dtype))).collect();
        let mut expected = self.master.clone();
        for (index, weight) in expected.iter_mut().enumerate() {
            let mut states = [optimizer.initial_state(); STATES];
            for (step, grad) in (1..).zip(&grads) {
                let grad = self.element(grad[index]);
                (*weight, states) = formula(self.hyper, step, (grad, *weight), states);
            }
            let got = std::array::from_fn(|state| after.states[state][index]);
            assert_eq!(bits(got), bits(states), "states of element {index}");
        }
        assert_same(&after.master, &expected);
        if let (Some(dtype), Some(model)) = (self.model_dtype, &after.model) {
            assert_same(model, &widen(&narrow(&expected, dtype)));
        }
    }

    fn element(&self, value: f32) -> f32 {
        let floor = 2.0_f64.powi(-100) * f64::from(self.divisor) / f64::from(self.factor);
        flush((floor as f32).max(2.0_f32.powi(-126)), value) / self.divisor * self.factor
    }
}

/// What is smaller than `floor` counts as zero.
pub(crate) fn flush(floor: f32, value: f32) -> f32 {
    if value > -floor && value < floor { 0.0 } else { value }
}

/// A failing case is printed, not kept in a file.
pub(crate) fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

/// Up to three updates of a parameter of some blocks, by gradients of every size.
pub(crate) fn any_case() -> impl Strategy<Value = Case> {
    let dtype = || prop::sample::select(&DType::ALL[..]);
    let dtypes = (dtype(), prop::option::of(dtype()));
    let divisor = prop_oneof![Just(1.0_f32), 0.5_f32..1.0e6];
    let factor = prop_oneof![Just(1.0_f32), 1.0e-6_f32..1.0];
    let hyper = (0.0..0.1_f64, prop_oneof![Just(0.0), 0.0..0.5_f64]);
    let shape = (0..1300_usize, 1..4_usize).prop_flat_map(|(numel, updates)| {
        let grad = prop::collection::vec(any_value(), numel);
        let master = prop::collection::vec(-2.0_f32..2.0, numel);
        (master, prop::collection::vec(grad, updates), 0..=numel)
    });
    (shape, dtypes, divisor, factor, hyper).prop_map(
        |((master, grads, cut), (grad_dtype, model_dtype), divisor, factor, hyper)| {
            let hyper = Hyper { lr: hyper.0, weight_decay: hyper.1 };
            Case { master, grads, grad_dtype, model_dtype, divisor, factor, hyper, cut }
        },
    )
}

/// Ordinary gradients, gradients around everything that counts as zero, and any bits at all.
fn any_value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -1.0_f32..1.0,
        2 => (-149..-50_i32, -2.0_f32..2.0).prop_map(|(exponent, value)| {
            (f64::from(value) * 2.0_f64.powi(exponent)) as f32
        }),
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => Just(0.0),
    ]
}

fn parts<'a>(
    states: &'a mut [Vec<f32>],
    part: &Range<usize>,
) -> impl Iterator<Item = &'a mut [f32]> {
    states.iter_mut().map(|state| &mut state[part.clone()])
}

fn narrow(values: &[f32], dtype: DType) -> Buffer {
    let mut buffer = Buffer::heap(Numel(values.len()), dtype);
    cast(View::F32(values), buffer.view_mut());
    buffer
}

fn widen(buffer: &Buffer) -> Vec<f32> {
    let mut values = vec![0.0; buffer.numel().0];
    cast(buffer.view(), ViewMut::F32(&mut values));
    values
}

/// Which NaN an operation gives is not promised; everything else is.
fn bits<const N: usize>(values: [f32; N]) -> [u32; N] {
    values.map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() })
}

fn assert_same(got: &[f32], expected: &[f32]) {
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let ([got_bits], [expected_bits]) = (bits([*got]), bits([*expected]));
        assert_eq!(got_bits, expected_bits, "element {index} is {got}, expected {expected}");
    }
}
