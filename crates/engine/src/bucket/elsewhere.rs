//! Full model weights that lie in memory of the front-end's own.

use oxizero_comm::{CommError, Communicator, Handle};
use oxizero_device::{Buffer, View, kernels};

use super::{Bucket, Full, Model, gather, offset};
use crate::observer::Observation;

/// The front-end's memory, while the engine has it.
#[derive(Debug)]
pub(super) enum Arriving {
    /// It is being filled; this rank's shard takes part.
    Filling(Handle<(Buffer, Buffer)>),
    Filled(Buffer),
}

impl Bucket {
    /// Starts to write the full model weights to `full`, which has as many elements of their dtype.
    pub(crate) fn start_gather(
        &mut self,
        mut full: Buffer,
        comm: &dyn Communicator,
        seen: Observation,
    ) -> Result<(), CommError> {
        self.settle()?;
        self.arriving = Some(match &mut self.model {
            Model::Replicated(weights) => {
                let weights = weights.as_ref().expect("weights are there between collectives");
                kernels::cast(weights.view(), full.view_mut());
                Arriving::Filled(full)
            }
            Model::Sharded { shard, full: held } => {
                let own = shard.take().expect("a shard is there between collectives");
                *held = Full::Elsewhere;
                Arriving::Filling(gather(comm, (own, full), seen))
            }
        });
        Ok(())
    }

    /// Whether the front-end's memory is being filled, or waits to be taken back.
    pub(crate) fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Waits for what was started, and hands the filled memory out; `None` if nothing was.
    pub(crate) fn finish_gather(&mut self) -> Result<Option<Buffer>, CommError> {
        self.settle_arriving()?;
        Ok(self.arriving.take().map(|arriving| match arriving {
            Arriving::Filled(full) => full,
            Arriving::Filling(_) => unreachable!("it was waited for"),
        }))
    }

    /// Waits for the front-end's memory to be filled, if it is to be.
    pub(super) fn settle_arriving(&mut self) -> Result<(), CommError> {
        self.arriving = match self.arriving.take() {
            Some(Arriving::Filling(handle)) => {
                let (own, filled) = handle.wait()?;
                if let Model::Sharded { shard, .. } = &mut self.model {
                    *shard = Some(own);
                }
                Some(Arriving::Filled(filled))
            }
            other => other,
        };
        Ok(())
    }

    /// The front-end holds the full model weights no longer, nor waits for them.
    pub(crate) fn let_go(&mut self) -> Result<(), CommError> {
        self.finish_gather()?;
        if let Model::Sharded { full: full @ Full::Elsewhere, .. } = &mut self.model {
            *full = Full::Released;
        }
        Ok(())
    }

    /// Whether the part of `full` that rests on this rank is as it was gathered. It is not asked
    /// where the host would have to wait for it.
    pub(crate) fn is_as_gathered(&self, full: View<'_>) -> bool {
        let Model::Sharded { shard: Some(own), .. } = &self.model else { return true };
        // Padding is never read.
        self.spec.layout.pieces(self.shard.clone()).all(|piece| {
            let own = own.range(offset(&piece.in_bucket, self.shard.start));
            match (full.range(piece.in_bucket), own) {
                (View::Device(_), _) | (_, View::Device(_)) => true,
                (full, own) => full.bytes() == own.bytes(),
            }
        })
    }

    /// Makes the model weights that rest on this rank those of `full`, and the master weights that
    /// it owns where they differ. Nothing is done where weights rest replicated.
    pub(crate) fn take_over_gathered(&mut self, full: View<'_>) {
        let Model::Sharded { shard: Some(own), .. } = &mut self.model else { return };
        kernels::cast(full.range(self.shard.clone()), own.view_mut());
        let Some(trained) = &mut self.trained else { return };
        let owned = trained.owned.clone();
        if let Some(master) = &mut trained.master {
            // Padding is never read.
            for piece in self.spec.layout.pieces(owned.clone()) {
                let at = offset(&piece.in_bucket, owned.start);
                kernels::adopt(full.range(piece.in_bucket), master.range_mut(at));
            }
        }
    }
}
