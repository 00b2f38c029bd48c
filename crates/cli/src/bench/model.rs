//! The tensors of a transformer of any size, in any number.

use oxizero_core::{DType, ParamSpec, UnitId};

/// Tensors of a layer: two norms, four matrices of attention, three of the network behind it.
const LAYER_TENSORS: usize = 9;
/// Tensors before and after the layers.
const OUTER_TENSORS: usize = 6;
/// The part of all elements that lies before and after the layers: one in so many.
const OUTER_PART: usize = 5;

/// Fewer elements make no matrices of 1500 tensors.
const PARAMS_MIN: usize = 1 << 18;
/// More than any machine holds, and few enough to count the bytes of.
const PARAMS_MAX: usize = 1 << 50;

/// Reads the elements of a model, for clap.
pub(crate) fn params(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(params @ PARAMS_MIN..=PARAMS_MAX) => Ok(params),
        _ => Err(format!("allowed: {PARAMS_MIN} to {PARAMS_MAX}")),
    }
}

/// Reads a dtype that holds what a bench computes, for clap.
pub(crate) fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        _ => Err("allowed: f32, bf16".into()),
    }
}

/// So many tensors of `numel` elements together: an embedding, layers, a head; each a unit.
///
/// # Panics
///
/// If the layers do not come out even, or there are not elements enough.
pub(crate) fn specs(numel: usize, tensors: usize, dtype: DType) -> Vec<ParamSpec> {
    assert_eq!((tensors - OUTER_TENSORS) % LAYER_TENSORS, 0, "{tensors} tensors");
    let layers = (tensors - OUTER_TENSORS) / LAYER_TENSORS;
    // A layer has about 12 width^2 elements.
    let width = ((numel - numel / OUTER_PART) / layers / 12).isqrt();
    let inner = 8 * width / 3;
    let mut specs = Vec::with_capacity(tensors);
    let mut add = |unit: usize, name: &str, shape: &[usize]| {
        specs.push(ParamSpec::new(format!("{unit}.{name}"), shape, dtype, UnitId(unit)));
    };
    let layer = 2 * width + 4 * width * width + 3 * width * inner;
    let outer = numel - layers * layer - 3 * width;
    // The head's bias takes what does not fill a row of both matrices.
    let rows = (outer - 1) / (2 * width);
    add(0, "embedding", &[rows, width]);
    add(0, "embedding_norm", &[width]);
    for unit in 1..=layers {
        add(unit, "attention_norm", &[width]);
        for name in ["query", "key", "value", "output"] {
            add(unit, name, &[width, width]);
        }
        add(unit, "norm", &[width]);
        add(unit, "gate", &[inner, width]);
        add(unit, "up", &[inner, width]);
        add(unit, "down", &[width, inner]);
    }
    let head = layers + 1;
    add(head, "norm", &[width]);
    add(head, "head_norm", &[width]);
    add(head, "head", &[rows, width]);
    add(head, "head_bias", &[outer - 2 * rows * width]);
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_tensors_and_elements_as_asked_for_and_most_are_matrices() {
        for numel in [1 << 18, (1 << 18) + 1, 1_000_003, 1 << 27] {
            for tensors in [150, 1500] {
                let specs = specs(numel, tensors, DType::F32);
                assert_eq!(specs.len(), tensors);
                assert_eq!(specs.iter().map(|spec| spec.numel().0).sum::<usize>(), numel);
                assert!(specs.iter().all(|spec| spec.numel().0 > 0));
                let matrices = specs.iter().filter(|spec| spec.shape.len() == 2).count();
                assert!(matrices > tensors / 2);
            }
        }
    }
}
