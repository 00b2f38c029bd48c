//! The kernels against the plainest loops that do the same, element by element and bit by bit.

use std::ops::Range;

use half::{bf16, f16};
use oxizero_core::{DType, Numel};
use oxizero_device::kernels::{
    Combine, Power, accumulate, adopt, cast, divide, divided_largest, divided_powers,
    divided_squares, holds, tree_sum,
};
use oxizero_device::{Buffer, View, ViewMut};
use proptest::prelude::*;

/// Lengths around the kernels' inner vectors and blocks.
const LENGTH_MAX: usize = 1100;

/// A buffer of the values, each rounded by `half`'s scalar conversion.
fn buffer(dtype: DType, values: &[f32]) -> Buffer {
    let mut buffer = Buffer::heap(Numel(values.len()), dtype);
    match buffer.view_mut() {
        ViewMut::F32(target) => target.copy_from_slice(values),
        ViewMut::Bf16(target) => {
            target.iter_mut().zip(values).for_each(|(t, v)| *t = bf16::from_f32(*v));
        }
        ViewMut::F16(target) => {
            target.iter_mut().zip(values).for_each(|(t, v)| *t = f16::from_f32(*v));
        }
        ViewMut::Device(_) => unreachable!("the heap is the host's"),
    }
    buffer
}

/// The elements as f32, by `half`'s scalar conversion.
fn wide(view: View<'_>) -> Vec<f32> {
    match view {
        View::F32(values) => values.to_vec(),
        View::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        View::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        View::Device(_) => unreachable!("the heap is the host's"),
    }
}

/// Bits that are equal for equal elements. Which NaN an operation on NaNs gives is not promised.
fn bits(values: &[f32]) -> Vec<u32> {
    let bits = |value: &f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    values.iter().map(bits).collect()
}

fn assert_holds(got: &Buffer, expected: &[f32]) {
    let expected = wide(buffer(got.dtype(), expected).view());
    assert_eq!(bits(&wide(got.view())), bits(&expected), "{}", got.dtype());
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL[..])
}

/// Any f32 there is, with extra weight on the special and on the ordinary ones.
fn any_value() -> impl Strategy<Value = f32> {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        -f32::MIN_POSITIVE / 3.0,
        65504.0,
        65520.0,
        6.0e-8,
    ];
    prop_oneof![
        4 => any::<u32>().prop_map(f32::from_bits),
        8 => -100.0_f32..100.0,
        1 => prop::sample::select(special.to_vec()),
    ]
}

fn any_values() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(any_value(), 0..LENGTH_MAX)
}

/// So many inputs of one length.
fn any_inputs(count: Range<usize>) -> impl Strategy<Value = Vec<Vec<f32>>> {
    (count, 0..LENGTH_MAX).prop_flat_map(|(count, numel)| {
        prop::collection::vec(prop::collection::vec(any_value(), numel), count)
    })
}

/// The documented tree, by its definition.
fn tree(values: &[f32]) -> f32 {
    match values {
        [only] => *only,
        _ => {
            let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
            tree(left) + tree(right)
        }
    }
}

fn naive_squares(values: &[f32], divisor: f32) -> (f64, bool) {
    let mut lanes = [0.0_f64; 16];
    for (index, value) in values.iter().enumerate() {
        let quotient = f64::from(value / divisor);
        lanes[index % 16] += quotient * quotient;
    }
    let sum = lanes.into_iter().fold(0.0, |sum, lane| sum + lane);
    (sum, values.iter().all(|value| (value / divisor).is_finite()))
}

/// A failing input is printed, not kept in a file.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn cast_rounds_each_element_once(
        values in any_values(), from in any_dtype(), to in any_dtype(),
    ) {
        let source = buffer(from, &values);
        let mut target = Buffer::heap(source.numel(), to);
        cast(source.view(), target.view_mut());
        if from == to {
            prop_assert_eq!(source.region().bytes(), target.region().bytes());
        } else {
            assert_holds(&target, &wide(source.view()));
        }
        if holds(to, from) {
            let mut back = Buffer::heap(source.numel(), from);
            cast(target.view(), back.view_mut());
            prop_assert_eq!(bits(&wide(back.view())), bits(&wide(source.view())));
        }
    }

    #[test]
    fn accumulate_adds_in_f32_and_rounds_once(
        both in any_inputs(2..3), from in any_dtype(), to in any_dtype(),
    ) {
        let (source, before) = (buffer(from, &both[0]), buffer(to, &both[1]));
        let mut target = buffer(to, &both[1]);
        accumulate(source.view(), target.view_mut(), Combine::Add);
        let sums: Vec<f32> =
            wide(before.view()).iter().zip(wide(source.view())).map(|(b, s)| b + s).collect();
        assert_holds(&target, &sums);

        accumulate(source.view(), target.view_mut(), Combine::Assign);
        assert_holds(&target, &wide(source.view()));
    }

    #[test]
    fn tree_sum_is_the_documented_tree(
        inputs in any_inputs(1..10),
        dtypes in prop::collection::vec(any_dtype(), 10),
        to in any_dtype(),
        add in any::<bool>(),
    ) {
        let buffers: Vec<_> =
            inputs.iter().zip(&dtypes).map(|(values, dtype)| buffer(*dtype, values)).collect();
        let views: Vec<_> = buffers.iter().map(Buffer::view).collect();
        let columns: Vec<_> = views.iter().map(|view| wide(*view)).collect();
        let mut target = buffer(to, &inputs[0]);
        let before = wide(target.view());
        let sums: Vec<f32> = (0..inputs[0].len())
            .map(|index| {
                let sum = tree(&columns.iter().map(|column| column[index]).collect::<Vec<_>>());
                if add { before[index] + sum } else { sum }
            })
            .collect();
        tree_sum(&views, target.view_mut(), if add { Combine::Add } else { Combine::Assign });
        assert_holds(&target, &sums);
    }

    /// Values of like size, for beside a huge one the others are lost in any order.
    #[test]
    fn squares_add_in_sixteen_lanes(
        values in prop::collection::vec(-100.0_f32..100.0, 0..LENGTH_MAX),
        dtype in any_dtype(),
        divisor in 0.1_f32..1.0e6,
    ) {
        let grad = buffer(dtype, &values);
        let got = divided_squares(grad.view(), divisor);
        let (sum, finite) = naive_squares(&wide(grad.view()), divisor);
        prop_assert_eq!((got.sum.to_bits(), got.finite), (sum.to_bits(), finite));
    }

    #[test]
    fn squares_are_finite_where_every_quotient_is(
        values in any_values(), dtype in any_dtype(), divisor in 0.1_f32..1.0e6,
    ) {
        let grad = buffer(dtype, &values);
        let got = divided_squares(grad.view(), divisor);
        let (sum, finite) = naive_squares(&wide(grad.view()), divisor);
        prop_assert_eq!(got.finite, finite);
        prop_assert!(got.sum == sum || got.sum.is_nan() && sum.is_nan());
    }

    #[test]
    fn squares_depend_on_the_elements_and_not_on_where_they_lie(
        values in prop::collection::vec(-1.0e3_f32..1.0e3, 0..LENGTH_MAX), offset in 1..20_usize,
    ) {
        let moved = [vec![f32::NAN; offset], values.clone()].concat();
        let at_start = divided_squares(View::F32(&values), 3.0);
        let elsewhere = divided_squares(View::F32(&moved[offset..]), 3.0);
        prop_assert_eq!(at_start, elsewhere);
    }

    #[test]
    fn divide_is_a_true_division_that_rounds_once(
        values in any_values(), dtype in any_dtype(), divisor in 0.1_f32..1.0e6,
    ) {
        let mut grad = buffer(dtype, &values);
        let quotients: Vec<f32> = wide(grad.view()).iter().map(|value| value / divisor).collect();
        divide(grad.view_mut(), divisor);
        assert_holds(&grad, &quotients);
    }
}

#[test]
fn trees_of_three_four_and_five_add_as_documented() {
    // Each order of these additions gives another sum: 1 is lost beside 2^24, but not beside 2.
    let (big, one) = (16_777_216.0_f32, 1.0_f32);
    let sum_of = |values: &[f32]| {
        let inputs: Vec<_> = values.chunks(1).map(View::F32).collect();
        let mut sum = [0.0];
        tree_sum(&inputs, ViewMut::F32(&mut sum), Combine::Assign);
        sum[0]
    };
    assert_eq!(sum_of(&[big, one, one]), (big + one) + one);
    assert_eq!(sum_of(&[one, one, big]), (one + one) + big);
    assert_eq!(sum_of(&[big, one, one, one]), (big + one) + (one + one));
    assert_eq!(sum_of(&[big, one, one, one, one]), ((big + one) + (one + one)) + one);
    assert_ne!((big + one) + (one + one), ((big + one) + one) + one);
}

/// Every bf16, and every f32 whose lower half decides the rounding: below, at and above the tie.
#[test]
fn bf16_is_widened_as_it_is_and_narrowed_as_by_the_half_crate_on_every_input() {
    let every: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let mut widened = vec![0.0; every.len()];
    cast(View::Bf16(&every), ViewMut::F32(&mut widened));
    for (wide, narrow) in widened.iter().zip(&every) {
        assert_eq!(wide.to_bits(), u32::from(narrow.to_bits()) << 16);
    }
    for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
        let values: Vec<f32> =
            (0..=u16::MAX).map(|upper| f32::from_bits(u32::from(upper) << 16 | lower)).collect();
        let mut narrowed = vec![bf16::ZERO; values.len()];
        cast(View::F32(&values), ViewMut::Bf16(&mut narrowed));
        for (value, narrow) in values.iter().zip(&narrowed) {
            let expected = bf16::from_f32(*value);
            assert_eq!(narrow.to_bits(), expected.to_bits(), "{:#x}", value.to_bits());
        }
    }
}

#[test]
fn f16_conversions_round_ties_to_even_and_keep_nan_and_infinity() {
    let values = [1.0 + 2.0_f32.powi(-11), 1.0 + 3.0 * 2.0_f32.powi(-11), 65520.0, f32::NAN, -1e-9];
    let mut narrowed = [f16::ZERO; 5];
    cast(View::F32(&values), ViewMut::F16(&mut narrowed));
    assert_eq!(narrowed[0].to_f32(), 1.0);
    assert_eq!(narrowed[1].to_f32(), 1.0 + 2.0_f32.powi(-9));
    assert_eq!(narrowed[2], f16::INFINITY);
    assert!(narrowed[3].is_nan());
    assert_eq!(narrowed[4].to_bits(), f16::NEG_ZERO.to_bits());
}

#[test]
fn three_ranks_of_one_average_to_exactly_one() {
    let ones = [bf16::ONE; 5];
    let mut sum = [0.0_f32; 5];
    tree_sum(&[View::Bf16(&ones); 3], ViewMut::F32(&mut sum), Combine::Assign);
    divide(ViewMut::F32(&mut sum), 3.0);
    assert_eq!(sum, [1.0; 5]);
}

#[test]
fn a_norm_of_narrow_elements_is_not_narrow() {
    let ones = [bf16::ONE; 4096];
    assert_eq!(divided_squares(View::Bf16(&ones), 1.0).sum.sqrt(), 64.0);
    let large = [f16::from_f32(300.0)];
    assert_eq!(divided_squares(View::F16(&large), 1.0).sum.sqrt(), 300.0);
}

#[test]
fn powers_are_of_magnitudes() {
    let values: Vec<f32> = (0..700).map(|i| (i % 5) as f32 - 2.0).collect();
    for (power, sum) in [(Power::One, 840.0), (Power::Two, 1400.0), (Power::Three, 2520.0)] {
        assert_eq!(divided_powers(View::F32(&values), 1.0, power).sum, sum);
    }
    let huge = divided_powers(View::F32(&[f32::MAX; 600]), 1.0, Power::Three);
    assert!(huge.finite && huge.sum > 1e117);
    assert!(!divided_powers(View::F32(&[f32::NAN]), 1.0, Power::One).finite);
}

#[test]
fn the_largest_quotient_is_found_wherever_it_is() {
    for numel in [1, 15, 16, 17, 511, 513] {
        for place in [0, numel / 2, numel - 1] {
            let mut values = vec![bf16::from_f32(2.0); numel];
            values[place] = bf16::from_f32(-9.0);
            assert_eq!(divided_largest(View::Bf16(&values), 3.0), 3.0);
        }
    }
    assert_eq!(divided_largest(View::F32(&[]), 1.0), 0.0);
}

/// Whether `accumulate` finds every element of `values` finite.
fn all_finite(values: View<'_>) -> bool {
    let mut target = Buffer::heap(values.numel(), DType::F32);
    accumulate(values, target.view_mut(), Combine::Assign)
}

#[test]
fn one_infinite_or_nan_quotient_is_noticed_wherever_it_is() {
    for numel in [1, 15, 16, 17, 511, 513] {
        for place in [0, numel / 2, numel - 1] {
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut values = vec![f32::MAX; numel];
                assert!(divided_squares(View::F32(&values), 1.0).finite);
                assert!(all_finite(View::F32(&values)));
                values[place] = bad;
                assert!(!divided_squares(View::F32(&values), 1.0).finite);
                assert!(!all_finite(View::F32(&values)));
                let narrow: Vec<_> = values.iter().map(|v| bf16::from_f32(v / 2.0)).collect();
                assert!(
                    !all_finite(View::Bf16(&narrow)) && all_finite(View::Bf16(&narrow[..place]))
                );
                let narrow: Vec<_> = values.iter().map(|v| f16::from_f32(v / 1e34)).collect();
                assert!(!all_finite(View::F16(&narrow)) && all_finite(View::F16(&narrow[..place])));
                let largest = divided_largest(View::F32(&values), 1.0);
                assert!(!largest.is_finite() && largest.is_nan() == bad.is_nan());
            }
        }
    }
    assert!(!divided_squares(View::F32(&[f32::MAX]), 0.5).finite);
    let nothing = divided_squares(View::F32(&[]), 1.0);
    assert!(nothing.finite && nothing.sum.to_bits() == 0);
}

#[test]
fn adopted_elements_are_those_that_were_written() {
    for dtype in DType::ALL {
        let master: Vec<f32> = (0..1200).map(|index| 1.0 + index as f32 * 1e-5).collect();
        let mut model = buffer(dtype, &master);
        let mut adopting = master.clone();
        adopt(model.view(), ViewMut::F32(&mut adopting));
        assert_eq!(adopting, master, "nothing was written");
        let written = buffer(dtype, &[-3.0]);
        for place in [0, 511, 512, 1199] {
            cast(written.view(), model.range_mut(place..place + 1));
        }
        adopt(model.view(), ViewMut::F32(&mut adopting));
        let expected = (0..1200).map(|index| match index {
            0 | 511 | 512 | 1199 => -3.0,
            _ => master[index],
        });
        assert_eq!(adopting, expected.collect::<Vec<_>>());
    }
}

#[test]
#[should_panic(expected = "a cast between different lengths")]
fn casting_between_lengths_is_refused() {
    cast(View::F32(&[1.0]), ViewMut::F32(&mut []));
}

#[test]
#[should_panic(expected = "input 1 of a sum")]
fn summing_different_lengths_is_refused() {
    let inputs = [View::F32(&[1.0]), View::F32(&[1.0, 2.0])];
    tree_sum(&inputs, ViewMut::F32(&mut [0.0]), Combine::Assign);
}

#[test]
#[should_panic(expected = "a sum of no inputs")]
fn a_sum_of_nothing_is_refused() {
    tree_sum(&[], ViewMut::F32(&mut []), Combine::Assign);
}
