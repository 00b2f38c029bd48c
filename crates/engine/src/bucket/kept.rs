//! What is kept of a bucket's parameters in a checkpoint: elements that rest on this rank.

use std::ops::Range;

use oxizero_device::View;
#[cfg(test)]
use oxizero_device::{Buffer, kernels};

use super::{Bucket, Field, Model, offset};

/// What is kept of each element of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// The model weight.
    Weights,
    /// The f32 master weight.
    Master,
    /// The optimizer's f32 state with this index.
    State(usize),
}

impl Bucket {
    /// What is kept of `range`, elements that rest on this rank; nothing of an optimizer's where
    /// the bucket is frozen.
    pub(crate) fn kept(&self, kept: Kept, range: Range<usize>) -> Option<View<'_>> {
        match (kept, &self.model) {
            (Kept::Master, _) => self.field(Field::Master, range),
            (Kept::State(index), _) => self.field(Field::State(index), range),
            (Kept::Weights, Model::Replicated(weights)) => Some(weights.as_ref()?.range(range)),
            (Kept::Weights, Model::Sharded { shard, .. }) => {
                Some(shard.as_ref()?.range(offset(&range, self.shard.start)))
            }
        }
    }

    /// The elements that this rank fills when weights come from elsewhere: those that its optimizer
    /// updates, or of a frozen bucket those whose model weights it writes.
    pub(crate) fn held(&self) -> Range<usize> {
        self.owned().unwrap_or_else(|| self.writes.clone())
    }

    /// Fills with NaN what lies between parameters and after the last, of all that rests here.
    #[cfg(test)]
    pub(crate) fn poison_padding(&mut self) {
        let layout = self.spec.layout.clone();
        let is_padding = |at: &usize| layout.pieces(*at..at + 1).next().is_none();
        let poison = |buffer: &mut Buffer, start: usize| {
            let padding = (0..buffer.numel().0).filter(|at| is_padding(&(start + at)));
            padding.for_each(|at| kernels::fill(buffer.range_mut(at..at + 1), f32::NAN));
        };
        let (model, start) = super::fields::writable(&mut self.model, self.shard.start);
        poison(model, start);
        if let Some(trained) = &mut self.trained {
            let start = trained.owned.start;
            let states = trained.master.iter_mut().chain(&mut trained.states);
            states.for_each(|state| poison(state, start));
        }
    }

    /// Makes the owned master weights those of the model where somebody has borrowed it, and may
    /// have written.
    pub(crate) fn take_over_lent(&mut self) {
        let Some(owned) = self.owned() else { return };
        if self.is_lent() {
            // Padding is never read.
            let pieces: Vec<_> = self.spec.layout.pieces(owned).collect();
            pieces.into_iter().for_each(|piece| self.take_over_weights(piece.in_bucket));
        }
    }
}
