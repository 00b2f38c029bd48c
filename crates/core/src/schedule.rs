//! What happens when: a front-end's events in, actions out.
//!
//! Knows no tensor, clock, communicator or rank. The order of actions is the order of collectives,
//! so it must be the same on every rank; it is, for nothing here may depend on a rank, a clock or
//! a completion.

use crate::{BucketId, BucketSpec, Placement, Stage, UnitId};

/// Something that the training loop did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The unit is about to run forward.
    PreForward(UnitId),
    /// The unit ran forward.
    PostForward(UnitId),
    /// The unit is about to run backward.
    PreBackward(UnitId),
    /// The unit ran backward.
    PostBackward(UnitId),
    /// Every gradient that the bucket expects of a micro-batch is there. This may differ between
    /// ranks, one of which did not use a parameter.
    GradsReady(BucketId),
    /// The micro-batch has no gradients left to give.
    BackwardEnd,
    /// The accumulation window is complete.
    Boundary,
    /// All ranks agreed to apply the step.
    Apply,
}

/// Something that the engine must do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make the bucket's full model weights usable.
    Unshard(BucketId),
    /// Let go of the bucket's full model weights.
    Reshard(BucketId),
    /// Take the bucket's partial gradients to this placement.
    Reduce(BucketId, Placement),
    /// Update the bucket's master weights and model weights where they rest.
    Update(BucketId),
    /// Make the updated model weights known to all ranks.
    Publish(BucketId),
}

/// Decides on gathers, reductions and updates. A value: it performs nothing.
#[derive(Clone, Debug)]
pub struct Schedule {
    stage: Stage,
    /// The order in which forward uses the units; a unit may occur more than once.
    order: Vec<UnitId>,
    position: usize,
    direction: Direction,
    buckets: Vec<Bucket>,
    /// By unit: the buckets that hold its parameters, ascending.
    buckets_of: Vec<Vec<BucketId>>,
    /// By bucket: its full model weights are usable.
    unsharded: Vec<bool>,
    /// By bucket: every gradient of this micro-batch is there.
    ready: Vec<bool>,
    /// By bucket: how often forward uses its units.
    uses: Vec<usize>,
    /// By bucket: uses of its units whose backward has not ended in this micro-batch.
    uses_left: Vec<usize>,
    /// By unit: its weights are in use, or will be next.
    wanted: Vec<bool>,
    /// Buckets `..reduce_end` have not been reduced in this micro-batch.
    reduce_end: usize,
}

#[derive(Clone, Debug)]
struct Bucket {
    units: Vec<UnitId>,
    trainable: bool,
}

impl Schedule {
    /// A schedule for `buckets`, whose units forward uses in `order`.
    pub fn new(stage: Stage, buckets: &[BucketSpec], order: Vec<UnitId>) -> Self {
        let buckets_of = buckets_of(buckets, &order);
        let uses = uses(buckets.len(), &buckets_of, &order);
        let bucket =
            |spec: &BucketSpec| Bucket { units: spec.units.clone(), trainable: spec.trainable };
        Self {
            stage,
            order,
            position: 0,
            direction: Direction::Forward,
            unsharded: vec![stage.model() == Placement::Replicated; buckets.len()],
            ready: vec![false; buckets.len()],
            uses_left: uses.clone(),
            uses,
            wanted: vec![false; buckets_of.len()],
            buckets_of,
            reduce_end: buckets.len(),
            buckets: buckets.iter().map(bucket).collect(),
        }
    }

    /// Appends to `actions` what `event` calls for.
    ///
    /// # Panics
    ///
    /// If the event names a unit or bucket that the schedule was not made with.
    pub fn on(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::PreForward(unit) => {
                self.advance(unit, Direction::Forward);
                let next = self.order.get(self.position + 1).copied();
                self.unshard(unit, next, actions);
            }
            Event::PreBackward(unit) => {
                self.advance(unit, Direction::Backward);
                let next = self.position.checked_sub(1).map(|previous| self.order[previous]);
                self.unshard(unit, next, actions);
            }
            Event::PostForward(unit) => {
                let next = self.order.get(self.position + 1).copied();
                self.reshard(unit, next, actions);
            }
            Event::PostBackward(unit) => {
                self.end_use(unit, actions);
                let next = self.position.checked_sub(1).map(|previous| self.order[previous]);
                self.reshard(unit, next, actions);
            }
            Event::GradsReady(bucket) => {
                if self.stage.model() == Placement::Replicated {
                    self.ready[bucket.0] = true;
                    self.reduce_ready(actions);
                }
            }
            Event::BackwardEnd => self.end_micro_batch(actions),
            Event::Boundary => self.reduce_window(actions),
            Event::Apply => self.update(actions),
        }
    }

    /// Finds the use of `unit` nearest to the last one, in the direction of travel. A turn, and
    /// forward after the last use, start from the end that they leave from.
    fn advance(&mut self, unit: UnitId, direction: Direction) {
        let Some(last) = self.order.len().checked_sub(1) else { return };
        let at = |position: &usize| self.order[*position] == unit;
        let turned = self.direction != direction;
        let found = match direction {
            Direction::Forward => {
                let from = if turned || self.position == last { 0 } else { self.position };
                (from..=last).find(at)
            }
            Direction::Backward => {
                let from = if turned { last } else { self.position };
                (0..=from).rev().find(at)
            }
        };
        self.direction = direction;
        // A use that the order does not know is not prefetched around.
        self.position = found.unwrap_or(self.position);
    }

    fn unshard(&mut self, unit: UnitId, next: Option<UnitId>, actions: &mut Vec<Action>) {
        for unit in [Some(unit), next].into_iter().flatten() {
            self.wanted[unit.0] = true;
            for bucket in &self.buckets_of[unit.0] {
                if !std::mem::replace(&mut self.unsharded[bucket.0], true) {
                    actions.push(Action::Unshard(*bucket));
                }
            }
        }
    }

    fn reshard(&mut self, unit: UnitId, next: Option<UnitId>, actions: &mut Vec<Action>) {
        if next == Some(unit) {
            return;
        }
        self.wanted[unit.0] = false;
        if self.stage.model() != Placement::Sharded {
            return;
        }
        // Whatever else is unsharded has a unit that is wanted still.
        for bucket in &self.buckets_of[unit.0] {
            let mut units = self.buckets[bucket.0].units.iter();
            let unwanted = units.all(|unit| !self.wanted[unit.0]);
            if unwanted && std::mem::take(&mut self.unsharded[bucket.0]) {
                actions.push(Action::Reshard(*bucket));
            }
        }
    }

    /// Where weights are gathered, gathers and reductions take turns, and a reduction may not
    /// depend on which gradients this rank has: it follows the backward of the bucket's last use.
    fn end_use(&mut self, unit: UnitId, actions: &mut Vec<Action>) {
        for bucket in &self.buckets_of[unit.0] {
            let left = &mut self.uses_left[bucket.0];
            let used = *left > 0;
            *left -= usize::from(used);
            if used && *left == 0 && self.stage.model() == Placement::Sharded {
                self.ready[bucket.0] = true;
            }
        }
        self.reduce_ready(actions);
    }

    /// Reduces from the last bucket to the first: an early bucket waits for its turn.
    fn reduce_ready(&mut self, actions: &mut Vec<Action>) {
        while let Some(index) = self.reduce_end.checked_sub(1) {
            let bucket = &self.buckets[index];
            if bucket.trainable && !self.ready[index] {
                break;
            }
            let moves = self.stage.grads() != Placement::Partial;
            if bucket.trainable && moves {
                actions.push(Action::Reduce(BucketId(index), self.stage.grads()));
            }
            self.reduce_end = index;
        }
    }

    fn end_micro_batch(&mut self, actions: &mut Vec<Action>) {
        self.ready.fill(true);
        self.reduce_ready(actions);
        self.ready.fill(false);
        self.uses_left.clone_from(&self.uses);
        self.reduce_end = self.buckets.len();
        self.wanted.fill(false);
        (self.position, self.direction) = (0, Direction::Forward);
        if self.stage.model() == Placement::Sharded {
            for (index, unsharded) in self.unsharded.iter_mut().enumerate() {
                if std::mem::take(unsharded) {
                    actions.push(Action::Reshard(BucketId(index)));
                }
            }
        }
    }

    fn reduce_window(&self, actions: &mut Vec<Action>) {
        if self.stage.grads() == Placement::Partial {
            let to = self.stage.optim();
            actions.extend(self.trainable().rev().map(|bucket| Action::Reduce(bucket, to)));
        }
    }

    fn update(&self, actions: &mut Vec<Action>) {
        for bucket in self.trainable() {
            actions.push(Action::Update(bucket));
            if self.stage.model() == Placement::Replicated {
                actions.push(Action::Publish(bucket));
            }
        }
    }

    fn trainable(&self) -> impl DoubleEndedIterator<Item = BucketId> + '_ {
        let buckets = self.buckets.iter().enumerate();
        buckets.filter(|(_, bucket)| bucket.trainable).map(|(index, _)| BucketId(index))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// By unit, of those that `buckets` or `order` name: the buckets that hold its parameters,
/// ascending.
pub(crate) fn buckets_of(buckets: &[BucketSpec], order: &[UnitId]) -> Vec<Vec<BucketId>> {
    let units = buckets.iter().flat_map(|bucket| &bucket.units).chain(order);
    let unit_count = units.map(|unit| unit.0 + 1).max().unwrap_or(0);
    let mut buckets_of = vec![Vec::new(); unit_count];
    for (index, bucket) in buckets.iter().enumerate() {
        for unit in &bucket.units {
            buckets_of[unit.0].push(BucketId(index));
        }
    }
    buckets_of
}

/// By bucket, of `bucket_count`: how often `order` uses its units.
pub(crate) fn uses(
    bucket_count: usize,
    buckets_of: &[Vec<BucketId>],
    order: &[UnitId],
) -> Vec<usize> {
    let mut uses = vec![0; bucket_count];
    for bucket in order.iter().flat_map(|unit| &buckets_of[unit.0]) {
        uses[bucket.0] += 1;
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bucketing, Bytes, DType, ParamSpec, WorldSize, assign_buckets};

    fn buckets(unit_count: usize, bucketing: Bucketing) -> Vec<BucketSpec> {
        let specs: Vec<_> = (0..unit_count)
            .map(|unit| ParamSpec::new(format!("p{unit}"), &[4], DType::F32, UnitId(unit)))
            .collect();
        assign_buckets(&specs, bucketing, WorldSize::ONE, Bytes(4))
    }

    fn run(schedule: &mut Schedule, events: impl IntoIterator<Item = Event>) -> Vec<Action> {
        let mut actions = Vec::new();
        events.into_iter().for_each(|event| schedule.on(event, &mut actions));
        actions
    }

    /// One micro-batch as the chain driver runs it: the last use runs forward only in backward.
    fn micro_batch(order: &[UnitId]) -> Vec<Event> {
        let last = order.len() - 1;
        let forward = order[..last].iter();
        let forward =
            forward.flat_map(|unit| [Event::PreForward(*unit), Event::PostForward(*unit)]);
        let backward = order.iter().rev();
        let backward =
            backward.flat_map(|unit| [Event::PreBackward(*unit), Event::PostBackward(*unit)]);
        forward.chain(backward).chain([Event::BackwardEnd]).collect()
    }

    fn peak_unsharded(actions: &[Action]) -> (usize, usize) {
        let (mut live, mut peak) = (0_usize, 0);
        for action in actions {
            match action {
                Action::Unshard(_) => live += 1,
                Action::Reshard(_) => live -= 1,
                _ => {}
            }
            peak = peak.max(live);
        }
        (live, peak)
    }

    /// The claim behind ZeRO-3's memory use: a handful of full buckets, whatever the depth.
    #[test]
    fn at_most_two_units_are_unsharded_at_once() {
        for unit_count in 1..40 {
            let order: Vec<_> = (0..unit_count).map(UnitId).collect();
            let buckets = buckets(unit_count, Bucketing::Unit);
            let mut schedule = Schedule::new(Stage::Zero3, &buckets, order.clone());
            for _ in 0..2 {
                let actions = run(&mut schedule, micro_batch(&order));
                assert_eq!(peak_unsharded(&actions), (0, unit_count.min(2)));
            }
        }
    }

    #[test]
    fn a_tied_head_keeps_the_same_bound() {
        let order: Vec<_> = [0, 1, 2, 3, 0].map(UnitId).into();
        let buckets = buckets(4, Bucketing::Unit);
        let mut schedule = Schedule::new(Stage::Zero3, &buckets, order.clone());
        let actions = run(&mut schedule, micro_batch(&order));
        assert_eq!(peak_unsharded(&actions), (0, 2));
        let gathers = |bucket| {
            actions.iter().filter(|action| **action == Action::Unshard(BucketId(bucket))).count()
        };
        assert_eq!([0, 1, 2, 3].map(gathers), [3, 2, 2, 2]);
    }

    #[test]
    fn the_next_unit_is_unsharded_before_this_one_is_let_go() {
        use Action::{Reshard, Unshard};
        let order = vec![UnitId(0), UnitId(1)];
        let mut schedule = Schedule::new(Stage::Zero3, &buckets(2, Bucketing::Unit), order);
        let events = [Event::PreForward(UnitId(0)), Event::PostForward(UnitId(0))];
        let expected = [Unshard(BucketId(0)), Unshard(BucketId(1)), Reshard(BucketId(0))];
        assert_eq!(run(&mut schedule, events), expected);
    }

    #[test]
    fn backward_prefetches_from_its_first_unit_on() {
        let order: Vec<_> = [0, 1, 2, 0].map(UnitId).into();
        let mut schedule = Schedule::new(Stage::Zero3, &buckets(3, Bucketing::Unit), order.clone());
        for _ in 0..2 {
            let forward = run(&mut schedule, micro_batch(&order)[..6].iter().copied());
            assert_eq!(peak_unsharded(&forward).0, 1, "the head's unit is prefetched");
            let head = run(&mut schedule, [Event::PreBackward(UnitId(0))]);
            assert_eq!(head, [Action::Unshard(BucketId(2))]);
            run(&mut schedule, micro_batch(&order)[7..].iter().copied());
        }
    }

    #[test]
    fn replicated_weights_are_never_gathered() {
        let order: Vec<_> = (0..3).map(UnitId).collect();
        for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2] {
            let mut schedule = Schedule::new(stage, &buckets(3, Bucketing::Unit), order.clone());
            let actions = run(&mut schedule, micro_batch(&order));
            assert_eq!(peak_unsharded(&actions), (0, 0));
        }
    }

    #[test]
    fn reductions_go_from_last_to_first_whatever_comes_first() {
        let reduce = |bucket| Action::Reduce(BucketId(bucket), Placement::Sharded);
        let order: Vec<_> = (0..3).map(UnitId).collect();
        let mut schedule = Schedule::new(Stage::Zero2, &buckets(3, Bucketing::Unit), order);
        for _ in 0..2 {
            let early = run(&mut schedule, [0, 1].map(|b| Event::GradsReady(BucketId(b))));
            assert_eq!(early, []);
            let late = run(&mut schedule, [Event::GradsReady(BucketId(2)), Event::BackwardEnd]);
            assert_eq!(late, [2, 1, 0].map(reduce));
        }
    }

    #[test]
    fn a_rank_without_some_gradients_asks_for_the_same_in_the_same_order() {
        let order: Vec<_> = [0, 1, 2, 3, 0].map(UnitId).into();
        for stage in Stage::ALL {
            for bucketing in [Bucketing::Unit, Bucketing::Bytes(Bytes(2 * 16))] {
                let buckets = buckets(4, bucketing);
                let actions = [usize::MAX, 0, 1].map(|lacking| {
                    let mut schedule = Schedule::new(stage, &buckets, order.clone());
                    let grads = |unit: UnitId| {
                        let bucket = buckets.iter().position(|b| b.units.last() == Some(&unit));
                        bucket.filter(|bucket| *bucket != lacking).map(BucketId)
                    };
                    let events = micro_batch(&order).into_iter().flat_map(|event| match event {
                        Event::PostBackward(unit) => {
                            [grads(unit).map(Event::GradsReady), Some(event)]
                        }
                        _ => [None, Some(event)],
                    });
                    run(&mut schedule, events.flatten().chain([Event::Boundary]))
                });
                assert_eq!(actions[0], actions[1], "{stage:?}");
                assert_eq!(actions[0], actions[2], "{stage:?}");
            }
        }
    }

    #[test]
    fn a_tied_unit_is_reduced_after_its_last_use() {
        let order: Vec<_> = [0, 1, 0].map(UnitId).into();
        let buckets = buckets(2, Bucketing::Unit);
        let mut schedule = Schedule::new(Stage::Zero3, &buckets, order.clone());
        for _ in 0..2 {
            let actions = run(&mut schedule, micro_batch(&order));
            let reduced = actions.iter().filter(|action| matches!(action, Action::Reduce(..)));
            let expected = [1, 0].map(|b| Action::Reduce(BucketId(b), Placement::Sharded));
            assert_eq!(reduced.copied().collect::<Vec<_>>(), expected);
            let last = actions.iter().rposition(|action| matches!(action, Action::Unshard(_)));
            assert!(last < actions.iter().position(|action| *action == expected[1]));
        }
    }

    #[test]
    fn absent_gradients_are_reduced_at_the_end_of_backward() {
        let mut schedule = Schedule::new(Stage::Zero3, &buckets(3, Bucketing::Unit), vec![]);
        let reduced = run(&mut schedule, [Event::BackwardEnd]);
        assert_eq!(reduced.len(), 3);
    }

    #[test]
    fn partial_gradients_are_reduced_once_a_window() {
        for (stage, to) in
            [(Stage::Zero0, Placement::Replicated), (Stage::Zero1, Placement::Sharded)]
        {
            let mut schedule = Schedule::new(stage, &buckets(2, Bucketing::Unit), vec![]);
            let ready = [Event::GradsReady(BucketId(1)), Event::BackwardEnd, Event::BackwardEnd];
            assert_eq!(run(&mut schedule, ready), []);
            let window = run(&mut schedule, [Event::Boundary]);
            assert_eq!(window, [1, 0].map(|bucket| Action::Reduce(BucketId(bucket), to)));
        }
    }

    #[test]
    fn a_bucket_of_several_units_stays_until_the_last_lets_go() {
        let order: Vec<_> = (0..4).map(UnitId).collect();
        let packed = buckets(4, Bucketing::Bytes(Bytes(2 * 16)));
        assert_eq!(packed.len(), 2);
        let mut schedule = Schedule::new(Stage::Zero3, &packed, order.clone());
        let actions = run(&mut schedule, micro_batch(&order));
        assert_eq!(peak_unsharded(&actions), (0, 2));
    }

    #[test]
    fn frozen_buckets_are_gathered_but_never_reduced_or_updated() {
        let mut frozen = buckets(2, Bucketing::Unit);
        frozen[0].trainable = false;
        let order: Vec<_> = (0..2).map(UnitId).collect();
        let mut schedule = Schedule::new(Stage::Zero3, &frozen, order.clone());
        let mut events = micro_batch(&order);
        events.extend([Event::Boundary, Event::Apply]);
        let actions = run(&mut schedule, events);
        assert!(actions.contains(&Action::Unshard(BucketId(0))));
        assert!(!actions.contains(&Action::Update(BucketId(0))));
        assert!(!actions.contains(&Action::Reduce(BucketId(0), Placement::Sharded)));
        assert!(actions.contains(&Action::Update(BucketId(1))));
    }
}
