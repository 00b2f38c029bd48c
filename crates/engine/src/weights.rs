//! Full model weights, lent to a front-end.

use std::ops::Range;
use std::sync::Arc;

use oxizero_core::{DType, ParamId, UnitId};
use oxizero_device::{Buffer, Loan, View};

use crate::{Engine, EngineError};

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

/// The memory in which a parameter's model weights rest, for a framework whose tensors lie there.
#[derive(Clone, Debug)]
pub struct RestingWeights {
    /// Keeps the memory of the parameter's bucket where it is.
    pub memory: Loan,
    /// The parameter's bytes in it; they start on a multiple of 64.
    pub bytes: Range<usize>,
    /// The dtype of the weights.
    pub dtype: DType,
    /// The parameter's shape.
    pub shape: Vec<usize>,
}

impl Engine {
    /// Lends the memory of a parameter's model weights, which stays where it is: steps write new
    /// weights to the same place. All ranks lend the same. The borrower reads and writes there only
    /// while no call of the engine runs, and after writing says so with
    /// [`take_over_weights`](Self::take_over_weights).
    /// Where [`shares_weights`](Self::shares_weights), the borrower promises only to read, while
    /// this rank is in no call: the other ranks read there too, and write in calls of all.
    ///
    /// Refused where the weights rest sharded, and so nowhere whole.
    pub fn lend_weights(&mut self, param: ParamId) -> Result<RestingWeights, EngineError> {
        self.check_alive()?;
        self.check_param(param)?;
        let spec = &self.specs[param.0];
        let refuse = |problem: &str| {
            Err(EngineError::Param { param: spec.name.clone(), problem: problem.into() })
        };
        let state = &self.params[param.0];
        let bucket = &mut self.buckets[state.bucket.0];
        if !bucket.is_exclusive() {
            return Err(EngineError::WeightsInUse { param: spec.name.clone() });
        }
        let Some(memory) = bucket.lend_resting() else {
            return refuse("its weights rest sharded, and so nowhere whole; use stage 0, 1 or 2");
        };
        let (dtype, elements) = (bucket.spec().dtype, bucket.spec().layout.slot(state.slot));
        let bytes = elements.start * dtype.size()..elements.end * dtype.size();
        Ok(RestingWeights { memory, bytes, dtype, shape: spec.shape.clone() })
    }

    /// Whether model weights that rest replicated lie in one memory of the machine's ranks.
    pub fn shares_weights(&self) -> bool {
        self.groups.world().shares_replicas()
    }

    /// The borrower of a parameter's weights has written to some of them: the master weights that
    /// this rank's optimizer updates follow, and keep their precision where nothing was written. No
    /// rank waits for another; all write alike, which the next step or save checks. What is written
    /// without a call of this is checked by the first step, the second, the fourth and so on.
    /// Where they [share weights](Self::shares_weights), one has written while the others waited,
    /// and all call this before the next step.
    pub fn take_over_weights(&mut self, param: ParamId) -> Result<(), EngineError> {
        self.check_alive()?;
        self.check_param(param)?;
        let state = &self.params[param.0];
        let bucket = &mut self.buckets[state.bucket.0];
        let elements = bucket.spec().layout.slot(state.slot);
        bucket.take_over_weights(elements);
        self.note_written(param);
        Ok(())
    }
}
