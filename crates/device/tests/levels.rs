//! Every level of the CPU gives the bits of the plainest.
//!
//! The level is the process's, so these tests have a process of their own, and take turns.

use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use oxizero_core::{DType, Numel};
use oxizero_device::kernels::{
    Combine, Power, accumulate, adopt, cast, divide, divided_largest, divided_powers, tree_sum,
    tree_sum_in_place,
};
use oxizero_device::simd::Level;
use oxizero_device::{Buffer, View, ViewMut};
use proptest::prelude::*;

static TURN: Mutex<()> = Mutex::new(());

/// What `work` returns is the same at every level.
fn assert_same_at_every_level<R: PartialEq + std::fmt::Debug>(work: impl Fn() -> R) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Level::Plain.select();
    let plain = work();
    for level in Level::of_cpu() {
        level.select();
        assert_eq!(work(), plain, "{}", level.name());
    }
}

/// The elements' bits. Where `sums` of NaNs may be another NaN at another level, all are one.
fn bits(view: View<'_>, sums: bool) -> Vec<u32> {
    let of = |bits: u32, is_nan: bool| if sums && is_nan { u32::MAX } else { bits };
    match view {
        View::F32(values) => values.iter().map(|v| of(v.to_bits(), v.is_nan())).collect(),
        View::Bf16(values) => values.iter().map(|v| of(v.to_bits().into(), v.is_nan())).collect(),
        View::F16(values) => values.iter().map(|v| of(v.to_bits().into(), v.is_nan())).collect(),
        View::Device(_) => unreachable!("the heap is the host's"),
    }
}

/// Elements of any bits, with so many before them that are not looked at: any alignment.
#[derive(Clone, Debug)]
struct Elements {
    dtype: DType,
    offset: usize,
    bits: Vec<u32>,
}

impl Elements {
    fn buffer(&self) -> Buffer {
        let poison = vec![u32::MAX; self.offset];
        let bits: Vec<u32> = [poison, self.bits.clone()].concat();
        let mut buffer = Buffer::heap(Numel(bits.len()), self.dtype);
        match buffer.view_mut() {
            ViewMut::F32(all) => {
                all.iter_mut().zip(bits).for_each(|(e, bits)| *e = f32::from_bits(bits));
            }
            ViewMut::Bf16(all) => all.iter_mut().zip(bits).for_each(|(e, bits)| {
                *e = bf16::from_bits((bits >> 16) as u16);
            }),
            ViewMut::F16(all) => all.iter_mut().zip(bits).for_each(|(e, bits)| {
                *e = f16::from_bits((bits >> 16) as u16);
            }),
            ViewMut::Device(_) => unreachable!("the heap is the host's"),
        }
        buffer
    }

    fn view<'a>(&self, buffer: &'a Buffer) -> View<'a> {
        buffer.range(self.offset..buffer.numel().0)
    }

    fn view_mut<'a>(&self, buffer: &'a mut Buffer) -> ViewMut<'a> {
        buffer.range_mut(self.offset..buffer.numel().0)
    }

    /// The elements after `change`; what is before them stays as it is.
    fn changed(&self, sums: bool, change: impl Fn(ViewMut<'_>)) -> Vec<u32> {
        let mut buffer = self.buffer();
        let before = bits(buffer.range(0..self.offset), false);
        change(self.view_mut(&mut buffer));
        assert_eq!(bits(buffer.range(0..self.offset), false), before, "poison is written to");
        bits(self.view(&buffer), sums)
    }
}

/// Lengths around the rows that kernels work on.
fn any_numel() -> impl Strategy<Value = usize> {
    prop_oneof![0..6_usize, 60..70_usize, 120..200_usize, 0..700_usize]
}

fn any_elements(numel: usize) -> impl Strategy<Value = Elements> {
    let special = [0.0, f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 65520.0, 6.0e-8];
    let bits = prop_oneof![
        3 => any::<u32>(),
        6 => (-100.0_f32..100.0).prop_map(f32::to_bits),
        1 => (prop::sample::select(special.to_vec()), any::<bool>())
            .prop_map(|(value, negative)| if negative { -value } else { value }.to_bits()),
    ];
    let dtype = prop::sample::select(&DType::ALL[..]);
    (dtype, 0..40_usize, prop::collection::vec(bits, numel))
        .prop_map(|(dtype, offset, bits)| Elements { dtype, offset, bits })
}

/// So many of one length.
fn some_elements(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Elements>> {
    any_numel()
        .prop_flat_map(move |numel| prop::collection::vec(any_elements(numel), count.clone()))
}

fn any_divisor() -> impl Strategy<Value = f32> {
    prop_oneof![Just(1.0), Just(65_536.0), Just(0.125), Just(3.0), 1.0e-3_f32..1.0e6]
}

/// A failing input is printed, not kept in a file.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn casts_are_the_same_to_the_last_bit_of_a_nan(both in some_elements(2..3)) {
        assert_same_at_every_level(|| {
            let source = both[0].buffer();
            both[1].changed(false, |target| cast(both[0].view(&source), target))
        });
    }

    #[test]
    fn sums_are_the_same(all in some_elements(2..11), add in any::<bool>()) {
        let combine = if add { Combine::Add } else { Combine::Assign };
        let (target, inputs) = (&all[0], &all[1..]);
        assert_same_at_every_level(|| {
            let buffers: Vec<_> = inputs.iter().map(Elements::buffer).collect();
            let views: Vec<_> =
                inputs.iter().zip(&buffers).map(|(input, buffer)| input.view(buffer)).collect();
            target.changed(true, |target| tree_sum(&views, target, combine))
        });
    }

    /// The target's own elements take their place in the tree.
    #[test]
    fn sums_in_place_are_those_beside(all in some_elements(1..10), place in 0..10_usize) {
        let place = place.min(all.len() - 1);
        let sum = |in_place: bool| {
            let buffers: Vec<_> = all.iter().map(Elements::buffer).collect();
            let views: Vec<_> =
                all.iter().zip(&buffers).map(|(input, buffer)| input.view(buffer)).collect();
            all[place].changed(true, |target| match in_place {
                true => tree_sum_in_place(&views[..place], target, &views[place + 1..]),
                false => tree_sum(&views, target, Combine::Assign),
            })
        };
        assert_same_at_every_level(|| sum(true));
        assert_eq!(sum(true), sum(false));
    }

    #[test]
    fn accumulation_is_the_same(both in some_elements(2..3), add in any::<bool>()) {
        let combine = if add { Combine::Add } else { Combine::Assign };
        assert_same_at_every_level(|| {
            let source = both[0].buffer();
            let mut target = both[1].buffer();
            let (from, to) = (both[0].view(&source), both[1].view_mut(&mut target));
            let finite = accumulate(from, to, combine);
            (finite, bits(target.view(), true))
        });
    }

    #[test]
    fn division_and_norms_are_the_same(
        elements in some_elements(1..2), divisor in any_divisor(),
    ) {
        let elements = &elements[0];
        assert_same_at_every_level(|| {
            let grad = elements.buffer();
            let grad = elements.view(&grad);
            let powers = [Power::One, Power::Two, Power::Three].map(|power| {
                let powers = divided_powers(grad, divisor, power);
                let sum = if powers.sum.is_nan() { f64::NAN } else { powers.sum };
                (sum.to_bits(), powers.finite)
            });
            let largest = divided_largest(grad, divisor).to_bits();
            (powers, largest, elements.changed(false, |grad| divide(grad, divisor)))
        });
    }

    /// Masters that the given elements are roundings of, and others.
    #[test]
    fn what_is_adopted_is_the_same(given in some_elements(1..2), every in 1..5_usize) {
        let given = &given[0];
        assert_same_at_every_level(|| {
            let source = given.buffer();
            let mut master = Buffer::heap(given.view(&source).numel(), DType::F32);
            cast(given.view(&source), master.view_mut());
            for value in master.f32_mut(0..given.bits.len()).iter_mut().step_by(every) {
                *value *= 1.001;
            }
            adopt(given.view(&source), master.view_mut());
            bits(master.view(), false)
        });
    }
}

/// What is more than a cache holds takes another way to memory.
#[test]
fn large_outputs_are_written_whole() {
    for dtype in DType::ALL {
        for offset in [0, 1, 32] {
            let numel = (5 << 20) / 4 + 3;
            let values: Vec<f32> = (0..numel).map(|index| (index % 251) as f32).collect();
            let mut target = Buffer::heap(Numel(numel + offset), dtype);
            cast(View::F32(&values), target.range_mut(offset..offset + numel));
            let mut back = vec![0.0; numel];
            cast(target.range(offset..offset + numel), ViewMut::F32(&mut back));
            assert_eq!(back, values);
        }
    }
}

#[test]
fn levels_have_the_names_by_which_they_are_chosen() {
    let names: Vec<_> = Level::of_cpu().map(Level::name).collect();
    assert_eq!(names[..], ["plain", "avx2", "avx512"][..names.len()]);
    assert!(Level::of_cpu().any(|level| level == Level::current()));
}
