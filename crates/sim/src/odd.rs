//! A model with everything that is odd about parameters, and gradients that show every fault.

use oxizero::{EngineOptions, GroupOptions};
use oxizero_core::{DType, OptimGroup, ParamSpec, Random, UnitId};

use crate::oracle::Rule;
use crate::trial::{At, Ends, Reads, Trial, full_windows};

/// AdamW.
pub const ADAMW: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
/// Adam with factors that round.
pub const ADAM: Rule = Rule::Adam { beta1: 0.4, beta2: 0.99, eps: 1e-6 };
/// SGD with momentum.
pub const SGD: Rule = Rule::Sgd { momentum: 0.9 };

/// Lion.
pub const LION: Rule = Rule::Lion { beta1: 0.9, beta2: 0.97 };
/// Adagrad.
pub const ADAGRAD: Rule = Rule::Adagrad { eps: 1e-10 };

/// A small model with everything that is odd about parameters.
pub fn model_of(options: EngineOptions) -> Trial {
    let model = options.precision.model;
    let spec =
        |unit: usize, name: &str, shape: &[usize]| ParamSpec::new(name, shape, model, UnitId(unit));
    let other = if model == DType::F32 { DType::Bf16 } else { DType::F32 };
    let specs = vec![
        spec(0, "empty at the start", &[0, 8]),
        ParamSpec { contributions: 2, ..spec(0, "tied", &[5, 3]) },
        spec(1, "odd", &[17]),
        ParamSpec { group: OptimGroup(1), ..spec(1, "single", &[1]) },
        ParamSpec { trainable: false, ..spec(1, "frozen", &[7]) },
        ParamSpec { trainable: false, ..spec(2, "alone and frozen", &[3]) },
        spec(3, "never used", &[4]),
        ParamSpec { group: OptimGroup(1), ..spec(3, "sometimes used", &[5]) },
        ParamSpec { dtype: other, ..spec(4, "of another dtype", &[33]) },
        spec(4, "large", &[7, 9]),
        spec(4, "empty at the end", &[0]),
    ];
    let initial = |(index, spec): (usize, &ParamSpec)| {
        let mut random = Random::for_path(1, &[index as u64]);
        (0..spec.numel().0).map(|_| random.normal()).collect()
    };
    Trial {
        initial: specs.iter().enumerate().map(initial).collect(),
        specs,
        options,
        rule: ADAMW,
        groups: vec![
            GroupOptions { lr: 0.0314, weight_decay: 0.1 },
            GroupOptions { lr: 0.1, weight_decay: 0.0 },
        ],
        ranks: 1,
        steps: 4,
        warmup_steps: 2,
        windows: full_windows,
        ends: Ends::Counted,
        backward,
        seed: 0,
        reads: Reads::All,
    }
}

/// Depends on the weights, so that a stale one shows, and is exact in no dtype.
pub fn backward(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    let contributions = match at.param {
        1 => 2 - at.micro % 2,
        6 => 0,
        7 => usize::from((at.step + at.micro + at.pass + at.rank).is_multiple_of(3)),
        _ => 1,
    };
    let contribution = |turn: usize| {
        let path = [at.step, at.micro, at.pass, at.rank, at.param, turn].map(|part| part as u64);
        let mut random = Random::for_path(2 + at.seed, &path);
        weights.iter().map(|weight| random.normal() + 0.3 * weight).collect()
    };
    (0..contributions).map(contribution).collect()
}
