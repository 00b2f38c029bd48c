//! What a rank will hold, before anything is allocated.
//!
//! Resting bytes are formulas over bucket layouts. Peaks come from running the schedule over one
//! window without tensors: what it gathers and collects at once is what the engine will.
//! Activations, and the gradients that a framework holds before the engine takes them, are the
//! model's own and not counted.

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

use crate::schedule::{buckets_of, uses};
use crate::{
    Action, BucketId, BucketSpec, Bytes, DType, Event, Placement, Precision, Schedule, Stage,
    UnitId, WorldSize,
};

/// Bytes of one rank by what they are for. A buffer that the ranks of a host share counts in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleBytes {
    /// Model weights at rest.
    pub model: Bytes,
    /// Gradient accumulators at rest.
    pub gradients: Bytes,
    /// Master weights; none where f32 model weights are the masters themselves.
    pub masters: Bytes,
    /// Optimizer states.
    pub optimizer: Bytes,
    /// Full model weights, gathered for forward or backward where they rest sharded.
    pub gathered: Bytes,
    /// Contributions of a micro-batch on their way to the accumulator.
    pub partial: Bytes,
    /// The f32 weights of a bucket that is being initialised, at the start.
    pub initial: Bytes,
}

impl RoleBytes {
    /// Every role's name and bytes.
    pub fn roles(self) -> [(&'static str, Bytes); 7] {
        [
            ("model weights", self.model),
            ("gradients", self.gradients),
            ("master weights", self.masters),
            ("optimizer states", self.optimizer),
            ("gathered weights", self.gathered),
            ("partial gradients", self.partial),
            ("initial f32 weights", self.initial),
        ]
    }

    /// The sum over roles.
    pub fn total(self) -> Bytes {
        self.roles().iter().map(|(_, bytes)| *bytes).sum()
    }

    /// The larger of each role.
    pub fn max(self, other: Self) -> Self {
        Self {
            model: self.model.max(other.model),
            gradients: self.gradients.max(other.gradients),
            masters: self.masters.max(other.masters),
            optimizer: self.optimizer.max(other.optimizer),
            gathered: self.gathered.max(other.gathered),
            partial: self.partial.max(other.partial),
            initial: self.initial.max(other.initial),
        }
    }
}

impl Add for RoleBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            model: self.model + other.model,
            gradients: self.gradients + other.gradients,
            masters: self.masters + other.masters,
            optimizer: self.optimizer + other.optimizer,
            gathered: self.gathered + other.gathered,
            partial: self.partial + other.partial,
            initial: self.initial + other.initial,
        }
    }
}

impl Sub for RoleBytes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            model: self.model - other.model,
            gradients: self.gradients - other.gradients,
            masters: self.masters - other.masters,
            optimizer: self.optimizer - other.optimizer,
            gathered: self.gathered - other.gathered,
            partial: self.partial - other.partial,
            initial: self.initial - other.initial,
        }
    }
}

/// Where collectives run; in a configuration `true` or `false`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "bool", into = "bool")]
pub enum Overlap {
    /// Where they are asked for, which waits for them.
    #[default]
    Off,
    /// Beside it: the gradients of one bucket are on their way while those of the next are
    /// collected.
    On,
}

impl From<bool> for Overlap {
    fn from(is_on: bool) -> Self {
        if is_on { Self::On } else { Self::Off }
    }
}

impl From<Overlap> for bool {
    fn from(overlap: Overlap) -> Self {
        overlap == Overlap::On
    }
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// What rests sharded.
    pub stage: Stage,
    /// The model's dtypes; a parameter of another dtype keeps its own.
    pub precision: Precision,
    /// Micro-batches in a window.
    pub accumulation: usize,
    /// f32 state tensors that the optimizer keeps a parameter.
    pub state_count: usize,
    /// Whether the ranks of a host hold one copy of replicated model weights.
    pub shares_replicas: bool,
    /// The most that a reduce-scatter takes beside its operands, and never more than these.
    pub scratch: Bytes,
    /// Where collectives run.
    pub overlap: Overlap,
    /// The buckets.
    pub buckets: &'a [BucketSpec],
    /// The order in which forward uses the units.
    pub order: &'a [UnitId],
}

/// What one rank will hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Between steps.
    pub rest: RoleBytes,
    /// The most of each role.
    pub peak: RoleBytes,
    /// What there is of each role at the moment that has the most of all together; of several, at
    /// the last.
    pub fullest: RoleBytes,
}

/// Whether f32 model weights serve as the master weights, so that no second copy is kept.
///
/// They do unless every rank of a host would update the one replica that they share.
pub fn model_is_master(stage: Stage, dtype: DType, shares_replicas: bool) -> bool {
    dtype == DType::F32 && (stage.optim() == Placement::Sharded || !shares_replicas)
}

impl MemoryPlan {
    /// The most of all roles at one moment, the f32 weights of the bucket that is being
    /// initialised included.
    pub fn peak_total(&self) -> Bytes {
        self.fullest.total()
    }

    /// Plans the bytes of every rank; shards are equal, so one plan serves all.
    pub fn new(input: &PlanInput<'_>) -> Self {
        let rest = input
            .buckets
            .iter()
            .map(|bucket| resting(bucket, input))
            .fold(RoleBytes::default(), Add::add);
        let initial = input.buckets.iter().map(|bucket| full(bucket, DType::F32)).max();
        let start = RoleBytes { initial: initial.unwrap_or_default(), ..rest };
        let buckets_of = buckets_of(input.buckets, input.order);
        let uses = uses(input.buckets.len(), &buckets_of, input.order);
        let mut walk = Walk {
            input,
            live: rest,
            peak: start,
            fullest: start,
            buckets_of: &buckets_of,
            uses_left: uses.clone(),
            uses,
            in_flight: Bytes(0),
        };
        walk.window();
        Self { rest, peak: walk.peak, fullest: walk.fullest }
    }
}

fn full(bucket: &BucketSpec, dtype: DType) -> Bytes {
    bucket.layout.padded_numel().bytes(dtype)
}

fn resting(bucket: &BucketSpec, input: &PlanInput<'_>) -> RoleBytes {
    let numel = |placement| match placement {
        Placement::Sharded => bucket.layout.shard_numel(),
        Placement::Replicated | Placement::Partial => bucket.layout.padded_numel(),
    };
    let model = numel(input.stage.model()).bytes(bucket.dtype);
    if !bucket.trainable {
        return RoleBytes { model, ..RoleBytes::default() };
    }
    let accumulate = input.precision.for_param(bucket.dtype).accumulate;
    let owned = numel(input.stage.optim()).bytes(DType::F32);
    // A rank alone in its group shares no replica.
    let shares = input.shares_replicas && bucket.layout.world_size() != WorldSize::ONE;
    let is_master = model_is_master(input.stage, bucket.dtype, shares);
    RoleBytes {
        model,
        gradients: numel(input.stage.grads()).bytes(accumulate),
        masters: if is_master { Bytes(0) } else { owned },
        optimizer: owned * input.state_count,
        ..RoleBytes::default()
    }
}

/// One window, walked through without tensors.
struct Walk<'a> {
    input: &'a PlanInput<'a>,
    live: RoleBytes,
    peak: RoleBytes,
    fullest: RoleBytes,
    /// By unit: the buckets that hold its parameters.
    buckets_of: &'a [Vec<BucketId>],
    /// By bucket: how often a micro-batch's backward comes to one of its units.
    uses: Vec<usize>,
    /// By bucket: uses of its units in backward that are still to come.
    uses_left: Vec<usize>,
    /// Of `live.partial`: what a reduction takes that may not have ended.
    in_flight: Bytes,
}

impl Walk<'_> {
    fn window(&mut self) {
        let input = self.input;
        let mut schedule = Schedule::new(input.stage, input.buckets, input.order.to_vec());
        // What one micro-batch has in flight at its end meets the next one's forward.
        for _ in 0..input.accumulation.min(2) {
            self.micro_batch(&mut schedule);
        }
        self.on(&mut schedule, Event::Boundary);
    }

    fn micro_batch(&mut self, schedule: &mut Schedule) {
        let input = self.input;
        for unit in input.order {
            self.on(schedule, Event::PreForward(*unit));
            self.on(schedule, Event::PostForward(*unit));
        }
        for unit in input.order.iter().rev() {
            self.on(schedule, Event::PreBackward(*unit));
            self.gradients_of(*unit, schedule);
            self.on(schedule, Event::PostBackward(*unit));
        }
        if input.order.is_empty() {
            self.gradients_in_any_order();
        }
        self.on(schedule, Event::BackwardEnd);
        self.uses_left.clone_from(&self.uses);
    }

    /// Without an order the last bucket's gradients may come last, and all others wait for them.
    fn gradients_in_any_order(&mut self) {
        let trained = self.input.buckets.iter().filter(|bucket| bucket.trainable);
        self.live.partial += trained.map(|bucket| self.partial(bucket)).sum();
        self.note();
    }

    fn on(&mut self, schedule: &mut Schedule, event: Event) {
        let mut actions = Vec::new();
        schedule.on(event, &mut actions);
        for action in actions {
            match action {
                Action::Unshard(id) => self.live.gathered += self.gathered(id),
                Action::Reshard(id) => self.live.gathered = self.live.gathered - self.gathered(id),
                Action::Reduce(id, _) => self.reduce(id),
                Action::Update(_) | Action::Publish(_) => {}
            }
            self.note();
        }
    }

    fn gradients_of(&mut self, unit: UnitId, schedule: &mut Schedule) {
        for id in &self.buckets_of[unit.0] {
            let bucket = &self.input.buckets[id.0];
            if !bucket.trainable {
                continue;
            }
            if self.uses_left[id.0] == self.uses[id.0] {
                self.live.partial += self.partial(bucket);
                self.note();
            }
            self.uses_left[id.0] -= 1;
            if self.uses_left[id.0] == 0 {
                self.on(schedule, Event::GradsReady(*id));
            }
        }
    }

    fn reduce(&mut self, id: BucketId) {
        self.land();
        let bucket = &self.input.buckets[id.0];
        let adds = self.input.stage.grads() == Placement::Partial;
        let wire = self.precision(bucket).wire(if adds { self.input.accumulation } else { 1 });
        let (collected, sent) = (self.partial(bucket), full(bucket, wire));
        let scratch = self.scratch(bucket, sent);
        let most = match self.collected(bucket) == wire {
            true => collected + scratch,
            // What was cast is let go before the rest is reduced.
            false => sent + collected.max(scratch),
        };
        self.live.partial = self.live.partial + most - collected;
        self.note();
        self.in_flight = most;
        if self.input.overlap == Overlap::Off {
            self.land();
        }
    }

    /// The reduction that is in flight ends: there is at most one.
    fn land(&mut self) {
        self.live.partial = self.live.partial - std::mem::take(&mut self.in_flight);
    }

    /// What a reduce-scatter of so many bytes takes beside them.
    fn scratch(&self, bucket: &BucketSpec, sent: Bytes) -> Bytes {
        match bucket.layout.world_size() {
            WorldSize::ONE => Bytes(0),
            _ => sent.min(self.input.scratch),
        }
    }

    fn precision(&self, bucket: &BucketSpec) -> Precision {
        self.input.precision.for_param(bucket.dtype)
    }

    fn collected(&self, bucket: &BucketSpec) -> DType {
        let travel_alone =
            self.input.stage.grads() == Placement::Sharded && bucket.contributions == 1;
        self.precision(bucket).collected(travel_alone)
    }

    fn partial(&self, bucket: &BucketSpec) -> Bytes {
        match self.input.stage.grads() {
            Placement::Sharded => full(bucket, self.collected(bucket)),
            Placement::Partial | Placement::Replicated => Bytes(0),
        }
    }

    fn gathered(&self, id: BucketId) -> Bytes {
        let bucket = &self.input.buckets[id.0];
        full(bucket, bucket.dtype)
    }

    fn note(&mut self) {
        self.peak = self.peak.max(self.live);
        if self.live.total() >= self.fullest.total() {
            self.fullest = self.live;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bucketing, Mesh, ParamSpec, assign_buckets};

    /// Three units of 64 bf16 elements each; the first is used again by the head.
    fn plan(stage: Stage, world_size: usize, order: &[usize], accumulation: usize) -> MemoryPlan {
        planned((Bytes(0), Overlap::Off), stage, (world_size, order, accumulation))
    }

    fn planned(
        (scratch, overlap): (Bytes, Overlap),
        stage: Stage,
        (world_size, order, accumulation): (usize, &[usize], usize),
    ) -> MemoryPlan {
        let spec = |unit| ParamSpec {
            contributions: order.iter().filter(|used| **used == unit).count().max(1),
            ..ParamSpec::new(format!("p{unit}"), &[8, 8], DType::Bf16, UnitId(unit))
        };
        let specs: Vec<_> = (0..3).map(spec).collect();
        let mesh = Mesh::data(WorldSize::new(world_size).unwrap());
        let buckets = assign_buckets(&specs, &mesh, Bucketing::Unit, Bytes(2));
        let order: Vec<_> = order.iter().copied().map(UnitId).collect();
        MemoryPlan::new(&PlanInput {
            stage,
            precision: Precision::of_model(DType::Bf16),
            accumulation,
            state_count: 2,
            shares_replicas: true,
            scratch,
            overlap,
            buckets: &buckets,
            order: &order,
        })
    }

    #[test]
    fn what_a_reduction_takes_beside_its_operands_is_counted() {
        let partial = |scratch, stage, ranks, accumulation| {
            let asked = (Bytes(scratch), Overlap::Off);
            planned(asked, stage, (ranks, &[0, 1, 2], accumulation)).peak.partial
        };
        assert_eq!(partial(1000, Stage::Zero2, 2, 1), Bytes(128 + 128));
        assert_eq!(partial(100, Stage::Zero2, 2, 1), Bytes(128 + 100));
        assert_eq!(partial(100, Stage::Zero2, 1, 1), Bytes(128));
        assert_eq!(partial(1000, Stage::Zero1, 2, 2), Bytes(256));
        assert_eq!(partial(100, Stage::Zero1, 2, 1), Bytes(128 + 100));
    }

    /// The table of the ZeRO paper with an f32 accumulator, by hand: 192 parameters, two ranks.
    #[test]
    fn each_stage_rests_on_what_the_paper_says() {
        let rest = |stage| plan(stage, 2, &[0, 1, 2], 1).rest;
        let by_hand = |model, gradients, owned| RoleBytes {
            model: Bytes(model),
            gradients: Bytes(gradients),
            masters: Bytes(owned),
            optimizer: Bytes(2 * owned),
            ..RoleBytes::default()
        };
        assert_eq!(rest(Stage::Zero0), by_hand(384, 768, 768));
        assert_eq!(rest(Stage::Zero1), by_hand(384, 768, 384));
        assert_eq!(rest(Stage::Zero2), by_hand(384, 384, 384));
        assert_eq!(rest(Stage::Zero3), by_hand(192, 384, 384));
    }

    /// Three buckets of 64 bf16 elements rest on 1,344 bytes in stage 2, and 128 are on their way
    /// in a step; while a bucket is initialised, 256.
    #[test]
    fn the_fullest_moment_may_be_the_start() {
        let planned = plan(Stage::Zero2, 2, &[0, 1, 2], 1);
        assert_eq!(planned.fullest, RoleBytes { initial: Bytes(256), ..planned.rest });
        assert_eq!(planned.peak, RoleBytes { partial: Bytes(128), ..planned.fullest });
        let planned = plan(Stage::Zero3, 2, &[0, 1, 2], 1);
        let (gathered, partial) = (Bytes(2 * 128), Bytes(128));
        assert_eq!(planned.fullest, RoleBytes { gathered, partial, ..planned.rest });
        assert_eq!(planned.peak, RoleBytes { initial: Bytes(256), ..planned.fullest });
    }

    #[test]
    fn without_an_order_all_gradients_may_wait() {
        assert_eq!(plan(Stage::Zero2, 2, &[], 1).peak.partial, Bytes(3 * 128));
        assert_eq!(plan(Stage::Zero1, 2, &[], 2).peak.partial, Bytes(0));
    }

    #[test]
    fn stage_3_gathers_two_units_and_collects_one() {
        let peak = plan(Stage::Zero3, 2, &[0, 1, 2], 4).peak;
        assert_eq!(peak.gathered, Bytes(2 * 128));
        assert_eq!(peak.partial, Bytes(128));
    }

    /// A tied unit collects in f32 over the whole backward, beside one other unit, and is cast.
    #[test]
    fn a_tied_unit_is_collected_over_the_whole_backward() {
        let peak = plan(Stage::Zero2, 2, &[0, 1, 2, 0], 1).peak;
        assert_eq!(peak.partial, Bytes(256 + 128));
        assert_eq!(peak.gathered, Bytes(0));
    }

    /// A tied unit is collected in f32 beside one that is collected and one that is on its way.
    #[test]
    fn overlap_holds_one_reduction_beside_what_is_collected() {
        let asked = (Bytes(0), Overlap::On);
        let on = |stage, order: &[usize], n| planned(asked, stage, (2, order, n)).peak;
        let beside = [1, 3].map(|window| on(Stage::Zero2, &[0, 1, 2], window).partial);
        assert_eq!(beside, [Bytes(2 * 128); 2]);
        assert_eq!(on(Stage::Zero2, &[0, 1, 2, 0], 1).partial, Bytes(256 + 2 * 128));
        assert_eq!(on(Stage::Zero1, &[0, 1, 2], 1).partial, Bytes(128));
    }

    #[test]
    fn a_window_of_one_micro_batch_is_cast_to_the_wire_in_stages_0_and_1() {
        for stage in [Stage::Zero0, Stage::Zero1] {
            let partial = [1, 2].map(|window| plan(stage, 2, &[0, 1, 2], window).peak.partial);
            assert_eq!(partial, [Bytes(128), Bytes(0)]);
        }
    }

    #[test]
    fn f32_weights_are_their_own_masters_where_one_rank_updates_them() {
        assert!(model_is_master(Stage::Zero3, DType::F32, true));
        assert!(model_is_master(Stage::Zero0, DType::F32, false));
        assert!(!model_is_master(Stage::Zero0, DType::F32, true));
        assert!(!model_is_master(Stage::Zero3, DType::Bf16, true));
    }
}
