//! What is compared.

use std::fmt;

use oxizero_core::{DType, Precision};

/// The dtypes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// f32 everywhere: the oracle.
    Oracle,
    /// bf16 weights and wire, f32 accumulators.
    WideSums,
    /// bf16 weights, wire and accumulators.
    NarrowSums,
}

impl Setting {
    pub(super) const ALL: [Self; 3] = [Self::Oracle, Self::WideSums, Self::NarrowSums];

    /// Master weights are f32 in all of them.
    pub(super) fn precision(self) -> Precision {
        let bf16 = Precision::of_model(DType::Bf16);
        match self {
            Self::Oracle => Precision::of_model(DType::F32),
            Self::WideSums => bf16,
            Self::NarrowSums => Precision { accumulate: DType::Bf16, ..bf16 },
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Oracle => "f32",
            Self::WideSums => "bf16, f32 sums",
            Self::NarrowSums => "bf16, bf16 sums",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_what_the_engine_runs_and_two_differ_in_the_accumulator_alone() {
        for setting in Setting::ALL {
            setting.precision().validate().unwrap();
        }
        let (wide, narrow) = (Setting::WideSums.precision(), Setting::NarrowSums.precision());
        assert_eq!(Precision { accumulate: DType::Bf16, ..wide }, narrow);
    }
}
