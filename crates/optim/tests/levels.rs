//! Every level of the CPU updates to the bits of the plainest.
//!
//! The level is the process's, so this test has a process of its own.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should fail")]

use oxizero_core::{DType, Numel};
use oxizero_device::kernels::cast;
use oxizero_device::simd::Level;
use oxizero_device::{Buffer, View, ViewMut};
use oxizero_optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Gradient, Hyper, Lion, LionOptions, MomentOptions,
    Momentum, Optimizer, Sgd, Weights,
};
use proptest::prelude::*;

fn every_rule() -> Vec<Box<dyn Optimizer>> {
    let late = MomentOptions { beta1: 0.4, ..MomentOptions::default() };
    vec![
        Box::new(Adam::new(MomentOptions::default()).unwrap()),
        Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        Box::new(AdamW::new(late).unwrap()),
        Box::new(Lion::new(LionOptions::default()).unwrap()),
        Box::new(Adagrad::new(AdagradOptions::default()).unwrap()),
        Box::new(Sgd::new(Momentum::None).unwrap()),
        Box::new(Sgd::new(Momentum::None).unwrap().keeping_buffer()),
        Box::new(Sgd::new(Momentum::Classical(0.9)).unwrap()),
        Box::new(Sgd::new(Momentum::Nesterov(0.9)).unwrap()),
    ]
}

/// Two updates of one parameter, whose elements lie at any offset in their buffers.
#[derive(Clone, Debug)]
struct Case {
    grads: Vec<f32>,
    masters: Vec<f32>,
    offset: usize,
    grad_dtype: DType,
    model_dtype: Option<DType>,
    divisor: f32,
    factor: f32,
}

impl Case {
    fn run(&self, rule: &dyn Optimizer) -> Vec<Vec<u32>> {
        let part = self.offset..self.offset + self.grads.len();
        let buffer = |dtype, values: &[f32]| {
            let mut buffer = Buffer::heap(Numel(part.end), dtype);
            cast(View::F32(values), buffer.range_mut(part.clone()));
            buffer
        };
        let grads = buffer(self.grad_dtype, &self.grads);
        let mut master = buffer(DType::F32, &self.masters);
        let initial = vec![rule.initial_state(); self.grads.len()];
        let mut states: Vec<_> =
            rule.state_names().iter().map(|_| buffer(DType::F32, &initial)).collect();
        let mut model = self.model_dtype.map(|dtype| Buffer::heap(Numel(part.end), dtype));
        for step in 1..=2 {
            let values = grads.range(part.clone());
            let grad = Gradient { values, divisor: self.divisor, factor: self.factor };
            let mut states: Vec<_> =
                states.iter_mut().map(|state| state.range_mut(part.clone())).collect();
            let master = master.range_mut(part.clone());
            let model = model.as_mut().map(|model| model.range_mut(part.clone()));
            let hyper = Hyper { lr: 1e-3, weight_decay: 0.1 };
            rule.update(hyper, step, grad, Weights { master, states: &mut states, model });
        }
        states.iter().chain([&master]).chain(&model).map(bits).collect()
    }
}

/// The elements' bits. Which NaN an operation gives is not promised.
fn bits(buffer: &Buffer) -> Vec<u32> {
    let mut wide = vec![0.0; buffer.numel().0];
    cast(buffer.view(), ViewMut::F32(&mut wide));
    let bits = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
    wide.iter().map(bits).collect()
}

fn any_case() -> impl Strategy<Value = Case> {
    let numel = prop_oneof![0..6_usize, 60..70_usize, 120..300_usize];
    let elements = numel.prop_flat_map(|numel| {
        let grad = prop_oneof![
            3 => -1.0_f32..1.0,
            1 => any::<u32>().prop_map(f32::from_bits),
            1 => (-149..-20_i32).prop_map(|power| 2.0_f64.powi(power) as f32),
        ];
        let grads = prop::collection::vec(grad, numel);
        (grads, prop::collection::vec(-2.0_f32..2.0, numel))
    });
    let dtype = || prop::sample::select(&DType::ALL[..]);
    let dtypes = (dtype(), prop::option::of(dtype()));
    let divisor = prop_oneof![Just(1.0_f32), Just(8.0), Just(3.0), 0.5_f32..1.0e6];
    let factor = prop_oneof![Just(1.0_f32), 1.0e-6_f32..1.0];
    (elements, 0..40_usize, dtypes, divisor, factor).prop_map(
        |((grads, masters), offset, (grad_dtype, model_dtype), divisor, factor)| Case {
            grads,
            masters,
            offset,
            grad_dtype,
            model_dtype,
            divisor,
            factor,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn updates_are_the_same_at_every_level(case in any_case()) {
        for rule in every_rule() {
            Level::Plain.select();
            let plain = case.run(&*rule);
            for level in Level::of_cpu() {
                level.select();
                prop_assert_eq!(case.run(&*rule), plain.clone(), "{:?} {}", rule, level.name());
            }
        }
    }
}
