//! The GPT-2 model's own promises; see golden.rs for what it computes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use burn::tensor::Device;
use common::{Weights, ids, keep, recompute};
use oxizero_burn::llama::Tokens;
use oxizero_burn::{Model, gpt2};
use oxizero_core::DType;
use oxizero_core::config::{ModelConfig, ModelKind};

fn config() -> ModelConfig {
    ModelConfig {
        kind: ModelKind::Gpt2,
        hidden_size: 192,
        intermediate_size: 300,
        layers: 1,
        heads: 6,
        kv_heads: 6,
        context: 96,
        positions: Some(100),
        dropout: 0.1,
        ..ModelConfig::default()
    }
}

fn model(config: &ModelConfig, dtype: DType) -> Model<Tokens> {
    gpt2::model(config, dtype, DType::F32, &Device::flex()).unwrap()
}

fn weights(config: &ModelConfig, model: &Model<Tokens>) -> Weights {
    Weights::new(&model.specs, |spec, values| gpt2::init_param(config, &spec.name, 7, values))
}

fn batch(sequences: usize, positions: usize) -> Tokens {
    let numbers = |by: i64| (0..(sequences * positions) as i64).map(|n| n * by % 256).collect();
    let tensor = |by| ids(numbers(by), [sequences, positions], &Device::flex());
    Tokens { tokens: tensor(7), targets: Some(tensor(11)) }
}

#[test]
fn recomputation_gives_the_same_bits() {
    let model = model(&config(), DType::Bf16);
    let weights = weights(&config(), &model);
    let (kept, again) =
        (keep(&model, &weights, &batch(2, 40), 1), recompute(&model, &weights, &batch(2, 40), 1));
    assert_eq!(kept.0, again.0);
    assert!(kept.1.sums == again.1.sums);
}

#[test]
fn gradients_do_not_depend_on_the_number_of_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let model = model(&config(), DType::F32);
            let (loss, grads) = keep(&model, &weights(&config(), &model), &batch(8, 96), 1);
            (loss, grads.sums)
        })
    };
    let one = run(1);
    assert!(run(2) == one);
    assert!(run(5) == one);
}

#[test]
fn norms_start_as_ones_biases_as_zeros_and_only_matrices_decay() {
    let (config, model) = (config(), model(&config(), DType::F32));
    for spec in &model.specs {
        let mut values = vec![7.0; spec.numel().0];
        gpt2::init_param(&config, &spec.name, 3, &mut values);
        let is_norm = spec.name.contains(".ln_");
        match (spec.name.ends_with(".bias"), is_norm) {
            (true, _) => assert!(values.iter().all(|value| *value == 0.0), "{}", spec.name),
            (false, true) => assert!(values.iter().all(|value| *value == 1.0), "{}", spec.name),
            (false, false) => assert!(values[0] != values[1], "{}", spec.name),
        }
        assert_eq!(spec.group.0 == 0, spec.shape.len() == 2, "{}", spec.name);
    }
}
