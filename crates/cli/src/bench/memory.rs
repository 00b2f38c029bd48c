//! `oxizero bench memory`: what training takes of memory at most, beside what it may.
//!
//! A bf16 model is trained by AdamW with f32 accumulation on made-up gradients. Each rank has its
//! own model weights, as where a framework writes to them. [`resident`](super::resident) says what
//! is counted; it is counted over what a new process has before the engine is made.

use std::io;

use clap::Args;
use oxizero::{Engine, EngineOptions, GroupOptions, OptimizerSetup, Overlap, Reach, StepOutcome};
use oxizero_comm::Communicator;
use oxizero_comm::shm::Replicas;
use oxizero_core::config::Launch;
use oxizero_core::{
    Bytes, ConfigError, DType, Numel, ParamSpec, Placement, Precision, ProcessGroup, Stage, UnitId,
    WorldSize,
};
use oxizero_device::{Buffer, View, kernels};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};
use serde::{Deserialize, Serialize};

use super::micro_batch::MicroBatch;
use super::resident::{peak, resident};
use super::rows::{BYTES, Row};
use super::{Benchmark, model, room};
use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

/// What is trained.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Elements of the model, which is bf16; gradients accumulate in f32.
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = model::params)]
    params: usize,
    /// ZeRO stage, 0 to 3.
    #[arg(long, value_name = "S", default_value = "2", value_parser = args::stage)]
    stage: Stage,
    /// The dtype in which gradients travel, f32 or bf16; one after the other if absent.
    #[arg(long, value_name = "DTYPE", value_parser = model::dtype)]
    wire: Option<DType>,
}

/// Of the model; 16 layers.
const TENSORS: usize = 150;
const MODEL: DType = DType::Bf16;
const WIRES: [DType; 2] = [DType::Bf16, DType::F32];
/// Micro-batches of a window: more than one, so that gradients are added to what is there.
const ACCUMULATION: usize = 2;
/// f32 master weight and two moments, a parameter.
const OWNED_BYTES: usize = 12;

const BOUND: &str = "bound";

impl Benchmark for Memory {
    fn title(&self) -> String {
        let Self { params, stage, .. } = self;
        let (stage, wire) = (u8::from(*stage), self.wire());
        format!("memory a rank: {params} parameters, {MODEL}; ZeRO stage {stage}, {wire} wire")
    }

    fn replicas(&self) -> Replicas {
        Replicas::Private
    }

    fn check_before(&self, world_size: WorldSize, launch: Launch) -> Result<Bytes, CliError> {
        if launch == Launch::Threads {
            let advice = "the system counts memory by process; leave out --launch".into();
            let (first, second) = ("bench memory".into(), "launch = threads".into());
            return Err(ConfigError::Conflict { first, second, advice }.into());
        }
        let specs = model::specs(self.params, TENSORS, MODEL);
        let order = MicroBatch::new(&specs).order();
        let reach = Reach { world_size, shares_replicas: false, overlap: Overlap::Off };
        let plan = self.options().plan(&specs, &order, &rule(), reach)?;
        room::check("params", &self.params, plan.peak_total() * world_size.get())
    }

    fn run(&self, windows: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let specs = model::specs(self.params, TENSORS, MODEL);
        comm.barrier()?;
        let base = resident(comm)?;
        let (trained, peak) = peak(comm, || self.train(&specs, windows, comm))?;
        let Ours { planned, accounted } = trained?;
        let measured = largest(peak - base, comm)?;
        let bound = bound(&specs, self.stage, self.wire(), comm.world_size());
        let name = format!("memory/stage{}/{}-wire", u8::from(self.stage), self.wire());
        let row = |(end, bytes): (&str, Bytes)| Row {
            name: format!("{name}{end}"),
            ranks: comm.world_size().get(),
            median: bytes.0 as f64,
            unit: BYTES,
            reference: BOUND.into(),
            ratio: bytes.0 as f64 / bound.0 as f64,
            hash: None,
        };
        let figures =
            [("", measured), ("/accounted", accounted), ("/planned", planned), ("/bound", bound)];
        Ok(figures.map(row).into())
    }

    /// The first figure that is above the bound. Small models are not judged: what a process itself
    /// holds is no small part of theirs.
    fn judge(&self, rows: &[Row]) -> Result<(), RankError> {
        if self.params < JUDGED_FROM { Ok(()) } else { check(rows) }
    }
}

impl Memory {
    /// One bench for each dtype of the wire: memory that an allocator keeps of the first must not
    /// be there in the second.
    pub(crate) fn by_wire(&self) -> Vec<Self> {
        let wires = self.wire.map_or(WIRES.to_vec(), |wire| vec![wire]);
        wires.into_iter().map(|wire| Self { wire: Some(wire), ..self.clone() }).collect()
    }

    fn wire(&self) -> DType {
        self.wire.unwrap_or(MODEL)
    }

    fn options(&self) -> EngineOptions {
        let precision = Precision { reduce: self.wire(), ..Precision::of_model(MODEL) };
        EngineOptions { accumulation: ACCUMULATION, ..EngineOptions::new(self.stage, precision) }
    }

    fn train(
        &self,
        specs: &[ParamSpec],
        windows: usize,
        comm: &dyn Communicator,
    ) -> Result<Ours, RankError> {
        let comm = comm.split(&ProcessGroup::world(comm.world_size()))?;
        let (gradient, batch) = (Gradient::new(specs, &*comm), MicroBatch::new(specs));
        let mut engine = self.engine(specs, comm)?;
        for _ in 0..windows {
            for _ in 1..ACCUMULATION {
                gradient.backward(&mut engine, &batch)?;
                engine.step()?;
            }
            gradient.backward(&mut engine, &batch)?;
            gradient.check(self.params, &engine.step()?)?;
        }
        Ok(Ours { planned: engine.plan().peak_total(), accounted: engine.peak_memory_total() })
    }

    fn engine(
        &self,
        specs: &[ParamSpec],
        comm: Box<dyn Communicator>,
    ) -> Result<Engine, RankError> {
        let options = self.options();
        let optimizer = OptimizerSetup {
            rule: Box::new(rule()),
            groups: vec![GroupOptions { lr: 1e-3, weight_decay: 0.1 }],
            schedule: LrSchedule::constant(0),
        };
        let order = MicroBatch::new(specs).order();
        let mut initial = |_, weights: &mut [f32]| weights.fill(0.01);
        Ok(Engine::new(specs.to_vec(), order, options, optimizer, comm, &mut initial)?)
    }
}

fn rule() -> AdamW {
    AdamW::new(MomentOptions::default()).expect("the defaults are numbers")
}

/// Parameters from which on a measured figure is held against the bound.
const JUDGED_FROM: usize = 64 << 20;

fn check(rows: &[Row]) -> Result<(), RankError> {
    let Some(row) = rows.iter().find(|row| row.ratio > 1.0) else { return Ok(()) };
    let Row { name, median, ratio, .. } = row;
    Err(RankError::OverBound(format!("{name} is {median} bytes, {ratio:.4} times the bound")))
}

/// What the engine says of its own memory.
struct Ours {
    planned: Bytes,
    accounted: Bytes,
}

/// The gradient of a layer: one buffer, which serves all of them in turn.
struct Gradient {
    values: Buffer,
    /// The mean over ranks of each element.
    mean: f64,
}

impl Gradient {
    /// As long as the largest unit; rank `r` gives `r + 1` everywhere, up to 8.
    fn new(specs: &[ParamSpec], comm: &dyn Communicator) -> Self {
        let given = |rank: usize| (rank % 8 + 1) as f32;
        let mut values = Buffer::heap(largest_unit(specs), MODEL);
        let numel = values.numel().0;
        let block = [given(comm.rank().0); 1 << 10];
        for start in (0..numel).step_by(block.len()) {
            let end = numel.min(start + block.len());
            kernels::cast(View::F32(&block[..end - start]), values.range_mut(start..end));
        }
        let sum: f32 = comm.world_size().ranks().map(|rank| given(rank.0)).sum();
        Self { values, mean: f64::from(sum) / comm.world_size().get() as f64 }
    }

    fn backward(&self, engine: &mut Engine, batch: &MicroBatch) -> Result<(), RankError> {
        Ok(batch.run(engine, |of| self.values.range(of.in_unit()))?)
    }

    /// Whether the window was applied with the mean of all ranks' gradients.
    fn check(&self, params: usize, outcome: &StepOutcome) -> Result<(), RankError> {
        let expected = self.mean * (params as f64).sqrt();
        match outcome {
            StepOutcome::Applied { norm_before, .. }
                if (norm_before / expected - 1.0).abs() < 1e-6 =>
            {
                Ok(())
            }
            other => {
                let why = format!("memory: {other:?} instead of a step of norm {expected}");
                Err(RankError::Contents(why))
            }
        }
    }
}

/// The most that a rank may take: what the stage lets rest (ZeRO paper, section 3, with f32
/// accumulators), the gradient of one layer, which the framework holds, two buckets as they
/// travel, and a buffer for one bucket's shards of the other ranks. Where weights rest sharded,
/// two layers' weights are gathered at a time. A bucket is a layer, without its padding. Sums of
/// several micro-batches travel in f32 whatever the wire is.
fn bound(specs: &[ParamSpec], stage: Stage, wire: DType, world_size: WorldSize) -> Bytes {
    let ranks = world_size.get();
    let all: Numel = specs.iter().map(ParamSpec::numel).sum();
    let rests = |bytes: Bytes, placement| match placement {
        Placement::Sharded => Bytes(bytes.0.div_ceil(ranks)),
        Placement::Replicated | Placement::Partial => bytes,
    };
    let layer = largest_unit(specs);
    let travels = if stage.grads() == Placement::Sharded { wire } else { DType::F32 };
    let gathered = if stage.model() == Placement::Sharded { 2 } else { 0 };
    rests(all.bytes(MODEL), stage.model())
        + rests(all.bytes(DType::F32), stage.grads())
        + rests(Bytes(all.0 * OWNED_BYTES), stage.optim())
        + layer.bytes(MODEL)
        + layer.bytes(travels) * 2
        + Bytes(layer.bytes(travels).0 * (ranks - 1) / ranks)
        + layer.bytes(MODEL) * gathered
}

fn units(specs: &[ParamSpec]) -> usize {
    specs.last().map_or(0, |spec| spec.unit.0 + 1)
}

fn largest_unit(specs: &[ParamSpec]) -> Numel {
    let of = |unit| specs.iter().filter(|spec| spec.unit == unit).map(ParamSpec::numel).sum();
    (0..units(specs)).map(UnitId).map(of).max().unwrap_or_default()
}

/// Of all ranks'.
fn largest(bytes: Bytes, comm: &dyn Communicator) -> Result<Bytes, RankError> {
    let told = comm.exchange("bytes", &(bytes.0 as u64).to_le_bytes())?;
    let bytes = |told: &Vec<u8>| told.as_slice().try_into().map(u64::from_le_bytes);
    let all: Result<Vec<u64>, _> = told.iter().map(bytes).collect();
    let all = all.map_err(io::Error::other)?;
    Ok(Bytes(all.into_iter().max().unwrap_or(0) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 1,024 elements, the larger of two layers has 768.
    #[test]
    fn the_bound_is_that_of_the_paper_and_of_what_travels() {
        let spec =
            |unit: usize, numel| ParamSpec::new(unit.to_string(), &[numel], MODEL, UnitId(unit));
        let specs = [spec(0, 256), spec(1, 768)];
        let bound = |stage, wire| bound(&specs, stage, wire, WorldSize::new(2).unwrap()).0;
        let [bf16, f32] = [1536 + 2 * 1536 + 768, 1536 + 2 * 3072 + 1536];
        assert_eq!(bound(Stage::Zero2, DType::Bf16), 2048 + 12 * 512 + 4 * 512 + bf16);
        assert_eq!(bound(Stage::Zero2, DType::F32), 2048 + 12 * 512 + 4 * 512 + f32);
        assert_eq!(bound(Stage::Zero0, DType::F32), 2048 + 12 * 1024 + 4 * 1024 + f32);
        for wire in WIRES {
            assert_eq!(bound(Stage::Zero1, wire), 2048 + 12 * 512 + 4 * 1024 + f32);
        }
        assert_eq!(bound(Stage::Zero3, DType::Bf16), 1024 + 16 * 512 + bf16 + 2 * 1536);
    }

    #[test]
    fn a_figure_above_the_bound_is_an_error_that_names_it() {
        let row = |name: &str, ratio| Row {
            name: name.into(),
            ranks: 2,
            median: 8.0,
            unit: BYTES,
            reference: BOUND.into(),
            ratio,
            hash: None,
        };
        check(&[row("a", 0.5), row("b", 1.0)]).unwrap();
        let error = check(&[row("a", 0.5), row("b", 1.01)]).unwrap_err().to_string();
        assert_eq!(error, "b is 8 bytes, 1.0100 times the bound");
    }
}
