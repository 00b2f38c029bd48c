//! What a bucket lets be read and written between steps: elements that this rank owns.

use std::ops::Range;
use std::sync::Arc;

use oxizero_comm::OwnShard;
use oxizero_core::{DType, ParamId};
use oxizero_device::{Buffer, Loan, View, ViewMut, kernels};

use super::{Bucket, Model, Trained, offset};

/// What is kept of each element of a trained parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// The reduced gradient.
    Grad,
    /// The f32 master weight.
    Master,
    /// The optimizer's f32 state with this index.
    State(usize),
}

impl Field {
    /// What its values are, in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Grad => "gradient",
            Self::Master => "master weights",
            Self::State(_) => "optimizer state",
        }
    }
}

impl Bucket {
    /// The dtype that a field is stored in; `None` for a frozen bucket.
    pub(crate) fn dtype_of(&self, field: Field) -> Option<DType> {
        let trained = self.trained.as_ref()?;
        Some(match field {
            Field::Grad => trained.grad.dtype(),
            Field::Master | Field::State(_) => DType::F32,
        })
    }

    /// The elements that this rank's optimizer updates; `None` for a frozen bucket.
    pub(crate) fn owned(&self) -> Option<Range<usize>> {
        self.trained.as_ref().map(|trained| trained.owned.clone())
    }

    /// A field of `range`, owned elements; `None` for a frozen bucket.
    pub(crate) fn field(&self, field: Field, range: Range<usize>) -> Option<View<'_>> {
        let trained = self.trained.as_ref()?;
        let (buffer, start) = match (field, &trained.master, &self.model) {
            (Field::Grad, ..) => return Some(trained.grad.view(range, &self.shard)),
            (Field::State(index), ..) => (&trained.states[index], trained.owned.start),
            (Field::Master, Some(master), _) => (master, trained.owned.start),
            (Field::Master, None, Model::Replicated(weights)) => (&**weights.as_ref()?, 0),
            (Field::Master, None, Model::Sharded { shard, .. }) => {
                (shard.as_ref()?, self.shard.start)
            }
        };
        Some(buffer.range(offset(&range, start)))
    }

    /// The reduced gradient of `range`, owned elements, for writing.
    pub(crate) fn grad_mut(&mut self, range: Range<usize>) -> Option<ViewMut<'_>> {
        let trained = self.trained.as_mut()?;
        Some(trained.grad.view_mut(range, &self.shard))
    }

    /// Shows the reduced gradient that this rank's optimizer reads, piece by piece, for writing:
    /// the parameter, which of its elements, and their values.
    pub(crate) fn each_owned_grad(
        &mut self,
        mut edit: impl FnMut(ParamId, Range<usize>, ViewMut<'_>),
    ) {
        let Some(trained) = &mut self.trained else { return };
        for piece in self.spec.layout.pieces(trained.owned.clone()) {
            let values = trained.grad.view_mut(piece.in_bucket, &self.shard);
            edit(self.spec.params[piece.slot], piece.in_param, values);
        }
    }

    /// The optimizer's state `index` of `range`, owned elements, for writing.
    pub(crate) fn state_mut(&mut self, index: usize, range: Range<usize>) -> Option<ViewMut<'_>> {
        let trained = self.trained.as_mut()?;
        let range = offset(&range, trained.owned.start);
        Some(trained.states[index].range_mut(range))
    }

    /// Lends a field of `range`, elements of this rank's shard, to a collective; `None` for a
    /// frozen bucket.
    pub(crate) fn take(&mut self, field: Field, range: Range<usize>) -> Option<OwnShard> {
        let trained = self.trained.as_mut()?;
        let from =
            |own: &mut Buffer, start| OwnShard { buffer: own.take(), own: offset(&range, start) };
        Some(match (field, &mut trained.master) {
            (Field::Grad, _) => {
                let OwnShard { buffer, own } = trained.grad.take(&self.shard);
                let start = own.start + range.start - self.shard.start;
                OwnShard { buffer, own: start..start + range.len() }
            }
            (Field::State(index), _) => from(&mut trained.states[index], trained.owned.start),
            (Field::Master, Some(master)) => from(master, trained.owned.start),
            // Model weights may be lent to a front-end.
            (Field::Master, None) => {
                let own = 0..range.len();
                OwnShard { buffer: Buffer::copy_of(self.field(field, range)?), own }
            }
        })
    }

    /// Takes back what [`take`](Self::take) lent.
    pub(crate) fn give(&mut self, field: Field, OwnShard { buffer, .. }: OwnShard) {
        let Some(trained) = &mut self.trained else { return };
        match (field, &mut trained.master) {
            (Field::Grad, _) => trained.grad.give(buffer),
            (Field::State(index), _) => trained.states[index] = buffer,
            (Field::Master, Some(master)) => *master = buffer,
            (Field::Master, None) => {}
        }
    }

    /// The memory of the whole model weights; `None` where they rest sharded.
    ///
    /// # Panics
    ///
    /// If views of the weights are left; the caller has checked that there are none.
    pub(crate) fn lend_resting(&mut self) -> Option<Loan> {
        match &mut self.model {
            Model::Replicated(_) => Some(writable(&mut self.model, 0).0.region_mut().lend()),
            Model::Sharded { .. } => None,
        }
    }

    /// Whether a borrower may have written to the whole model weights.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(&self.model, Model::Replicated(Some(weights)) if weights.region().is_lent())
    }

    /// The model weights of `range` where all rest on this rank; `None` where they are sharded.
    pub(crate) fn resting(&self, range: Range<usize>) -> Option<View<'_>> {
        match &self.model {
            Model::Replicated(weights) => Some(weights.as_ref()?.range(range)),
            Model::Sharded { .. } => None,
        }
    }

    /// Makes the master weights of the elements `at`, as far as this rank owns them, those of the
    /// model, where somebody has written to it.
    pub(crate) fn take_over_weights(&mut self, at: Range<usize>) {
        let (Some(trained), Model::Replicated(Some(weights))) = (&mut self.trained, &self.model)
        else {
            return;
        };
        let owned = trained.owned.clone();
        if let (Some(master), Some(range)) = (&mut trained.master, overlap(&at, &owned)) {
            kernels::adopt(
                weights.range(range.clone()),
                master.range_mut(offset(&range, owned.start)),
            );
        }
    }

    /// Writes the master weights of the elements `at`, as far as this rank owns them, and the model
    /// weights that it writes.
    ///
    /// # Panics
    ///
    /// If views of the weights are left; the caller has checked that there are none.
    pub(crate) fn write_weights(&mut self, at: Range<usize>, values: View<'_>) {
        if let Some(Trained { owned, master: Some(master), .. }) = &mut self.trained
            && let Some(range) = overlap(&at, owned)
        {
            let target = master.range_mut(offset(&range, owned.start));
            kernels::cast(values.range(offset(&range, at.start)), target);
        }
        let Some(range) = overlap(&at, &self.writes) else { return };
        let values = values.range(offset(&range, at.start));
        let (model, start) = writable(&mut self.model, self.shard.start);
        kernels::cast(values, model.range_mut(offset(&range, start)));
    }
}

/// The model weights that rest on this rank, and the element of the bucket that they start with.
///
/// # Panics
///
/// If they are viewed, or being gathered.
pub(super) fn writable(model: &mut Model, shard_start: usize) -> (&mut Buffer, usize) {
    match model {
        Model::Replicated(weights) => {
            let weights = weights.as_mut().and_then(Arc::get_mut);
            (weights.expect("the caller checked that no view is left"), 0)
        }
        Model::Sharded { shard, .. } => {
            (shard.as_mut().expect("weights are written after reshard"), shard_start)
        }
    }
}

/// What is in both, if anything is.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    (start < end).then_some(start..end)
}
