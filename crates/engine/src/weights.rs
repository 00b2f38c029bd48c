//! Full model weights, lent to a front-end.

use std::ops::Range;
use std::sync::Arc;

use oxizero_core::{DType, ParamId, UnitId};
use oxizero_device::{Buffer, View};

/// The full weights of one unit's parameters, in the order in which they were declared.
///
/// The weights are views of the engine's buckets. The engine writes to a bucket only when no view
/// of it is left, so whoever keeps one makes the next step fail.
#[derive(Clone, Debug)]
pub struct UnitWeights {
    /// The unit.
    pub unit: UnitId,
    /// One entry a parameter.
    pub params: Vec<ParamWeights>,
}

/// One parameter's full weights, inside the bucket that holds them.
#[derive(Clone, Debug)]
pub struct ParamWeights {
    /// The parameter.
    pub param: ParamId,
    /// The bucket's full model weights.
    pub bucket: Arc<Buffer>,
    /// The parameter's elements in the bucket.
    pub elements: Range<usize>,
    /// The parameter's shape.
    pub shape: Vec<usize>,
    /// Whether the parameter is trained, and so wants a gradient.
    pub trainable: bool,
}

impl ParamWeights {
    /// The weights.
    pub fn view(&self) -> View<'_> {
        self.bucket.range(self.elements.clone())
    }

    /// The parameter's bytes in the bucket; they start on a multiple of 64.
    pub fn bytes(&self) -> Range<usize> {
        let size = self.bucket.dtype().size();
        self.elements.start * size..self.elements.end * size
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.bucket.dtype()
    }
}
