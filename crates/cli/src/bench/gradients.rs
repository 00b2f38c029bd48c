//! `oxizero bench gradients`: a model's gradients read whole, in one collective and in many.
//!
//! The references are copies of as many bytes, by every rank at once: `memcpy` into memory in which
//! something lies already, as for [`Engine::full_grads_into`] in a training loop, and
//! `memcpy/fresh` into memory that is asked for anew, as [`Engine::full_grads`] asks for its own.
//! The first touch of a fresh page is a page fault: all of them together cost more than the copy.
//! Views are compared with `read`, a read of as many bytes in one piece.

use std::hint::black_box;

use clap::Args;
use oxizero::{
    Engine, EngineOptions, GradPiece, GradView, GroupOptions, ModelGrads, OptimizerSetup, Scope,
};
use oxizero_comm::Communicator;
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, DType, ParamId, Precision, ProcessGroup, Stage, WorldSize};
use oxizero_optim::{LrSchedule, Momentum, Sgd};
use serde::{Deserialize, Serialize};

use super::clock::{Clock, Lap};
use super::known::Known;
use super::micro_batch::{Given, MicroBatch};
use super::rows::Row;
use super::{Benchmark, hash, model, room};
use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

/// What is read.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Gradients {
    /// Elements of the model.
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = model::params)]
    params: usize,
    /// The model's dtype, f32 or bf16; gradients accumulate in f32.
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = model::dtype)]
    dtype: DType,
    /// ZeRO stage, 0 to 3.
    #[arg(long, value_name = "S", default_value = "2", value_parser = args::stage)]
    stage: Stage,
}

/// The numbers of tensors that the model is split into, in turn.
const TENSORS: [usize; 2] = [150, 1500];

const MEMCPY: &str = "memcpy";
const MEMCPY_FRESH: &str = "memcpy/fresh";
const READ: &str = "read";

/// A rank's least, a parameter: two copies, and what is read of each model.
const BYTES_A_PARAM: usize = (2 + TENSORS.len()) * size_of::<f32>();

impl Benchmark for Gradients {
    fn title(&self) -> String {
        let Self { params, dtype, stage } = self;
        format!("gradients: {params} parameters, {dtype}; ZeRO stage {}", u8::from(*stage))
    }

    fn check_before(&self, world_size: WorldSize, _: Launch) -> Result<Bytes, CliError> {
        let least = Bytes(self.params * BYTES_A_PARAM) * world_size.get();
        room::check("params", &self.params, least)
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let subject = |tensors| Subject::new(self, tensors, comm);
        let mut subjects = TENSORS.into_iter().map(subject).collect::<Result<Vec<_>, _>>()?;
        let mut copies = Copies::new(self.params);
        let mut clock = Clock::default();
        for round in 0..rounds {
            for subject in &mut subjects {
                subject.time(round, &mut copies, &mut clock)?;
            }
        }
        let mut rows = clock.rows(comm.world_size().get());
        for subject in &subjects {
            let (hash, end) = (subject.hash()?, format!("/{}", subject.tensors));
            for row in rows.iter_mut().filter(|row| row.name.ends_with(&end)) {
                row.hash = Some(hash.clone());
            }
        }
        Ok(rows)
    }
}

/// The plain copies that everything is compared with.
struct Copies {
    source: Vec<f32>,
    target: Vec<f32>,
}

impl Copies {
    /// Of so many f32 elements; every page of both sides is in use.
    fn new(numel: usize) -> Self {
        Self { source: vec![1.0; numel], target: vec![2.0; numel] }
    }

    fn time(&mut self, clock: &mut Clock, comm: &dyn Communicator) -> Result<(), RankError> {
        let lap = Lap::start(comm)?;
        self.target.copy_from_slice(black_box(&self.source));
        clock.stop(lap, MEMCPY, MEMCPY, comm)?;
        black_box(&self.target);
        Ok(())
    }

    fn time_read(&self, clock: &mut Clock, comm: &dyn Communicator) -> Result<(), RankError> {
        let lap = Lap::start(comm)?;
        black_box(read(black_box(&self.source)));
        clock.stop(lap, READ, READ, comm)?;
        Ok(())
    }

    /// Returns the copy: while it is alive, the allocator cannot give its memory to others.
    fn time_fresh(
        &self,
        clock: &mut Clock,
        comm: &dyn Communicator,
    ) -> Result<Vec<f32>, RankError> {
        let lap = Lap::start(comm)?;
        let fresh = black_box(&self.source).to_vec();
        clock.stop(lap, MEMCPY_FRESH, MEMCPY, comm)?;
        Ok(black_box(fresh))
    }
}

/// Looks at every element: the sum of their bits, which does not wait for additions of floats.
fn read(values: &[f32]) -> u32 {
    values.iter().fold(0, |sum, value| sum.wrapping_add(value.to_bits()))
}

/// The model in so many tensors, on this rank.
struct Subject {
    tensors: usize,
    dtype: DType,
    engine: Engine,
    micro_batch: MicroBatch,
    known: Known,
    refilled: ModelGrads,
}

impl Subject {
    fn new(
        gradients: &Gradients,
        tensors: usize,
        comm: &dyn Communicator,
    ) -> Result<Self, RankError> {
        let Gradients { params, dtype, stage } = *gradients;
        let specs = model::specs(params, tensors, dtype);
        let longest = specs.iter().map(|spec| spec.numel().0).max().unwrap_or(0);
        let micro_batch = MicroBatch::new(&specs);
        let order = micro_batch.order();
        let options = EngineOptions::new(stage, Precision::of_model(dtype));
        let optimizer = OptimizerSetup {
            rule: Box::new(Sgd::new(Momentum::None).expect("plain descent has no numbers")),
            groups: vec![GroupOptions { lr: 0.0, weight_decay: 0.0 }],
            schedule: LrSchedule::constant(0),
        };
        let comm = comm.split(&ProcessGroup::world(comm.world_size()))?;
        let engine = Engine::new(specs, order, options, optimizer, comm, &mut |_, _| ())?;
        let known = Known::new(tensors, longest);
        let refilled = ModelGrads::default();
        Ok(Self { tensors, dtype, engine, micro_batch, known, refilled })
    }

    /// One window, read in every way. What was read is checked.
    fn time(
        &mut self,
        round: usize,
        copies: &mut Copies,
        clock: &mut Clock,
    ) -> Result<(), RankError> {
        self.backward(round)?;
        for what in ["first", "copy"] {
            copies.time(clock, self.engine.communicator())?;
            let lap = Lap::start(self.engine.communicator())?;
            self.engine.full_grads_into(Scope::DataParallel, &mut self.refilled)?;
            self.stop(clock, lap, &format!("full_grads/{what}"), MEMCPY)?;
            self.check(&self.refilled, round, what)?;
        }
        self.time_fresh(round, copies, clock)?;
        self.time_views(copies, clock)?;
        let lap = Lap::start(self.engine.communicator())?;
        for param in 0..self.tensors {
            black_box(self.engine.full_grad(ParamId(param))?);
        }
        self.stop(clock, lap, "full_grad/loop", MEMCPY)?;
        self.check_alone()?;
        Ok(self.engine.discard_window()?)
    }

    fn time_fresh(
        &mut self,
        round: usize,
        copies: &Copies,
        clock: &mut Clock,
    ) -> Result<(), RankError> {
        // They take turns in coming first, as that one may get memory that was given back before.
        let copy =
            |clock: &mut Clock, engine: &Engine| copies.time_fresh(clock, engine.communicator());
        let before = round.is_multiple_of(2).then(|| copy(clock, &self.engine)).transpose()?;
        let lap = Lap::start(self.engine.communicator())?;
        let grads = self.engine.full_grads(Scope::DataParallel)?;
        self.stop(clock, lap, "full_grads/fresh", MEMCPY_FRESH)?;
        if before.is_none() {
            copy(clock, &self.engine)?;
        }
        self.check(&grads, round, "fresh")
    }

    /// Views, and views that are read in full. They show what was copied last.
    fn time_views(&mut self, copies: &Copies, clock: &mut Clock) -> Result<(), RankError> {
        let lap = Lap::start(self.engine.communicator())?;
        self.engine.view_grads()?.close()?;
        self.stop(clock, lap, "grad_views/open", READ)?;
        copies.time_read(clock, self.engine.communicator())?;
        let lap = Lap::start(self.engine.communicator())?;
        let views = self.engine.view_grads()?;
        let pieces = views.iter().flat_map(|(_, pieces)| pieces);
        black_box(pieces.fold(0, |sum: u32, piece| sum.wrapping_add(read(piece.values))));
        views.close()?;
        self.stop(clock, lap, "grad_views/read", READ)?;
        self.check_views()
    }

    fn check_views(&mut self) -> Result<(), RankError> {
        let views = self.engine.view_grads()?;
        let is_copied = |param: usize| {
            let whole = self.refilled.get(ParamId(param))?;
            let mut pieces = views.get(ParamId(param))?;
            let is_range = |piece: GradPiece<'_>| {
                whole.range(piece.elements).bytes() == GradView::F32(piece.values).bytes()
            };
            pieces.all(is_range).then_some(())
        };
        let wrong = (0..self.tensors).find(|param| is_copied(*param).is_none());
        views.close()?;
        wrong.map_or(Ok(()), |param| Err(self.wrong(param, "views")))
    }

    /// A micro-batch, without the model's arithmetic.
    fn backward(&mut self, round: usize) -> Result<(), RankError> {
        let rank = self.engine.communicator().rank();
        let given = self.known.given(rank, round, self.dtype);
        let gradient = |of: &Given| given.of(of.param.0, of.numel);
        Ok(self.micro_batch.run(&mut self.engine, gradient)?)
    }

    fn stop(
        &self,
        clock: &mut Clock,
        lap: Lap,
        what: &str,
        reference: &str,
    ) -> Result<(), RankError> {
        let name = format!("{what}/{}", self.tensors);
        clock.stop(lap, &name, reference, self.engine.communicator())?;
        Ok(())
    }

    fn check(&self, grads: &ModelGrads, round: usize, what: &str) -> Result<(), RankError> {
        let world_size: WorldSize = self.engine.communicator().world_size();
        for param in 0..self.tensors {
            let values = grads.get(ParamId(param));
            let is_mean =
                values.is_some_and(|values| self.known.is_mean(values, param, world_size, round));
            if !is_mean {
                return Err(self.wrong(param, what));
            }
        }
        Ok(())
    }

    /// Whether gradients that are read one by one are those that were read together.
    fn check_alone(&mut self) -> Result<(), RankError> {
        for param in (0..self.tensors).map(ParamId) {
            let alone = self.engine.full_grad(param)?;
            let alone = alone.as_ref().map(|values| values.view().bytes());
            let together = self.refilled.get(param).map(GradView::bytes);
            if alone.is_none() || alone != together {
                return Err(self.wrong(param.0, "loop"));
            }
        }
        Ok(())
    }

    fn wrong(&self, param: usize, what: &str) -> RankError {
        let name = &self.engine.params()[param].name;
        RankError::Contents(format!("gradients/{what}/{}: `{name}` is wrong", self.tensors))
    }

    /// Of the gradients that were read last, in the order of the parameters; compared across ranks.
    fn hash(&self) -> Result<String, RankError> {
        let hash = hash::of(self.refilled.iter().map(|(_, values)| values.bytes()));
        let what = format!("gradients in {} tensors", self.tensors);
        hash::same(&hash, &what, self.engine.communicator())
    }
}
