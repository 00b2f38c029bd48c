//! What a checkpoint holds: the file that everything else is found by.

use std::fmt;
use std::ops::Range;

use oxizero_core::{DType, LossScalerState, Numel, Part};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{CheckpointError, Checksum};

/// All of a checkpoint but the elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Bytes of a piece that have one checksum; the last block of a piece may be shorter.
    pub block_bytes: usize,
    /// The model's parameters, in its order.
    pub params: Vec<Param>,
    /// Every tensor that is stored.
    pub tensors: Vec<Tensor>,
    /// Where training was.
    pub training: Training,
    /// What the writer's caller adds: the configuration, the position in the data.
    pub caller: Value,
    /// What each of the writing processes adds, such as its random states; as many as there were.
    pub ranks: Vec<Value>,
}

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// Its name, unique in the model.
    pub name: String,
    /// Other names under which the model uses it (a tied head), unique too.
    pub aliases: Vec<String>,
    /// The dtype of the model weight, whatever its master's.
    pub dtype: Dtype,
    /// Whether it is trained.
    pub trainable: bool,
    /// The optimizer's updates of it: one number, or one for each part of its weights where the
    /// parts are tensors of their own.
    pub updates: Vec<u64>,
}

/// A tensor, in pieces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// The parameter's or buffer's name.
    pub name: String,
    /// What is stored of it.
    pub role: Role,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The shape of the equal parts that it is cut into; the whole shape where it is in one part.
    pub part_shape: Vec<usize>,
    /// The type of the stored elements.
    pub dtype: Dtype,
    /// The pieces, by part and first element.
    pub pieces: Vec<Piece>,
}

/// What is stored of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Model weights: of frozen parameters, for those of others are rounded master weights.
    Weights,
    /// The weights that the optimizer updates.
    Master,
    /// The optimizer's state with this name.
    State(String),
    /// Something of the model's that is no parameter.
    Buffer,
}

/// Consecutive elements of a part of a tensor, in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The file's name, in the checkpoint's folder.
    pub file: String,
    /// The part's number; see [`Part::of_equal`].
    #[serde(default)]
    pub part: usize,
    /// Which of the part's elements.
    pub elements: Range<usize>,
    /// By block.
    pub checksums: Vec<Checksum>,
}

/// Where training was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Steps that were applied; the position of the learning rate's schedule too.
    pub applied_steps: u64,
    /// The dynamic loss scale, if there is one.
    pub loss_scaler: Option<LossScalerState>,
    /// The update rule with its settings, to be read by people.
    pub rule: String,
    /// The learning rate's schedule, to be read by people.
    pub schedule: String,
    /// The optimizer groups.
    pub groups: Vec<Group>,
}

/// An optimizer group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The learning rate before the schedule.
    pub lr: f64,
    /// The weight decay coefficient.
    pub weight_decay: f64,
    /// The update rule of the group's own, to be read by people.
    pub rule: Option<String>,
}

impl Manifest {
    /// Reads what serde writes of one; it is not [checked](Self::check).
    pub fn from_json(text: &str) -> Result<Self, CheckpointError> {
        serde_json::from_str(text)
            .map_err(|error| CheckpointError::manifest("its text", error.to_string()))
    }
}

impl Tensor {
    /// The part with this number.
    pub fn part(&self, number: usize) -> Option<Part> {
        Part::of_equal(&self.shape, &self.part_shape, number)
    }

    /// The elements of the whole tensor.
    pub fn numel(&self) -> Numel {
        Numel::of_shape(&self.shape)
    }

    /// Bytes of an element.
    pub fn element_bytes(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// The name of a piece of it in a safetensors file. No two pieces of a checkpoint share one.
    pub fn piece_name(&self, part: usize, elements: &Range<usize>) -> String {
        let Range { start, end } = elements;
        let whole = self.shape == self.part_shape;
        let part = if whole { String::new() } else { format!("{part}:") };
        format!("{}/{}/{part}{start}-{end}", self.role.key(), self.name)
    }
}

impl fmt::Display for Tensor {
    /// As messages name it: "the master weights of `a.b`".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.role, self.name)
    }
}

impl Role {
    /// Short, and different for every role; holds a `/` only in a state's name.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Weights => "weights".into(),
            Self::Master => "master".into(),
            Self::State(name) => format!("state.{name}"),
            Self::Buffer => "buffer".into(),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weights => f.write_str("the weights of"),
            Self::Master => f.write_str("the master weights of"),
            Self::State(name) => write!(f, "the optimizer state `{name}` of"),
            Self::Buffer => f.write_str("the buffer"),
        }
    }
}

/// How elements of `dtype` are called in files.
pub fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}
