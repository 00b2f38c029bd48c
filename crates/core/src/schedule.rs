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
    /// Every gradient that the bucket expects of a micro-batch is there. It means nothing where
    /// there is an order, for it may differ between ranks, one of which did not use a parameter.
    /// Without one, all ranks promise to run the same operations, gathers among them.
    GradsReady(BucketId),
    /// The backward pass has no gradients left to give.
    BackwardEnd,
    /// From the next pass on, gradients are reduced as they come (`true`, the rule), or add on
    /// this rank until they are again, or until the window is complete.
    GradSync(bool),
    /// The accumulation window is complete.
    Boundary,
    /// All ranks agreed to apply the step.
    Apply,
    /// The window is given up, wherever it is.
    Discard,
    /// Weights are about to be written by somebody else than an update.
    Edit,
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
    /// The order in which a pass reduces the buckets.
    turns: Vec<BucketId>,
    /// How many of `turns` have been reduced in this pass, or need not be.
    turn: usize,
    /// By bucket: its turn has come in this pass.
    reduced: Vec<bool>,
    /// The order in which gradients made buckets complete; `None` where it is of no account.
    completed: Option<Vec<BucketId>>,
    /// By bucket: every gradient of this micro-batch is there.
    ready: Vec<bool>,
    /// By bucket: how often forward uses its units.
    uses: Vec<usize>,
    /// By bucket: uses of its units whose backward has not ended in this micro-batch.
    uses_left: Vec<usize>,
    /// By unit: its weights are in use, or will be next.
    wanted: Vec<bool>,
    sync: Sync,
}

/// Whether gradients that could be reduced are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sync {
    /// As they come.
    On,
    /// Not now; this rank holds none that were kept back.
    Off,
    /// Not now, and some are kept back.
    Behind,
    /// As they come, those that were kept back along with them.
    CatchesUp,
}

impl Sync {
    /// The same when nothing is kept back any more.
    fn without_gradients(self) -> Self {
        match self {
            Self::On | Self::CatchesUp => Self::On,
            Self::Off | Self::Behind => Self::Off,
        }
    }
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
        // Where nobody knows in which order gradients come, it is asked.
        let asks = order.is_empty() && stage.grads() == Placement::Sharded;
        Self {
            stage,
            turns: (0..buckets.len()).rev().map(BucketId).collect(),
            turn: 0,
            reduced: vec![false; buckets.len()],
            completed: asks.then(Vec::new),
            order,
            position: 0,
            direction: Direction::Forward,
            unsharded: vec![stage.model() == Placement::Replicated; buckets.len()],
            ready: vec![false; buckets.len()],
            uses_left: uses.clone(),
            uses,
            wanted: vec![false; buckets_of.len()],
            buckets_of,
            sync: Sync::On,
            buckets: buckets.iter().map(bucket).collect(),
        }
    }

    /// Whether the bucket's gradients of this pass are on their way: what comes now is too late.
    pub fn has_reduced(&self, bucket: BucketId) -> bool {
        self.reduces() && self.reduced[bucket.0]
    }

    /// Whether a backward pass has begun, as far as units and buckets tell, and not ended.
    pub fn in_pass(&self) -> bool {
        self.direction == Direction::Backward || self.turn > 0
    }

    /// The order in which this rank's gradients made buckets complete so far, those that they did
    /// not last; `None` where an order of units says when to reduce, where gradients rest whole, or
    /// where [`take_turns`](Self::take_turns) has been called.
    pub fn turns_seen(&self) -> Option<Vec<BucketId>> {
        let mut turns = self.completed.clone()?;
        let others = self.turns.iter().filter(|bucket| !turns.contains(bucket));
        turns.extend(others.copied().collect::<Vec<_>>());
        Some(turns)
    }

    /// From the next pass on, buckets are reduced in this order, which all ranks have agreed upon.
    ///
    /// # Panics
    ///
    /// Within a pass, or if it is no order of all buckets.
    pub fn take_turns(&mut self, turns: Vec<BucketId>) {
        assert!(!self.in_pass(), "an order of reductions holds for whole passes");
        let mut sorted = turns.clone();
        sorted.sort_unstable();
        let all = (0..self.buckets.len()).map(BucketId);
        assert!(sorted.into_iter().eq(all), "each bucket has one turn");
        (self.turns, self.completed) = (turns, None);
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
                if self.order.is_empty() {
                    self.ready[bucket.0] = true;
                    let completed = self.completed.as_mut();
                    if let Some(seen) = completed.filter(|seen| !seen.contains(&bucket)) {
                        seen.push(bucket);
                    }
                    self.reduce_ready(actions);
                }
            }
            Event::BackwardEnd => self.end_pass(actions),
            Event::GradSync(on) => {
                self.sync = match (on, self.sync) {
                    (true, Sync::Behind | Sync::CatchesUp) => Sync::CatchesUp,
                    (true, Sync::On | Sync::Off) => Sync::On,
                    (false, Sync::Behind | Sync::CatchesUp) => Sync::Behind,
                    (false, Sync::On | Sync::Off) => Sync::Off,
                };
            }
            Event::Boundary => self.reduce_window(actions),
            Event::Apply => self.update(actions),
            Event::Edit => self.reshard_all(actions),
            Event::Discard => {
                self.begin_pass(actions);
                self.sync = self.sync.without_gradients();
            }
        }
    }

    /// Whether gradients leave this rank before the window is complete.
    pub fn reduces(&self) -> bool {
        let moves = self.stage.grads() != Placement::Partial;
        moves && matches!(self.sync, Sync::On | Sync::CatchesUp)
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

    /// Gathers, reductions and what the model itself communicates in backward take turns, so a
    /// reduction may not depend on which gradients this rank has: it follows the backward of the
    /// bucket's last use. Only where nobody gave an order, it follows the last gradient: whoever
    /// gathers by hand runs the same on every rank.
    fn end_use(&mut self, unit: UnitId, actions: &mut Vec<Action>) {
        for bucket in &self.buckets_of[unit.0] {
            let left = &mut self.uses_left[bucket.0];
            let used = *left > 0;
            *left -= usize::from(used);
            if used && *left == 0 {
                self.ready[bucket.0] = true;
            }
        }
        self.reduce_ready(actions);
    }

    /// Reduces bucket after bucket: an early one waits for its turn.
    fn reduce_ready(&mut self, actions: &mut Vec<Action>) {
        while let Some(&id) = self.turns.get(self.turn) {
            let trainable = self.buckets[id.0].trainable;
            if trainable && !self.ready[id.0] {
                break;
            }
            if trainable && self.reduces() {
                actions.push(Action::Reduce(id, self.stage.grads()));
            }
            self.reduced[id.0] = true;
            self.turn += 1;
        }
    }

    fn end_pass(&mut self, actions: &mut Vec<Action>) {
        self.ready.fill(true);
        self.reduce_ready(actions);
        self.sync = match self.sync {
            Sync::On | Sync::CatchesUp => Sync::On,
            Sync::Off | Sync::Behind => Sync::Behind,
        };
        self.begin_pass(actions);
    }

    fn begin_pass(&mut self, actions: &mut Vec<Action>) {
        self.ready.fill(false);
        self.uses_left.clone_from(&self.uses);
        self.turn = 0;
        self.reduced.fill(false);
        self.reshard_all(actions);
    }

    /// Between passes nobody needs full weights, and an update must not leave old ones behind.
    fn reshard_all(&mut self, actions: &mut Vec<Action>) {
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

    /// Reduces what no pass has reduced.
    fn reduce_window(&mut self, actions: &mut Vec<Action>) {
        self.reshard_all(actions);
        let kept_back = matches!(self.sync, Sync::Behind | Sync::CatchesUp);
        let to = match self.stage.grads() {
            Placement::Partial => self.stage.optim(),
            grads if kept_back => grads,
            _ => return,
        };
        actions.extend(self.trainable().rev().map(|bucket| Action::Reduce(bucket, to)));
        self.sync = self.sync.without_gradients();
    }

    fn update(&mut self, actions: &mut Vec<Action>) {
        self.reshard_all(actions);
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
mod tests;
