//! What tells elements from others, bit by bit.

use twox_hash::XxHash3_64;

use super::{Measure, Measured, measure_with};
use crate::View;

/// A 64-bit checksum of each of `values`: of their bytes, in order. Those of a device take one read
/// of it for all of them, and are compared with those of such devices alone: it has a way of its
/// own. For comparison and not for security.
///
/// # Panics
///
/// If some of the values lie on a device and some do not.
pub fn checksums(values: &[View<'_>]) -> Vec<u64> {
    let (_, checksums): (Vec<Measured>, _) = measure_with(values, (&[], 1.0, Measure::Largest));
    checksums
}

/// The same of the host's.
pub(super) fn of_host(values: &[View<'_>]) -> Vec<u64> {
    values.iter().map(|values| XxHash3_64::oneshot(values.bytes())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_or_another_order_makes_another_checksum() {
        let zeros = [0.0_f32; 70];
        let with = |at: usize, value: f32| {
            let mut values = zeros;
            values[at] = value;
            values
        };
        let all = [zeros, with(0, -0.0), with(3, 1.0), with(4, 1.0), with(69, f32::NAN)];
        let all: Vec<_> = all.iter().map(|values| View::F32(values)).collect();
        let mut told = checksums(&all);
        assert_eq!(told, checksums(&all));
        told.sort_unstable();
        told.dedup();
        assert_eq!(told.len(), 5);
    }
}
