//! Every fused operation against the same composed of burn's operations.

use std::sync::Arc;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation};
use oxizero_core::Random;

use super::*;

/// f32 sums of up to 67 terms in another order.
const TOLERANCE: f32 = 5e-6;

fn random<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    let mut random = Random::for_path(seed, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.normal()).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.inner().into_data().try_into_vec().unwrap()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    let scale = expected.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
    assert!(scale > 1e-5, "{what} is trivial");
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= TOLERANCE * scale, "{what}: {got} {expected}");
    }
}

/// The output, and the gradient of each input under a random gradient of the output.
fn run<const A: usize, const B: usize, const C: usize>(
    (a, b): (Tensor<A>, Tensor<B>),
    of: impl Fn(Tensor<A>, Tensor<B>) -> Tensor<C>,
) -> [Vec<f32>; 3] {
    let (a, b) = (a.autodiff().require_grad(), b.autodiff().require_grad());
    let out = of(a.clone(), b.clone());
    let grad = random::<C>(9, out.dims());
    let mut grads = (out.clone() * grad).backward();
    let grad_b = b.grad_remove(&mut grads).map_or_else(Vec::new, values);
    [values(out), values(a.grad_remove(&mut grads).unwrap()), grad_b]
}

fn compare<const A: usize, const B: usize, const C: usize>(
    inputs: (Tensor<A>, Tensor<B>),
    fused: impl Fn(&Tensor<A>, &Tensor<B>) -> Option<Tensor<C>>,
    burn: impl Fn(Tensor<A>, Tensor<B>) -> Tensor<C>,
) {
    let plain = fused(&inputs.0, &inputs.1).expect("f32 on the CPU is fused");
    let got = run(inputs.clone(), |a, b| fused(&a, &b).expect("f32 on the CPU is fused"));
    assert_eq!(values(plain), got[0], "recorded or not, the bits are the same");
    let expected = run(inputs.clone(), burn);
    for ((what, got), expected) in ["output", "first", "second"].iter().zip(got).zip(expected) {
        if !expected.is_empty() {
            assert_close(what, &got, &expected);
        }
    }
    let narrow = (inputs.0.cast(DType::BF16), inputs.1.cast(DType::BF16));
    assert!(fused(&narrow.0, &narrow.1).is_none(), "bf16 is left to burn");
}

/// For operations with one input.
fn unused() -> Tensor<1> {
    random(0, [1])
}

#[test]
fn rms_norm_is_burns() {
    let by_burn = |x: Tensor<2>, w: Tensor<1>| {
        let square = (x.clone() * x.clone()).mean_dim(1);
        x * (square + 1e-5).sqrt().recip() * w.unsqueeze()
    };
    for [rows, width] in [[2, 3], [3, 17], [700, 67]] {
        let inputs = (random(1, [rows, width]), random(2, [width]));
        compare(inputs, |x, w| rms_norm(x, w, 1e-5), by_burn);
    }
}

#[test]
fn swiglu_is_burns() {
    for [rows, width] in [[2, 3], [3, 17], [700, 67]] {
        let inputs = (random(1, [rows, width]) * 4.0, random(2, [rows, width]));
        compare(inputs, swiglu, |gate, up| activation::silu(gate) * up);
    }
}

#[test]
fn causal_softmax_is_burns() {
    let by_burn = |scores: Tensor<4>, _: Tensor<1>| {
        let [_, _, positions, _] = scores.dims();
        let later = Tensor::<2, Bool>::tril_mask([positions, positions], 0, &scores.device());
        activation::softmax(scores.mask_fill(later.unsqueeze(), f32::NEG_INFINITY), 3)
    };
    for [heads, positions] in [[1, 2], [3, 17], [5, 67]] {
        let scores = random(1, [2, heads, positions, positions]) * 3.0;
        compare((scores, unused()), |scores, _| causal_softmax(scores), by_burn);
    }
}

#[test]
fn turned_heads_are_burns() {
    let (shape, half) = ([2, 3, 5, 8], 4);
    let [batch, heads, positions, head] = shape;
    let table = |seed| values(random(seed, [positions * half]));
    let angles = Arc::new(Angles { cos: table(3), sin: table(4) });
    let by_burn = |x: Tensor<2>, _: Tensor<1>| {
        let x = x.reshape([batch, positions, heads, head]).swap_dims(1, 2);
        let (a, b) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let table = |values: &[f32]| {
            let table = Tensor::<1>::from_floats(values, &Device::flex());
            table.reshape([1, 1, positions, half])
        };
        let (cos, sin) = (table(&angles.cos), table(&angles.sin));
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![first, b * cos + a * sin], 3) * 0.5
    };
    let input = random(1, [batch * positions, heads * head]);
    compare((input, unused()), |x, _| split_and_turn(x, shape, &angles, 0.5), by_burn);
}

#[test]
fn cross_entropy_is_burns() {
    for [rows, classes] in [[1, 2], [3, 17], [700, 67]] {
        let numbers: Vec<i64> = (0..rows as i64).map(|i| i * i % classes as i64).collect();
        let targets = Tensor::<1, Int>::from_data(numbers.as_slice(), &Device::flex());
        let by_burn = |logits: Tensor<2>, _: Tensor<1>| {
            let log_probs = activation::log_softmax(logits, 1);
            log_probs.gather(1, targets.clone().unsqueeze_dim(1)).mean().neg()
        };
        let logits = random(1, [rows, classes]) * 3.0;
        compare((logits, unused()), |logits, _| cross_entropy(logits, &targets), by_burn);
    }
}

#[test]
fn a_linear_layer_is_burns() {
    for [rows, inputs, outputs] in [[2, 3, 1], [3, 17, 5], [70, 33, 67]] {
        let (x, w) = (random(1, [rows, inputs]), random(2, [outputs, inputs]));
        compare((x, w), linear, |x, w| x.matmul(w.transpose()));
    }
}

#[test]
fn a_strided_input_is_read_in_its_own_order() {
    let input = random::<2>(1, [17, 3]).transpose();
    let weight = random(2, [17]);
    let straight = Tensor::from_data(input.to_data(), &Device::flex());
    let norm = |input: &Tensor<2>| values(rms_norm(input, &weight, 1e-5).unwrap());
    assert_eq!(norm(&input), norm(&straight));
}
