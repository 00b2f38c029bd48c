//! What a front-end says about each parameter before training.

use std::fmt;

use crate::{Along, DType, Numel};

/// A parameter's index in the order in which the front-end gave them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// A unit's index, in forward order.
///
/// A unit is the parameters that the front-end uses together: a transformer block, the embedding.
/// It is what a front-end's events name. One unit may lie in several buckets, and one bucket may
/// hold several units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub usize);

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// An optimizer group's index: parameters that share learning rate and weight decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OptimGroup(pub usize);

/// One parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// The name in checkpoints and messages, unique in the model.
    pub name: String,
    /// Other names under which the model uses the same parameter, such as a head's that is tied to
    /// the embedding; unique too.
    pub aliases: Vec<String>,
    /// The shape before ZeRO shards it; empty for a scalar. A size may be zero. Where the mesh
    /// splits the tensor, that of one part.
    pub shape: Vec<usize>,
    /// The dtype of the model weight.
    pub dtype: DType,
    /// The unit that uses it.
    pub unit: UnitId,
    /// Whose learning rate and weight decay it takes.
    pub group: OptimGroup,
    /// `false` for a frozen parameter: no gradient, no master weight, no optimizer state.
    pub trainable: bool,
    /// How many times [`grad_ready`](Self::contributions) is called for it in one micro-batch:
    /// 1, or 2 for an embedding that is tied to the head.
    ///
    /// Where a parameter contributes more than once, its contributions add in the accumulation
    /// dtype before they are cast to the wire dtype.
    pub contributions: usize,
    /// What the ranks along each axis of the mesh hold of it; empty for plain data parallelism:
    /// reduced over all ranks that work on different micro-batches, replicated over the others.
    pub along: Vec<Along>,
}

impl ParamSpec {
    /// A trainable parameter of optimizer group 0 that contributes once a micro-batch.
    pub fn new(name: impl Into<String>, shape: &[usize], dtype: DType, unit: UnitId) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            shape: shape.to_vec(),
            dtype,
            unit,
            group: OptimGroup(0),
            trainable: true,
            contributions: 1,
            along: Vec::new(),
        }
    }

    /// Its name and the others that it has.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.aliases).map(String::as_str)
    }

    /// The elements of the shape.
    pub fn numel(&self) -> Numel {
        Numel::of_shape(&self.shape)
    }
}
