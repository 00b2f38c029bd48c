//! Ranks that hold the same: of one parameter, and of every one.

use oxizero_comm::Communicator;
use oxizero_core::{Axes, ParamId, ProcessGroup, Rank};
use oxizero_device::Buffer;

use crate::{Engine, EngineError};

impl Engine {
    /// The ranks that hold the same of every parameter as this one, itself among them, and their
    /// communicator: for what a model has beside its parameters.
    pub fn alike(&self) -> (ProcessGroup, &dyn Communicator) {
        let axes = self.groups.alike();
        let group = self.mesh().group(axes, self.communicator().rank());
        (group, self.groups.over(axes))
    }

    /// Whether this rank's values of a parameter are the ones that count if rank `source` has the
    /// say: it stands among the ranks that hold the same of the parameter as it does where `source`
    /// stands among its own. Of a parameter that all ranks hold, that is `source` alone.
    pub fn is_source(&self, param: ParamId, source: Rank) -> Result<bool, EngineError> {
        let copies = self.axes_of_copies(param)?;
        Ok(self.source_among(copies, source)? == self.groups.over(copies).rank())
    }

    /// Overwrites values of a parameter, or of its whole bucket, with those of the rank that
    /// counts, as [`is_source`](Self::is_source) says; a collective call in which all ranks name
    /// the same parameter and `source`. What the engine itself holds stays as it is.
    pub fn broadcast_values(
        &mut self,
        param: ParamId,
        values: Buffer,
        source: Rank,
    ) -> Result<Buffer, EngineError> {
        self.check_alive()?;
        let given = self.axes_of_copies(param);
        let given =
            given.and_then(|copies| self.source_among(copies, source).map(|root| (copies, root)));
        let call = format!("the values of rank {source}");
        let (copies, root) = self.agree_call(&call, Some(param), given)?;
        let sent = self.groups.over(copies).broadcast(values, root);
        sent.and_then(|handle| handle.wait()).map_err(|error| self.fail(error))
    }

    /// The axes along which ranks hold the same of the parameter.
    fn axes_of_copies(&self, param: ParamId) -> Result<Axes, EngineError> {
        self.check_param(param)?;
        let bucket = self.params[param.0].bucket;
        Ok(self.buckets[bucket.0].spec().sharing.copies())
    }

    /// The place of the rank that counts, in a group over `copies`.
    fn source_among(&self, copies: Axes, source: Rank) -> Result<Rank, EngineError> {
        let (index, count) = (source.0, self.mesh().world_size().get());
        let known = index < count;
        let unknown = EngineError::Unknown { what: "rank", index, count };
        known.then(|| self.mesh().place(copies, source)).ok_or(unknown)
    }
}
