//! Full model weights that lie in memory of the front-end's own.

use oxizero_comm::{CommError, Communicator};
use oxizero_device::{Buffer, View, kernels};

use super::{Bucket, Full, Model, offset};

impl Bucket {
    /// Writes the full model weights to `full`, which has as many elements of their dtype.
    pub(crate) fn gather_into(
        &mut self,
        mut full: Buffer,
        comm: &dyn Communicator,
    ) -> Result<Buffer, CommError> {
        self.gathered()?; // waits for what is on its way
        match &mut self.model {
            Model::Replicated(weights) => {
                let weights = weights.as_ref().expect("weights are there between collectives");
                kernels::cast(weights.view(), full.view_mut());
                Ok(full)
            }
            Model::Sharded { shard, full: held } => {
                let own = shard.take().expect("a shard is there between collectives");
                let (own, full) = comm.all_gather_into(own, full)?.wait()?;
                *shard = Some(own);
                *held = Full::Elsewhere;
                Ok(full)
            }
        }
    }

    /// The front-end holds the full model weights no longer.
    pub(crate) fn let_go(&mut self) {
        if let Model::Sharded { full: full @ Full::Elsewhere, .. } = &mut self.model {
            *full = Full::Released;
        }
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
