//! Steps of an engine whose gradients are given, beside copies of the bytes that they must move.
//!
//! AdamW trains windows of one micro-batch. Before each window come copies of as many bytes as a
//! rank must move in its two halves; see [`moved`](super::moved). Every parameter has the same
//! gradients and weights, which repeat, so that the hash of one parameter's first elements is that
//! of the model; all others are compared with them.

use oxizero::{Engine, EngineOptions, GroupOptions, OptimizerSetup, Overlap, Reach, StepOutcome};
use oxizero_comm::Communicator;
use oxizero_core::{
    Bytes, ConfigError, DType, Numel, ParamId, ParamSpec, Precision, ProcessGroup, Stage, WorldSize,
};
use oxizero_device::{Buffer, ViewMut};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions, Optimizer};

use super::clock::{Clock, Lap};
use super::collectives::fill;
use super::copies::Copies;
use super::micro_batch::MicroBatch;
use super::moved::{Moved, Training};
use super::rows::Row;
use super::{hash, pattern};
use crate::rank::RankError;

/// The stages that are benched where none is asked for.
pub(crate) const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// What trains.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// What the rows are about, such as `step/stage2/bf16`.
    pub(crate) name: String,
    pub(crate) specs: Vec<ParamSpec>,
    pub(crate) dtype: DType,
    pub(crate) stage: Stage,
}

impl Setting {
    /// What all ranks hold at most.
    pub(crate) fn needs(
        &self,
        world_size: WorldSize,
        shares_replicas: bool,
    ) -> Result<Bytes, ConfigError> {
        let (specs, order) = (&self.specs, MicroBatch::new(&self.specs).order());
        let reach = Reach { world_size, shares_replicas, overlap: Overlap::Off };
        let plan = self.options().plan(specs, &order, &rule(), reach)?;
        Ok((plan.peak_total() + self.numel().bytes(self.dtype)) * world_size.get())
    }

    /// Trains for so many windows; every rank calls it. The rows tell seconds.
    pub(crate) fn measure(
        &self,
        windows: usize,
        comm: &dyn Communicator,
    ) -> Result<Vec<Row>, RankError> {
        let mut steps = Steps::new(self, comm)?;
        let moved = self.moved(comm).halves();
        let mut copies = Copies::new(Bytes(moved.iter().map(|(_, bytes)| bytes.0).sum()));
        let mut clock = Clock::default();
        for _ in 0..windows {
            let mut seconds = 0.0;
            for (half, bytes) in moved {
                seconds += copies.time(bytes, &self.copies(half), &mut clock, comm)?;
            }
            clock.keep(&self.copies(""), &self.copies(""), seconds);
            steps.time(&mut clock)?;
        }
        let hash = steps.hash()?;
        let mut rows = clock.rows(comm.world_size().get());
        let whole = rows.iter_mut().find(|row| row.name == self.name);
        whole.expect("every window is timed").hash = Some(hash);
        Ok(rows)
    }

    /// The name of the copies that a part of a step is compared with.
    fn copies(&self, half: &str) -> String {
        let (_, rest) = self.name.split_once('/').unwrap_or_default();
        format!("copies/{rest}{half}")
    }

    fn numel(&self) -> Numel {
        self.specs.iter().map(ParamSpec::numel).sum()
    }

    fn moved(&self, comm: &dyn Communicator) -> Moved {
        Training {
            numel: self.numel().0,
            dtype: self.dtype,
            stage: self.stage,
            states: rule().state_names().len(),
            world_size: comm.world_size(),
            shares_replicas: comm.shares_replicas(),
        }
        .moved()
    }

    fn options(&self) -> EngineOptions {
        EngineOptions::new(self.stage, Precision::of_model(self.dtype))
    }
}

const MICRO_BATCH: &str = "/micro_batch";
const BOUNDARY: &str = "/boundary";

impl Moved {
    fn halves(self) -> [(&'static str, Bytes); 2] {
        [(MICRO_BATCH, self.micro_batch), (BOUNDARY, self.boundary)]
    }
}

fn rule() -> AdamW {
    AdamW::new(MomentOptions::default()).expect("the defaults are numbers")
}

/// An engine, and the gradients that it is given in every window.
pub(super) struct Steps<'a> {
    setting: &'a Setting,
    pub(super) engine: Engine,
    micro_batch: MicroBatch,
    /// Of all parameters, one after the other.
    gradients: Buffer,
    /// By parameter: where its gradients start.
    starts: Vec<usize>,
}

/// Weights and gradients repeat after so many elements.
const PERIOD: usize = super::collectives::PERIOD;

impl<'a> Steps<'a> {
    pub(super) fn new(setting: &'a Setting, comm: &dyn Communicator) -> Result<Self, RankError> {
        let specs = setting.specs.clone();
        let mut gradients = Buffer::mapped(setting.numel(), setting.dtype);
        let mut starts = Vec::with_capacity(specs.len());
        let mut start = 0;
        for spec in &specs {
            let end = start + spec.numel().0;
            fill(gradients.range_mut(start..end), 0, comm.rank());
            starts.push(start);
            start = end;
        }
        let micro_batch = MicroBatch::new(&specs);
        let (order, options) = (micro_batch.order(), setting.options());
        let optimizer = OptimizerSetup {
            rule: Box::new(rule()),
            groups: vec![GroupOptions { lr: 1e-3, weight_decay: 0.1 }],
            schedule: LrSchedule::constant(0),
        };
        let mut initial = |_, weights: &mut [f32]| {
            pattern::fill(ViewMut::F32(weights), 0, PERIOD, |index| 1.0 + index as f32 / 64.0);
        };
        let comm = comm.split(&ProcessGroup::world(comm.world_size()))?;
        let engine = Engine::new(specs, order, options, optimizer, comm, &mut initial)?;
        Ok(Self { setting, engine, micro_batch, gradients, starts })
    }

    /// One window: its halves, and both together.
    pub(super) fn time(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        let (name, setting) = (&self.setting.name, self.setting);
        let lap = Lap::start(self.engine.communicator())?;
        let (gradients, starts) = (&self.gradients, &self.starts);
        self.micro_batch.run(&mut self.engine, |of| {
            let start = starts[of.param.0];
            gradients.range(start..start + of.numel.0)
        })?;
        let stop = |clock: &mut Clock, lap, half, engine: &Engine| {
            let (name, reference) = (format!("{name}{half}"), setting.copies(half));
            clock.stop(lap, &name, &reference, engine.communicator())
        };
        let mut seconds = stop(clock, lap, MICRO_BATCH, &self.engine)?;
        let lap = Lap::start(self.engine.communicator())?;
        let outcome = self.engine.step()?;
        seconds += stop(clock, lap, BOUNDARY, &self.engine)?;
        clock.keep(name, &setting.copies(""), seconds);
        match outcome {
            StepOutcome::Applied { .. } => Ok(()),
            other => Err(RankError::Contents(format!("{name}: {other:?} instead of an update"))),
        }
    }

    /// Of the first f32 master weights of the longest parameter, which all ranks have alike.
    pub(super) fn hash(&mut self) -> Result<String, RankError> {
        let name = &self.setting.name;
        let (mut hash, mut longest) = (Vec::new(), 0);
        for (index, spec) in self.setting.specs.iter().enumerate() {
            let weights = self.engine.full_param(ParamId(index))?;
            let weights = weights.expect("every parameter is trained");
            let known = PERIOD.min(weights.numel().0);
            let first = hash::of([weights.range(0..known).bytes()]);
            let is_longer = known > longest;
            if is_longer {
                (hash, longest) = (first.clone(), known);
            }
            let differs = known == longest && first != hash;
            if differs || !pattern::repeats(weights.view(), PERIOD) {
                let why = format!("{name}: `{}` is unlike the other parameters", spec.name);
                return Err(RankError::Contents(why));
            }
        }
        hash::same(&hash, name, self.engine.communicator())
    }
}
