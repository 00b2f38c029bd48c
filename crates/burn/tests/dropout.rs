//! burn's own dropout draws from a generator of the whole process, so this test has one.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use common::{Weights, infer, keep, recompute, scalar};
use oxizero_burn::{Context, Layer, ModelBuilder, Source};
use oxizero_core::{DType, UnitId};

#[derive(Module, Debug)]
struct Dropping {
    linear: Linear,
    dropout: Dropout,
}

impl Source<Tensor<3>> for Dropping {
    fn start(&self, context: &Context<'_, Tensor<3>>) -> Tensor<3> {
        self.dropout.forward(self.linear.forward(context.batch.clone()))
    }
}

impl Layer<Tensor<3>> for Dropping {
    fn run(&self, _: &Context<'_, Tensor<3>>, input: Tensor<3>) -> Tensor<3> {
        self.dropout.forward(self.linear.forward(input)).mean().reshape([1, 1, 1])
    }
}

#[test]
fn burns_dropout_repeats_when_recomputed_and_rests_in_evaluation() {
    let device = Device::flex();
    let module = || Dropping {
        linear: LinearConfig::new(32, 32).init(&device),
        dropout: DropoutConfig::new(0.3).init(),
    };
    let model = ModelBuilder::new(DType::F32, DType::F32, &device)
        .source(UnitId(0), "a", module())
        .layer(UnitId(1), "b", module())
        .build()
        .unwrap();
    let weights = Weights::new(&model.specs, |_, values| {
        values.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 5) as f32);
    });
    let batch = Tensor::ones([2, 8, 32], &device);
    let (loss, grads) = keep(&model, &weights, &batch, 1);
    let (loss_again, grads_again) = recompute(&model, &weights, &batch, 1);
    assert_eq!(loss, loss_again);
    assert!(grads.sums == grads_again.sums);
    assert_ne!(loss, keep(&model, &weights, &batch, 2).0);
    let evaluated = scalar(infer(&model, &weights, &batch, None));
    assert_eq!(evaluated, scalar(infer(&model, &weights, &batch, None)));
    assert_ne!(evaluated, loss);
}
