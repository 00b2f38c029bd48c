//! The Llama model as a chain.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use burn::tensor::{Device, Tensor};
use common::{Weights, ids, infer, keep, recompute, scalar, values};
use oxizero_burn::Model;
use oxizero_burn::llama::{self, Sampling, Tokens};
use oxizero_core::DType;
use oxizero_core::config::ModelConfig;

fn config() -> ModelConfig {
    ModelConfig { hidden_size: 24, intermediate_size: 40, context: 12, ..ModelConfig::default() }
}

fn model(config: &ModelConfig, dtype: DType) -> Model<Tokens> {
    llama::model(config, dtype, DType::F32, &Device::flex()).unwrap()
}

fn weights(config: &ModelConfig, model: &Model<Tokens>) -> Weights {
    Weights::new(&model.specs, |spec, values| llama::init_param(config, &spec.name, 7, values))
}

fn batch(sequences: usize, positions: usize) -> Tokens {
    let numbers = |shift: i64| {
        let numbers = (0..(sequences * positions) as i64).map(|i| (i * i * 31 + shift) % 256);
        ids(numbers.collect(), [sequences, positions], &Device::flex())
    };
    Tokens { tokens: numbers(1), targets: Some(numbers(5)) }
}

#[test]
fn recomputation_gives_the_same_bits_with_and_without_dropout() {
    let mut losses = Vec::new();
    for dropout in [0.0, 0.2] {
        let config = ModelConfig { dropout, ..config() };
        let model = model(&config, DType::Bf16);
        let weights = weights(&config, &model);
        let (loss, grads) = keep(&model, &weights, &batch(3, 12), 1);
        let (loss_again, grads_again) = recompute(&model, &weights, &batch(3, 12), 1);
        assert_eq!(loss, loss_again);
        assert!(grads.sums == grads_again.sums);
        losses.push([loss, keep(&model, &weights, &batch(3, 12), 2).0]);
        losses.last_mut().unwrap().sort_by(f32::total_cmp);
    }
    let [without, with] = [losses[0], losses[1]];
    assert_eq!(without[0], without[1]);
    assert_ne!(with[0], with[1]);
}

#[test]
fn units_are_embedding_blocks_and_head() {
    let tied = model(&config(), DType::F32);
    let untied = model(&ModelConfig { tied: false, ..config() }, DType::F32);
    let units = |model: &Model<Tokens>| model.chain.iter().map(|(u, _)| u.0).collect::<Vec<_>>();
    assert_eq!(units(&tied), [0, 1, 2, 3, 4, 0]);
    assert_eq!(units(&untied), [0, 1, 2, 3, 4, 5]);
    assert_eq!(tied.specs[0].contributions, 2);
    assert!(untied.specs.iter().all(|spec| spec.contributions == 1));
    let names = |model: &Model<Tokens>| model.specs.iter().map(|s| s.name.clone()).collect();
    let tied: Vec<String> = names(&tied);
    assert_eq!(tied[..2], ["model.embed_tokens.weight", "model.norm.weight"]);
    let untied: Vec<String> = names(&untied);
    assert_eq!(untied[untied.len() - 2..], ["model.norm.weight", "lm_head.weight"]);
}

#[test]
fn gradients_do_not_depend_on_the_number_of_threads() {
    // Large enough that products and rows are split over threads.
    let config = ModelConfig { hidden_size: 192, context: 96, layers: 1, dropout: 0.1, ..config() };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let model = model(&config, DType::F32);
            let (loss, grads) = keep(&model, &weights(&config, &model), &batch(8, 96), 1);
            (loss, grads.sums)
        })
    };
    let one = run(1);
    assert!(run(2) == one);
    assert!(run(5) == one);
}

#[test]
fn bf16_arithmetic_is_near_f32s() {
    let config = ModelConfig { tied: false, ..config() };
    let wide = model(&config, DType::Bf16);
    let narrow = llama::model(&config, DType::Bf16, DType::Bf16, &Device::flex()).unwrap();
    let weights = Weights::new(&wide.specs, |spec, values| {
        llama::init_param(&config, &spec.name, 7, values);
        values.iter_mut().for_each(|value| *value *= 4.0); // away from the trivial solution
    });
    let (loss, grads) = keep(&wide, &weights, &batch(3, 12), 1);
    let (narrow_loss, narrow_grads) = keep(&narrow, &weights, &batch(3, 12), 1);
    assert!((loss / narrow_loss - 1.0).abs() < 0.01, "{loss} {narrow_loss}");
    for spec in &wide.specs {
        let a = grads.named(&wide.specs, &spec.name).unwrap();
        let b = narrow_grads.named(&wide.specs, &spec.name).unwrap();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        assert!(cosine > 0.99, "{}: {cosine}", spec.name);
    }
}

#[test]
fn a_fresh_model_knows_nothing_and_learns() {
    let config = config();
    let model = model(&config, DType::F32);
    let mut weights = weights(&config, &model);
    let first = scalar(infer(&model, &weights, &batch(2, 12), None));
    assert!((first - 256_f32.ln()).abs() < 0.1, "{first}");
    for step in 0..30 {
        let (_, grads) = keep(&model, &weights, &batch(2, 12), step);
        weights = Weights::new(&model.specs, |spec, target| {
            let unit = &weights.0[spec.unit.0];
            let mut members = model.specs.iter().filter(|other| other.unit == spec.unit);
            let index = members.position(|other| other.name == spec.name).unwrap();
            let oxizero::GradView::F32(old) = unit.params[index].view() else { panic!() };
            let grad = grads.named(&model.specs, &spec.name).unwrap();
            let step = |((target, old), grad): ((&mut f32, &f32), &f32)| *target = old - 0.5 * grad;
            target.iter_mut().zip(old).zip(grad).for_each(step);
        });
    }
    let last = scalar(infer(&model, &weights, &batch(2, 12), None));
    assert!(last < first - 0.5, "{first} {last}");
}

#[test]
fn a_position_sees_none_after_it() {
    let config = config();
    let model = model(&config, DType::F32);
    let weights = weights(&config, &model);
    let logits = |numbers: Vec<i64>| {
        let shape = [1, numbers.len()];
        let batch = Tokens { tokens: ids(numbers, shape, &Device::flex()), targets: None };
        infer(&model, &weights, &batch, None)
    };
    let (one, other) = (logits(vec![1, 2, 3, 4, 5]), logits(vec![1, 2, 3, 9, 8]));
    let first = |logits: Tensor<3>| values(logits.narrow(1, 0, 3));
    assert_eq!(first(one.clone()), first(other.clone()));
    assert_ne!(values(one.narrow(1, 3, 1)), values(other.narrow(1, 3, 1)));
}

#[test]
fn initial_weights_depend_on_seed_and_name_alone() {
    let fill = |name: &str, seed, numel| {
        let mut values = vec![0.0; numel];
        llama::init_param(&config(), name, seed, &mut values);
        values
    };
    let q = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(fill(q, 1, 50), fill(q, 1, 50));
    assert_eq!(fill(q, 1, 50)[..20], fill(q, 1, 20));
    assert_ne!(fill(q, 1, 50), fill(q, 2, 50));
    assert_ne!(fill(q, 1, 50), fill("model.layers.1.self_attn.q_proj.weight", 1, 50));
    assert_eq!(fill("model.layers.0.post_attention_layernorm.weight", 1, 3), [1.0; 3]);
    assert_eq!(fill("model.norm.weight", 1, 3), [1.0; 3]);
    let std = |name: &str| {
        let values = fill(name, 1, 20_000);
        (values.iter().map(|v| v * v).sum::<f32>() / 2e4).sqrt()
    };
    assert!((std(q) / 0.02 - 1.0).abs() < 0.03);
    let narrowed = 0.02 / 8_f32.sqrt(); // 4 layers
    assert!((std("model.layers.0.mlp.down_proj.weight") / narrowed - 1.0).abs() < 0.03);
}

#[test]
fn a_sample_repeats_and_at_temperature_zero_takes_the_likeliest() {
    let config = config();
    let model = model(&config, DType::F32);
    let weights = weights(&config, &model);
    let sample = |temperature, seed| {
        let mut tokens = vec![72, 101];
        let sampling = Sampling { temperature, seed };
        llama::generate(&mut tokens, 20, config.context, sampling, &Device::flex(), |batch| {
            Ok::<_, std::convert::Infallible>(infer(&model, &weights, batch, None))
        })
        .unwrap();
        tokens
    };
    assert_eq!(sample(1.0, 1), sample(1.0, 1));
    assert_ne!(sample(1.0, 1), sample(1.0, 2));
    assert_eq!(sample(0.0, 1), sample(0.0, 2));
    assert_eq!(sample(0.0, 1).len(), 22);
    let batch = Tokens { tokens: ids(vec![72, 101], [1, 2], &Device::flex()), targets: None };
    let logits = values(infer(&model, &weights, &batch, None).narrow(1, 1, 1));
    let best = (0..256).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    assert_eq!(sample(0.0, 1)[2], best);
}

/// Whoever masks targets with a number such as -100 is told, too.
#[test]
fn a_number_outside_the_vocabulary_is_named() {
    let config = config();
    let model = model(&config, DType::F32);
    let weights = weights(&config, &model);
    let with = |number: i64| ids(vec![1, 2, 3, 4, 5, number], [2, 3], &Device::flex());
    for number in [256, -1, -100, 1 << 30] {
        let target = Tokens { tokens: with(255), targets: Some(with(number)) };
        let token = Tokens { tokens: with(number), targets: Some(with(255)) };
        for (what, batch) in [("target", target), ("token", token)] {
            let run = || infer(&model, &weights, &batch, None);
            let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
            let expected = format!(
                "{what} {number} (sequence 1, position 2) is not in the vocabulary of 256 \
                 (0 to 255)"
            );
            assert_eq!(*said.downcast::<String>().unwrap(), expected);
        }
    }
}

#[test]
#[should_panic(expected = "13 positions, context 12")]
fn a_sequence_longer_than_the_context_is_refused() {
    let model = model(&config(), DType::F32);
    infer(&model, &weights(&config(), &model), &batch(1, 13), None);
}
