//! Loops that the compiler vectorises, and the threads they run on.

use rayon::prelude::*;

/// Elements that are worth a task of their own.
const TASK_NUMEL: usize = 1 << 14;

/// Lanes in which sums are kept, whatever the width of the CPU's vectors.
const LANES: usize = 16;

/// Runs `work` with the widest instructions that both it and the CPU are known to have. `work`
/// and what it calls must be inlined to profit.
#[inline(always)]
fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V3::try_new() {
        return pulp::Simd::vectorize(simd, Work(work));
    }
    work()
}

#[cfg(target_arch = "x86_64")]
struct Work<F>(F);

#[cfg(target_arch = "x86_64")]
impl<R, F: FnOnce() -> R> pulp::NullaryFnOnce for Work<F> {
    type Output = R;

    #[inline(always)]
    fn call(self) -> R {
        (self.0)()
    }
}

/// Calls `work(row, its elements)` for each row of `out`; rows may run on several threads.
pub(super) fn each_row(
    out: &mut [f32],
    width: usize,
    work: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    if out.is_empty() {
        return;
    }
    let rows = (TASK_NUMEL / width).max(1);
    let task = |(index, block): (usize, &mut [f32])| {
        vectorized(|| {
            for (row, values) in block.chunks_exact_mut(width).enumerate() {
                work(index * rows + row, values);
            }
        });
    };
    if rayon::current_num_threads() == 1 {
        // Without a pool's thread to hand it to, and back.
        out.chunks_mut(rows * width).enumerate().for_each(task);
    } else {
        out.par_chunks_mut(rows * width).enumerate().for_each(task);
    }
}

/// Calls `work(row, its elements in a, its elements in b)` for each row of two outputs.
pub(super) fn each_row2(
    [a, b]: [&mut [f32]; 2],
    [width_a, width_b]: [usize; 2],
    work: impl Fn(usize, &mut [f32], &mut [f32]) + Send + Sync,
) {
    if a.is_empty() || b.is_empty() {
        return;
    }
    let rows = (TASK_NUMEL / width_a).max(1);
    let task = |(index, (a, b)): (usize, (&mut [f32], &mut [f32]))| {
        vectorized(|| {
            let blocks = a.chunks_exact_mut(width_a).zip(b.chunks_exact_mut(width_b));
            for (row, (a, b)) in blocks.enumerate() {
                work(index * rows + row, a, b);
            }
        });
    };
    if rayon::current_num_threads() == 1 {
        let blocks = a.chunks_mut(rows * width_a).zip(b.chunks_mut(rows * width_b));
        blocks.enumerate().for_each(task);
    } else {
        let b = b.par_chunks_mut(rows * width_b);
        a.par_chunks_mut(rows * width_a).zip(b).enumerate().for_each(task);
    }
}

/// The sum of `of(a, b)` over pairs of elements.
#[inline(always)]
pub(super) fn sum_of(a: &[f32], b: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += of(a[lane], b[lane]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += of(*a, *b);
    }
    fold(lanes, |a, b| a + b)
}

/// The largest element.
#[inline(always)]
pub(super) fn max_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(chunk[lane], lanes[lane]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*value, *lane);
    }
    fold(lanes, larger)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = of(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// e to the power of `x`, within 2 units in the last place; 0 below -87.3 and infinite above 88.7.
///
/// The usual reduction to `2^n * e^r` with `|r| <= ln(2) / 2` and a polynomial for `e^r` (the
/// coefficients of Cephes' `expf`), written so that it vectorises.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    let value = (p * (r * r) + r + 1.0) * power;
    let value = if x < -87.0 { 0.0 } else { value };
    if x > 88.0 {
        f32::INFINITY
    } else if x.is_nan() {
        x
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut worst = 0.0_f64;
        for step in -870_000..=880_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact;
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst < 2.0, "{worst}");
        assert_eq!((exp(0.0), exp(-1e9), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert_eq!(exp(1e9), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_take_every_element_once() {
        for numel in [0, 1, 15, 16, 17, 33, 100] {
            let values: Vec<f32> = (1..=numel).map(|n| n as f32).collect();
            let ones = vec![1.0; numel];
            let sum = sum_of(&values, &ones, |a, b| a * b);
            assert_eq!(sum, (numel * (numel + 1) / 2) as f32);
            let max = if numel == 0 { f32::NEG_INFINITY } else { numel as f32 };
            assert_eq!(max_of(&values), max);
        }
    }
}
