//! Element types, and which of them a gradient has on its way.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// The type of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of an f32: 8 exponent bits, 7 fraction bits.
    Bf16,
    /// IEEE 754 binary16: 5 exponent bits, 10 fraction bits.
    F16,
}

impl DType {
    /// Every dtype.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Bytes an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name used in configurations and messages: `f32`, `bf16`, `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| format!("`{name}` is not a dtype; allowed: f32, bf16, f16"))
    }
}

/// The dtype of a gradient and its parameter at each place where one is stored or sent.
///
/// Arithmetic between these places is in at least f32, and rounds once, on the way into storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Precision {
    /// Model weights, as forward and backward read them.
    pub model: DType,
    /// What travels between ranks (FSDP2's `reduce_dtype`); also called the wire dtype.
    pub reduce: DType,
    /// The gradient accumulator that rests between micro-batches.
    pub accumulate: DType,
    /// Master weights, which the optimizer updates.
    pub master: DType,
}

impl Precision {
    /// The default for a model of dtype `model`: gradients travel as the model computes them, and
    /// accumulate in f32.
    pub const fn of_model(model: DType) -> Self {
        Self { model, reduce: model, accumulate: DType::F32, master: DType::F32 }
    }

    /// The same policy for a parameter whose own dtype differs from the model's.
    ///
    /// A parameter wider than the wire (a f32 norm weight in a bf16 model) travels in its own
    /// dtype: narrowing it would lose what its dtype was chosen to keep.
    pub fn for_param(self, dtype: DType) -> Self {
        if dtype == self.model {
            return self;
        }
        let reduce = if self.reduce == self.model { dtype } else { self.reduce };
        // An f32 accumulator that was asked for stays, whatever the parameter's dtype.
        let accumulate = if self.accumulate == DType::F32 { DType::F32 } else { reduce };
        Self { model: dtype, reduce, accumulate, ..self }
    }

    /// The dtype in which a bucket collects this rank's gradients: what travels, where each
    /// parameter gives one gradient that travels by itself; else the accumulation dtype.
    pub fn collected(self, travel_alone: bool) -> DType {
        if travel_alone { self.reduce } else { self.accumulate }
    }

    /// The dtype in which a sum over so many backward passes travels.
    pub fn wire(self, passes: usize) -> DType {
        if passes == 1 { self.reduce } else { self.accumulate }
    }

    /// Refuses combinations that the engine does not run.
    pub fn validate(self) -> Result<(), ConfigError> {
        let refuse = |field: &str, value: DType, allowed: String| {
            Err(ConfigError::Value { field: field.into(), value: value.to_string(), allowed })
        };
        if self.master != DType::F32 {
            return refuse("precision.master", self.master, "f32".into());
        }
        if self.accumulate != DType::F32 && self.accumulate != self.reduce {
            let allowed = format!(
                "f32, or {} (precision.reduce): a narrower accumulator would round what was sent",
                self.reduce
            );
            return refuse("precision.accumulate", self.accumulate, allowed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert!("float".parse::<DType>().unwrap_err().contains("allowed: f32"));
    }

    #[test]
    fn a_wider_parameter_keeps_its_width_on_the_wire() {
        let norm = Precision::of_model(DType::Bf16).for_param(DType::F32);
        assert_eq!(norm, Precision::of_model(DType::F32));
        let wide = Precision { reduce: DType::F32, ..Precision::of_model(DType::Bf16) };
        assert_eq!(wide.for_param(DType::F16).reduce, DType::F32);
    }

    #[test]
    fn a_narrower_parameter_keeps_the_f32_accumulator() {
        for dtype in [DType::Bf16, DType::F16] {
            let precision = Precision::of_model(DType::F32).for_param(dtype);
            assert_eq!(precision, Precision::of_model(dtype));
        }
    }

    #[test]
    fn an_accumulator_is_f32_or_as_the_wire() {
        let half = Precision::of_model(DType::Bf16);
        half.validate().unwrap();
        Precision { accumulate: DType::Bf16, ..half }.validate().unwrap();
        let error = Precision { accumulate: DType::F16, ..half }.validate().unwrap_err();
        assert!(error.to_string().contains("precision.accumulate"), "{error}");
        Precision { master: DType::Bf16, ..half }.validate().unwrap_err();
    }
}
