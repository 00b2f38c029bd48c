//! The end of a window: gradients are reduced, judged by all ranks, and applied or forgotten.

use oxizero_core::{Action, BucketId, Event, ParamId};
use oxizero_device::View;
use oxizero_device::kernels::Measured;

use crate::bucket::Bucket;
use crate::engine::{ParamState, Seen};
use crate::groups::Message;
use crate::observer::Span;
use crate::step::{Reduced, Report, SkipReason, StepOutcome, Unscaled, Verdict};
use crate::window::{Collected, MicroBatch, Window, WindowState};
use crate::{Engine, EngineError, Norm, setup};

/// What one piece of a reduced gradient measures.
pub(crate) struct MeasuredPiece {
    /// Whether this rank's is the one that counts, of replicas.
    pub(crate) counts: bool,
    pub(crate) param: ParamId,
    pub(crate) measured: Measured,
}

/// What ranks exchange when they agree on the order of reductions.
const TURNS: &str = "order of reductions";

/// Whether a step ends the accumulation window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Boundary {
    /// If the window holds [`accumulation`](crate::EngineOptions::accumulation) micro-batches.
    #[default]
    Counted,
    /// It does, however few micro-batches there are: what was collected is divided by what it
    /// holds.
    Now,
    /// It does not, however many micro-batches there are.
    Later,
}

impl Engine {
    /// Says which steps end the window from now on; all ranks say the same.
    pub fn set_boundary(&mut self, boundary: Boundary) {
        self.boundary = boundary;
    }

    /// Whether a window of `n` micro-batches ends.
    pub(crate) fn ends(&self, n: usize) -> bool {
        match self.boundary {
            Boundary::Counted => n >= self.options.accumulation,
            Boundary::Now => true,
            Boundary::Later => false,
        }
    }

    /// Ends the micro-batch and, at the window's boundary, updates the weights; a collective call.
    pub fn step(&mut self) -> Result<StepOutcome, EngineError> {
        self.step_unless(false)
    }

    /// Takes part in the step that the other ranks take, where this rank's front-end refuses it, or
    /// no backward has ended: they are told, and nothing is updated. The window stays as it is, and
    /// `step` may be called again. Within a window there is nothing to take part in.
    pub fn refuse_step(&mut self) -> Result<(), EngineError> {
        if self.is_within_window() {
            return Ok(());
        }
        match self.step_unless(true) {
            Err(EngineError::PeerRefused { .. }) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Whether more micro-batches are to come after this one.
    fn is_within_window(&self) -> bool {
        self.window.ended().is_some_and(|n| !self.ends(n + 1))
    }

    fn step_unless(&mut self, refuses: bool) -> Result<StepOutcome, EngineError> {
        self.check_alive()?;
        if self.window.micro_batch != MicroBatch::BackwardEnded && !refuses {
            return Err(EngineError::NoBackward);
        }
        if matches!(self.window.state, WindowState::Reduced(_)) && !self.ends(usize::MAX) {
            return Err(EngineError::AlreadyReduced);
        }
        if let Some(n) = self.window.ended().filter(|_| self.is_within_window()) {
            let (n, of) = (n + 1, self.options.accumulation);
            self.window.state = WindowState::Accumulating(n);
            self.window.micro_batch = MicroBatch::Open;
            return Ok(StepOutcome::Accumulated { n, of });
        }
        self.look_after_save()?;
        self.reduce_window("step", refuses)?;
        let reduced = self.take_reduced();
        let mut report = self.report(&reduced);
        report.refuses |= refuses;
        let verdict = match self.judge(report) {
            Ok(verdict) => verdict,
            Err(error) => {
                // Nothing was done: once the weights are let go, step() may be called again.
                self.window.state = WindowState::Reduced(reduced);
                return Err(error);
            }
        };
        let outcome = self.conclude(reduced, verdict);
        self.end_window();
        self.groups.observed().window_ended();
        outcome
    }

    /// Gives up the window, wherever it is: torch's `zero_grad`. Weights and optimizer states are
    /// as they were after the last step. All ranks call it at the same place in their order.
    pub fn discard_window(&mut self) -> Result<(), EngineError> {
        self.run(Event::Discard)?;
        self.land()?;
        self.end_pass();
        self.params.iter_mut().for_each(|param| param.arrived = 0);
        self.missing = setup::expected(&self.specs, &self.buckets);
        self.end_window();
        self.window.state = WindowState::Empty;
        self.apply_sync()
    }

    /// Takes all gradients to the optimizer's placement, once; a part of the collective `call`,
    /// which this rank may refuse.
    pub(crate) fn reduce_window(&mut self, call: &str, refuses: bool) -> Result<(), EngineError> {
        let Some(n) = self.window.ended() else { return Ok(()) };
        let non_finite = self.params.iter().position(|param| param.seen == Seen::NonFinite);
        let collected = Collected {
            refuses,
            micro_batches: n + 1,
            passes: self.window.passes,
            backwards: self.window.backwards,
            loss_scale: self.window.loss_scale,
            weight: self.window.weight,
            non_finite: non_finite.map(ParamId),
            used: self.params.iter().map(|param| param.seen != Seen::Nothing).collect(),
        };
        let sharing = |state: &ParamState| self.buckets[state.bucket.0].spec().sharing;
        let params: Vec<_> = self.specs.iter().zip(self.params.iter().map(sharing)).collect();
        let agreed = collected.agree(call, &self.groups, &params);
        let agreed = agreed.map_err(|error| self.settled(error))?;
        self.window.passes = agreed.passes();
        let reduced = agreed.reduced(self.options.reduction)?;
        self.run(Event::Boundary)?;
        self.land()?;
        self.window.state = WindowState::Reduced(reduced);
        self.agree_turns()
    }

    /// After the first window, buckets are reduced in the order in which rank 0's gradients came.
    fn agree_turns(&mut self) -> Result<(), EngineError> {
        let Some(turns) = self.schedule.turns_seen() else { return Ok(()) };
        let bytes: Vec<u8> = turns.iter().flat_map(|id| (id.0 as u64).to_le_bytes()).collect();
        let told = self
            .groups
            .exchange(Message::Turns, TURNS, &bytes)
            .map_err(|error| self.fail(error))?;
        let (words, _) = told[0].as_chunks();
        let turns = words.iter().map(|word| BucketId(u64::from_le_bytes(*word) as usize));
        self.schedule.take_turns(turns.collect());
        Ok(())
    }

    fn take_reduced(&mut self) -> Reduced {
        match std::mem::replace(&mut self.window.state, WindowState::Consumed) {
            WindowState::Reduced(reduced) => reduced,
            _ => unreachable!("reduce_window() leaves a reduced window"),
        }
    }

    fn report(&mut self, reduced: &Reduced) -> Report {
        let (norm, mut norm_part) = (self.options.norm, 0.0);
        let compared = self.compared();
        let weights = self.views_of(&compared);
        let (pieces, checksums) = self.measure_with(&weights, norm, reduced.divisor());
        for piece in pieces.iter().filter(|piece| piece.counts) {
            norm.add(piece.measured, &mut norm_part);
        }
        let non_finite = pieces.iter().filter(|piece| !piece.measured.finite);
        let non_finite = non_finite.map(|piece| piece.param).min();
        Report {
            norm_part,
            non_finite: non_finite.filter(|_| self.options.check_finite),
            refuses: !self.buckets.iter_mut().all(Bucket::is_exclusive),
            hyper: self.hyper.fingerprint(),
            weights: self.fingerprints(&compared, &checksums),
        }
    }

    /// What all ranks say to their reports.
    fn judge(&mut self, report: Report) -> Result<Verdict, EngineError> {
        let verdict = report.agree(self.options.norm, &self.groups);
        let verdict = verdict.map_err(|error| self.settled(error));
        self.check_exclusive()?;
        let verdict = verdict?;
        if verdict.weights_differ {
            self.compare_all()?;
        }
        self.written.agreed();
        Ok(verdict)
    }

    /// Measures the reduced gradients in this rank's shards, piece by piece; on a device they are
    /// asked for together.
    pub(crate) fn measure(&self, norm: Norm, divisor: f32) -> Vec<MeasuredPiece> {
        self.measure_with(&[], norm, divisor).0
    }

    /// The same, and the checksums of `weights`; on a device all of it is asked for together.
    fn measure_with(
        &self,
        weights: &[View<'_>],
        norm: Norm,
        divisor: f32,
    ) -> (Vec<MeasuredPiece>, Vec<u64>) {
        let (mut pieces, mut grads) = (Vec::new(), Vec::new());
        for bucket in &self.buckets {
            let counts = self.groups.counts(bucket.spec().sharing);
            for (param, grad) in bucket.reduced() {
                pieces.push((counts, param));
                grads.push(grad);
            }
        }
        let (measured, checksums) = norm.measure_with(weights, &grads, divisor);
        let piece = |((counts, param), measured)| MeasuredPiece { counts, param, measured };
        (pieces.into_iter().zip(measured).map(piece).collect(), checksums)
    }

    fn check_exclusive(&mut self) -> Result<(), EngineError> {
        let mut buckets = self.buckets.iter_mut();
        match buckets.find_map(|bucket| (!bucket.is_exclusive()).then_some(bucket)) {
            Some(bucket) => {
                let param = self.specs[bucket.spec().params[0].0].name.clone();
                Err(EngineError::WeightsInUse { param })
            }
            None => Ok(()),
        }
    }

    fn conclude(&mut self, reduced: Reduced, verdict: Verdict) -> Result<StepOutcome, EngineError> {
        if let Some(owned) = verdict.non_finite {
            let (param, rank) = reduced.blame(owned);
            self.scaler.overflowed()?;
            let parameter = self.specs[param.0].name.clone();
            return Ok(StepOutcome::Skipped { reason: SkipReason::NonFinite, parameter, rank });
        }
        let unscaled = reduced.unscale(verdict.norm, self.options.clip_norm);
        self.update(&unscaled)?;
        self.scaler.applied();
        let norm_after = verdict.norm * f64::from(unscaled.factor());
        Ok(StepOutcome::Applied { norm_before: verdict.norm, norm_after })
    }

    fn update(&mut self, unscaled: &Unscaled) -> Result<(), EngineError> {
        self.count_updates(unscaled.used());
        let mut actions = Vec::new();
        self.schedule.on(Event::Apply, &mut actions);
        for action in actions {
            match action {
                Action::Update(id) => {
                    let seen = self.groups.observed().of(Span::Update(id));
                    seen.during(|| self.update_bucket(id, unscaled));
                }
                Action::Reshard(id) => self.on_bucket(id, |bucket, _| bucket.reshard())?,
                Action::Publish(id) => {
                    let seen = self.groups.observed().of(Span::Publish(id));
                    self.on_bucket(id, |bucket, comm| bucket.publish(comm, seen))?;
                }
                other => unreachable!("{other:?} is no part of an update"),
            }
        }
        self.settle()?;
        self.applied_steps += 1;
        Ok(())
    }

    fn count_updates(&mut self, used: &[bool]) {
        for (state, used) in self.params.iter_mut().zip(used) {
            state.updates += u64::from(*used);
        }
    }

    fn update_bucket(&mut self, id: BucketId, unscaled: &Unscaled) {
        let (hyper, lr_factor) = (&self.hyper, self.hyper.lr_factor(self.applied_steps));
        let (params, specs) = (&self.params, &self.specs);
        let of = |param: ParamId| {
            let used = unscaled.used()[param.0];
            let updates = params[param.0].updates;
            used.then(|| hyper.update(specs[param.0].group, updates, lr_factor))
        };
        self.buckets[id.0].update(unscaled, of);
    }

    fn end_window(&mut self) {
        self.buckets.iter_mut().for_each(Bucket::clear_grad);
        self.params.iter_mut().for_each(|param| param.seen = Seen::Nothing);
        self.window = Window::new(WindowState::Consumed);
        let traffic = self.groups.traffic();
        self.step_traffic = traffic - self.step_start;
        self.step_start = traffic;
    }
}
