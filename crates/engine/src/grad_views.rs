//! The gradients of a whole model, read where they lie: no copy, and no second memory.
//!
//! Each rank holds the reduced gradient of its shard of a bucket. Where ranks share memory, a
//! parameter's whole gradient is there, in pieces: as many as there are shards that it lies in.

use std::fmt;
use std::ops::Range;

use oxizero_comm::{OwnShard, PeerViews};
use oxizero_core::{Axes, DType, ParamId, ParamSpec, Placement, Rank};
use oxizero_device::{Storage, View};

use crate::bucket::{Bucket, Field};
use crate::{Engine, EngineError};

/// Views of the whole gradients of a model's parameters; see [`Engine::view_grads`]. All ranks
/// [`close`](Self::close) them.
pub struct GradViews<'a> {
    engine: &'a mut Engine,
    groups: Vec<GroupViews>,
    /// By bucket: which of the groups views it, and as the how many-th; `None` where this rank
    /// holds all of it.
    places: Vec<Option<(usize, usize)>>,
}

/// The buckets whose gradients are sharded over one process group.
struct GroupViews {
    axes: Axes,
    buckets: Vec<usize>,
    views: PeerViews,
}

/// A run of a parameter's elements that lie beside each other in one rank's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct GradPiece<'a> {
    /// Which of the parameter's elements, row-major.
    pub elements: Range<usize>,
    /// Their gradient.
    pub values: &'a [f32],
}

/// The pieces of one parameter's gradient, in the order of its elements; never empty ones.
#[derive(Debug)]
pub struct GradPieces<'a> {
    source: Source<'a>,
    /// Where the parameter lies in its bucket.
    slot: Range<usize>,
    /// The element of the bucket that the next piece starts with.
    next: usize,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// Shards of so many elements, each rank's the one of this index.
    Shards { views: &'a PeerViews, index: usize, shard_numel: usize },
    /// All elements of the bucket.
    Whole(&'a Bucket),
}

impl Engine {
    /// The whole gradients of all parameters as views of where they lie, over all ranks' memory; a
    /// collective call, of one collective for each process group. They are those of
    /// [`full_grads`](Self::full_grads) with [`Scope::DataParallel`](crate::Scope), to the bit.
    ///
    /// Until all ranks have closed the views, nobody changes a gradient: the engine is borrowed,
    /// and [`GradViews::close`] waits for the other ranks. Where ranks share no memory, this is one
    /// copy, as [`GradViews::is_copy`] says, and nobody waits.
    ///
    /// ```
    /// # use oxizero::comm::threads;
    /// # use oxizero::optim::{LrSchedule, Momentum, Sgd};
    /// # use oxizero::*;
    /// # let optimizer = OptimizerSetup {
    /// #     rule: Box::new(Sgd::new(Momentum::None)?),
    /// #     groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.0 }],
    /// #     schedule: LrSchedule::constant(0),
    /// # };
    /// # let specs = vec![ParamSpec::new("weight", &[2], DType::F32, UnitId(0))];
    /// # let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32));
    /// # let comm = threads::group(WorldSize::ONE).remove(0);
    /// # let mut engine = Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ())?;
    /// # let grad = GradIn { values: View::F32(&[3.0, 4.0]), loss_scale: LossScale::ONE };
    /// # engine.grad_ready(ParamId(0), grad)?;
    /// # engine.backward_end()?;
    /// let views = engine.view_grads()?;
    /// for (spec, pieces) in views.iter() {
    ///     let squares = pieces.flat_map(|piece| piece.values).map(|grad| grad * grad);
    ///     println!("{}: {}", spec.name, squares.sum::<f32>().sqrt());
    /// }
    /// views.close()?;
    /// engine.step()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`full_grads`](Self::full_grads). On every rank, [`Param`](EngineError::Param) where
    /// gradients accumulate in less than f32 or lie on a device: their quotients have no place
    /// of their own, or no address.
    pub fn view_grads(&mut self) -> Result<GradViews<'_>, EngineError> {
        self.check_alive()?;
        self.check_viewable()?;
        self.begin_read("view_grads", None)?;
        let keys = match self.options.stage.optim() {
            Placement::Sharded => self.keys(|bucket| Some(bucket.spec().sharing.reduced)),
            _ => Default::default(),
        };
        let places = vec![None; self.buckets.len()];
        let mut views = GradViews { engine: self, groups: Vec::with_capacity(keys.len()), places };
        for (reduced, dtype) in keys {
            views.open(reduced, dtype)?;
        }
        Ok(views)
    }

    fn check_viewable(&self) -> Result<(), EngineError> {
        let on_device = matches!(self.storage, Storage::Device(_));
        let refused = |bucket: &&Bucket| {
            bucket.grad_dtype().is_some_and(|dtype| on_device || dtype != DType::F32)
        };
        let Some(bucket) = self.buckets.iter().find(refused) else { return Ok(()) };
        let why = match bucket.grad_dtype() {
            Some(dtype) if !on_device => format!(
                "accumulates in {dtype}, which would round what is divided where it lies: set \
                 Precision::accumulate to f32"
            ),
            _ => "lies on a device, which the host cannot address".into(),
        };
        let param = self.specs[bucket.spec().params[0].0].name.clone();
        let problem = format!("view_grads: its gradient {why}, or take a copy with full_grads()");
        Err(EngineError::Param { param, problem })
    }
}

impl GradViews<'_> {
    /// A parameter's gradient; `None` for a frozen one, and for an index that the engine was never
    /// given. One that no rank used has zeros.
    pub fn get(&self, param: ParamId) -> Option<GradPieces<'_>> {
        let state = self.engine.params.get(param.0)?;
        let bucket = &self.engine.buckets[state.bucket.0];
        bucket.grad_dtype()?;
        let layout = &bucket.spec().layout;
        let slot = layout.slot(state.slot);
        let source = match self.places[state.bucket.0] {
            None => Source::Whole(bucket),
            Some((group, index)) => {
                let shard_numel = layout.shard_numel().0;
                Source::Shards { views: &self.groups[group].views, index, shard_numel }
            }
        };
        Some(GradPieces { source, next: slot.start, slot })
    }

    /// The gradient of the parameter with this name; `None` for a frozen one.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParam`] for a name that no parameter has.
    pub fn named(&self, name: &str) -> Result<Option<GradPieces<'_>>, EngineError> {
        Ok(self.get(self.engine.param(name)?))
    }

    /// Every trained parameter, in their order, and its gradient.
    pub fn iter(&self) -> impl Iterator<Item = (&ParamSpec, GradPieces<'_>)> {
        let params = self.engine.specs.iter().zip((0..).map(ParamId));
        params.filter_map(|(spec, param)| Some((spec, self.get(param)?)))
    }

    /// Whether any gradient of another rank is a copy: ranks that share no memory cannot view it.
    pub fn is_copy(&self) -> bool {
        self.groups.iter().any(|group| group.views.is_copy())
    }

    /// Ends the views, and waits until all ranks have; a collective call. Dropping them does the
    /// same, and leaves an error to the engine's next call.
    ///
    /// # Errors
    ///
    /// [`EngineError::Comm`], which names a rank that does not close its views before the deadline.
    pub fn close(mut self) -> Result<(), EngineError> {
        self.end()
    }

    /// Views the gradients of all buckets of a process group.
    fn open(&mut self, axes: Axes, dtype: DType) -> Result<(), EngineError> {
        let buckets = self.engine.members(axes, dtype);
        let take = |index: &usize| {
            let bucket = &mut self.engine.buckets[*index];
            bucket.take(Field::Grad, bucket.shard())
        };
        let shards: Vec<OwnShard> = buckets.iter().filter_map(take).collect();
        let views = self.engine.groups.over(axes).peer_views(shards, dtype);
        let views = views.map_err(|error| self.engine.fail(error))?;
        for (index, bucket) in buckets.iter().enumerate() {
            self.places[*bucket] = Some((self.groups.len(), index));
        }
        self.groups.push(GroupViews { axes, buckets, views });
        Ok(())
    }

    fn end(&mut self) -> Result<(), EngineError> {
        self.engine.check_alive()?;
        for GroupViews { axes, buckets, views } in self.groups.drain(..) {
            let shards = self.engine.groups.over(axes).end_peer_views(views);
            let shards = shards.map_err(|error| self.engine.fail(error))?;
            for (index, shard) in buckets.into_iter().zip(shards) {
                self.engine.buckets[index].give(Field::Grad, shard);
            }
        }
        Ok(())
    }
}

impl Drop for GradViews<'_> {
    fn drop(&mut self) {
        // While a panic goes on nobody is waited for: what others may read fails them as it is
        // dropped. Every other error is the engine's from here on.
        if std::thread::panicking() {
            self.groups.retain(|group| group.views.is_copy());
        }
        let _told_by_the_next_call = self.end();
    }
}

impl fmt::Debug for GradViews<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.groups.iter().map(|group| &group.views)).finish()
    }
}

impl<'a> Iterator for GradPieces<'a> {
    type Item = GradPiece<'a>;

    fn next(&mut self) -> Option<GradPiece<'a>> {
        let Self { source, slot, next } = self;
        let start = *next;
        if start == slot.end {
            return None;
        }
        let (end, values) = match *source {
            Source::Whole(bucket) => {
                (slot.end, bucket.field(Field::Grad, slot.clone()).expect("it is trained"))
            }
            Source::Shards { views, index, shard_numel } => {
                let rank = start / shard_numel;
                let end = slot.end.min((rank + 1) * shard_numel);
                let first = rank * shard_numel;
                (end, views.get(Rank(rank), index).range(start - first..end - first))
            }
        };
        *next = end;
        let View::F32(values) = values else { unreachable!("other gradients are refused") };
        Some(GradPiece { elements: start - slot.start..end - slot.start, values })
    }
}
