//! A bucket's gradient, from a front-end's contributions to what the optimizer reads.
//!
//! There is one accumulator a bucket. Where gradients rest `Partial` it is this rank's own sum over
//! all elements; where they rest `Sharded` it is the sum over ranks of the owned elements, and the
//! contributions of one micro-batch are collected in a buffer that lives until they are reduced.

use std::ops::Range;

use oxizero_comm::{CommError, Communicator, Handle, OwnShard, issue};
use oxizero_core::{BucketSpec, Bytes, DType, Layout, Numel, Placement, Precision, Stage};
use oxizero_device::kernels::{self, Combine};
use oxizero_device::{Buffer, View, ViewMut};

use crate::observer::Observation;
use crate::reduction::{Reduced, Reduction};

/// One bucket's gradient on this rank.
#[derive(Debug)]
pub(crate) struct Gradient {
    rest: Placement,
    precision: Precision,
    /// Whether each parameter contributes once in a pass.
    once: bool,
    /// This rank's contributions to every element. Always there where gradients rest `Partial`.
    partial: Option<Buffer>,
    /// By slot: contributions that `partial` holds.
    held: Vec<usize>,
    /// The sum over ranks of the owned elements, where gradients rest `Sharded`.
    shard: Option<Buffer>,
    /// Micro-batches that `shard` holds.
    reduced: usize,
    /// What `shard` holds next, or `partial` where there is none.
    flight: Option<Flight>,
}

/// A gradient of one parameter, on its way into a bucket.
pub(crate) struct Contribution<'a> {
    /// The parameter's place in the bucket.
    pub(crate) slot: usize,
    /// The elements.
    pub(crate) values: View<'a>,
    /// The pass that it comes from is reduced by itself.
    pub(crate) alone: bool,
}

impl Gradient {
    /// An empty gradient of the parameters of `spec`.
    pub(crate) fn new(
        stage: Stage,
        spec: &BucketSpec,
        precision: Precision,
        comm: &dyn Communicator,
    ) -> Result<Self, CommError> {
        let rest = stage.grads();
        let layout = &spec.layout;
        let resting = |numel| alloc(comm, numel, precision.accumulate).map(Some);
        let (partial, shard) = match rest {
            Placement::Sharded => (None, resting(layout.shard_numel())?),
            _ => (resting(layout.padded_numel())?, None),
        };
        let held = vec![0; layout.slot_count()];
        let once = spec.contributions == 1;
        Ok(Self { rest, precision, once, partial, held, shard, reduced: 0, flight: None })
    }

    /// Adds one contribution. Returns whether what is stored of it is finite, as far as is known
    /// without asking a device.
    pub(crate) fn contribute(
        &mut self,
        contribution: Contribution<'_>,
        layout: &Layout,
        comm: &dyn Communicator,
    ) -> Result<bool, CommError> {
        let Contribution { slot, values, alone } = contribution;
        let dtype = self.precision.collected(alone && self.once);
        let mut partial = self.take_partial(dtype, layout, comm)?;
        let combine = if self.held[slot] == 0 { Combine::Assign } else { Combine::Add };
        let finite = kernels::accumulate(values, partial.range_mut(layout.slot(slot)), combine);
        self.held[slot] += 1;
        self.partial = Some(partial);
        Ok(finite)
    }

    /// Starts to take what this rank collected to placement `to`; `passes` says over how many
    /// backward passes it was summed. A sum of one travels in the wire dtype, a longer one in the
    /// accumulation dtype. The one before has [landed](Self::land); until this one has, there is
    /// nothing to read.
    pub(crate) fn reduce(
        &mut self,
        (to, passes): (Placement, usize),
        layout: &Layout,
        comm: &dyn Communicator,
        seen: Observation,
    ) -> Result<(), CommError> {
        let wire = self.precision.wire(passes);
        let partial = self.take_partial(wire, layout, comm)?;
        let combine = if self.reduced == 0 { Combine::Assign } else { Combine::Add };
        let shard = match self.rest {
            Placement::Sharded => {
                self.reduced += 1;
                Some((self.shard.take().expect("what rests sharded has a shard"), combine))
            }
            _ => None,
        };
        let absent = self.absent(layout);
        self.held.fill(0);
        let reduction = Reduction { partial, absent, wire, to, shard };
        let (rests, beside) =
            (reduction.resting_bytes(), reduction.most_bytes_beside(comm.scratch()));
        let sum = issue(comm, move |comm| seen.during(|| reduction.run(comm)));
        self.flight = Some(Flight { sum, rests, beside });
        Ok(())
    }

    /// Waits for the sum that is on its way, if one is.
    pub(crate) fn land(&mut self) -> Result<(), CommError> {
        if let Some(flight) = self.flight.take() {
            let reduced = flight.sum.wait()?;
            self.give(reduced.sum);
        }
        Ok(())
    }

    /// The elements of parameters that have no contribution.
    fn absent(&self, layout: &Layout) -> Vec<Range<usize>> {
        let slots = self.held.iter().enumerate().filter(|(_, held)| **held == 0);
        slots.map(|(slot, _)| layout.slot(slot)).collect()
    }

    /// The buffer of contributions, made of `dtype` where there is none.
    fn take_partial(
        &mut self,
        dtype: DType,
        layout: &Layout,
        comm: &dyn Communicator,
    ) -> Result<Buffer, CommError> {
        self.partial.take().map_or_else(|| alloc_scratch(comm, layout.padded_numel(), dtype), Ok)
    }

    /// The reduced elements of `range`, a range of the bucket that this rank's optimizer updates.
    pub(crate) fn view(&self, range: Range<usize>, shard: &Range<usize>) -> View<'_> {
        match &self.shard {
            Some(buffer) => buffer.range(range.start - shard.start..range.end - shard.start),
            None => self.partial.as_ref().expect(PARTIAL).range(range),
        }
    }

    /// The same, for writing.
    pub(crate) fn view_mut(&mut self, range: Range<usize>, shard: &Range<usize>) -> ViewMut<'_> {
        match &mut self.shard {
            Some(buffer) => buffer.range_mut(range.start - shard.start..range.end - shard.start),
            None => self.partial.as_mut().expect(PARTIAL).range_mut(range),
        }
    }

    /// The buffer that holds the reduced elements of `shard`, and where.
    pub(crate) fn take(&mut self, shard: &Range<usize>) -> OwnShard {
        match self.shard.take() {
            Some(buffer) => OwnShard { own: 0..buffer.numel().0, buffer },
            None => OwnShard { buffer: self.partial.take().expect(PARTIAL), own: shard.clone() },
        }
    }

    /// Takes back what [`take`](Self::take) gave away.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        match self.rest {
            Placement::Sharded => self.shard = Some(buffer),
            _ => self.partial = Some(buffer),
        }
    }

    /// Forgets everything: the next contribution starts a new window.
    pub(crate) fn clear(&mut self) {
        self.held.fill(0);
        self.reduced = 0;
        if self.rest == Placement::Sharded {
            self.partial = None;
        }
    }

    /// The dtype of the accumulator.
    pub(crate) fn dtype(&self) -> DType {
        self.precision.accumulate
    }

    /// Bytes that rest between micro-batches, and bytes that are on their way there.
    pub(crate) fn bytes(&self) -> (Bytes, Bytes) {
        let bytes = |buffer: &Option<Buffer>| buffer.as_ref().map_or(Bytes(0), Buffer::len);
        let (rests, collects) = match self.rest {
            Placement::Sharded => (bytes(&self.shard), bytes(&self.partial)),
            _ => (bytes(&self.partial), Bytes(0)),
        };
        match &self.flight {
            Some(flight) => (flight.rests, collects + flight.beside),
            None => (rests, collects),
        }
    }
}

const PARTIAL: &str = "gradients that rest partial have a buffer between steps";

/// A sum that is on its way to where it rests.
#[derive(Debug)]
struct Flight {
    sum: Handle<Reduced>,
    /// The bytes that will rest.
    rests: Bytes,
    /// The most bytes that it takes beside them.
    beside: Bytes,
}

/// Zeroed memory that collectives move fastest.
pub(crate) fn alloc(
    comm: &dyn Communicator,
    numel: Numel,
    dtype: DType,
) -> Result<Buffer, CommError> {
    Ok(Buffer::new(comm.alloc(numel.bytes(dtype))?, dtype))
}

/// The same for elements that are all written before they are read, but for padding.
pub(crate) fn alloc_scratch(
    comm: &dyn Communicator,
    numel: Numel,
    dtype: DType,
) -> Result<Buffer, CommError> {
    Ok(Buffer::new(comm.alloc_scratch(numel.bytes(dtype))?, dtype))
}
