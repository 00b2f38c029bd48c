//! The transformers, as their `config.json` tells them, against numbers that the library of that
//! name computed (see golden/make_golden.py).

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use burn::tensor::Device;
use common::{Grads, Weights, ids, infer, keep, recompute, scalar, values};
use oxizero_burn::llama::Tokens;
use oxizero_burn::transformer;
use oxizero_core::config::ModelConfig;
use oxizero_core::{DType, ParamSpec};
use safetensors::SafeTensors;

/// f32 sums of at most 31 terms in another order, through two blocks.
const TOLERANCE: f32 = 1e-5;

struct Golden {
    bytes: &'static [u8],
    config: &'static str,
}

macro_rules! golden {
    ($name:literal) => {
        Golden {
            bytes: include_bytes!(concat!("golden/", $name, ".safetensors")),
            config: include_str!(concat!("golden/", $name, ".json")),
        }
    };
}

const GOLDEN: [Golden; 4] =
    [golden!("llama_untied"), golden!("llama_tied"), golden!("gpt2_untied"), golden!("gpt2_tied")];

impl Golden {
    fn model(&self) -> oxizero_burn::Model<Tokens> {
        let config = ModelConfig::from_hub(self.config).unwrap();
        transformer::model(&config, DType::F32, DType::F32, &Device::flex()).unwrap()
    }

    fn tensors(&self) -> SafeTensors<'static> {
        SafeTensors::deserialize(self.bytes).unwrap()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let tensors = self.tensors();
        let bytes = tensors.tensor(name).unwrap().data();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn tokens(&self, name: &str) -> burn::tensor::Tensor<2, burn::tensor::Int> {
        let tensors = self.tensors();
        let bytes = tensors.tensor(name).unwrap().data();
        let numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        ids(numbers.collect(), [2, 9], &Device::flex())
    }

    fn weights(&self, specs: &[ParamSpec]) -> Weights {
        let shapes = self.tensors();
        Weights::new(specs, |spec, target| {
            let name = format!("weight.{}", spec.name);
            assert_eq!(shapes.tensor(&name).unwrap().shape(), spec.shape, "{name}");
            target.copy_from_slice(&self.f32s(&name));
        })
    }

    fn batch(&self) -> Tokens {
        Tokens { tokens: self.tokens("tokens"), targets: Some(self.tokens("targets")) }
    }
}

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
    let worst = got.iter().zip(expected).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
    println!("{what}: {:.1e} of {scale}", worst / scale);
    assert!(worst <= TOLERANCE * scale, "{what}: off by {worst}, of {scale}");
}

#[test]
fn names_and_shapes_are_those_of_the_hub() {
    for golden in GOLDEN {
        let mut names: Vec<_> = golden.model().specs.into_iter().map(|spec| spec.name).collect();
        names.sort();
        let tensors = golden.tensors();
        let stored = tensors.names().into_iter().filter_map(|name| name.strip_prefix("weight."));
        let mut expected: Vec<_> = stored.collect();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}

#[test]
fn logits_and_loss_are_those_of_transformers() {
    for golden in GOLDEN {
        let model = golden.model();
        let weights = golden.weights(&model.specs);
        let batch = golden.batch();
        let loss = scalar(infer(&model, &weights, &batch, None));
        assert_close("loss", &[loss], &golden.f32s("loss"));
        let logits = infer(&model, &weights, &Tokens { targets: None, ..batch }, None);
        assert_eq!(logits.dims(), [2, 9, 31]);
        assert_close("logits", &values(logits), &golden.f32s("logits"));
    }
}

#[test]
fn gradients_are_those_of_transformers() {
    for golden in GOLDEN {
        let model = golden.model();
        let weights = golden.weights(&model.specs);
        let check = |(loss, grads): (f32, Grads)| {
            assert_close("loss", &[loss], &golden.f32s("loss"));
            for spec in &model.specs {
                let name = format!("grad.{}", spec.name);
                let grad = grads.named(&model.specs, &spec.name).expect("every weight is used");
                assert_close(&name, grad, &golden.f32s(&name));
            }
        };
        check(keep(&model, &weights, &golden.batch(), 1));
        check(recompute(&model, &weights, &golden.batch(), 1));
    }
}
