//! The schedule's promises, on events without tensors.

use super::*;
use crate::{Bucketing, Bytes, DType, Mesh, ParamSpec, WorldSize, assign_buckets};

fn buckets(unit_count: usize, bucketing: Bucketing) -> Vec<BucketSpec> {
    let specs: Vec<_> = (0..unit_count)
        .map(|unit| ParamSpec::new(format!("p{unit}"), &[4], DType::F32, UnitId(unit)))
        .collect();
    assign_buckets(&specs, &Mesh::data(WorldSize::ONE), bucketing, Bytes(4))
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
    let forward = forward.flat_map(|unit| [Event::PreForward(*unit), Event::PostForward(*unit)]);
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
    let schedules = [Stage::Zero2, Stage::Zero3]
        .map(|stage| Schedule::new(stage, &buckets(3, Bucketing::Unit), vec![]));
    for mut schedule in schedules.clone().into_iter().chain(schedules) {
        let early = run(&mut schedule, [0, 1].map(|b| Event::GradsReady(BucketId(b))));
        assert_eq!(early, []);
        let late = run(&mut schedule, [Event::GradsReady(BucketId(2)), Event::BackwardEnd]);
        assert_eq!(late, [2, 1, 0].map(reduce));
    }
}

#[test]
fn once_agreed_buckets_take_turns_as_their_gradients_came() {
    let reduce = |bucket| Action::Reduce(BucketId(bucket), Placement::Sharded);
    let ready = |bucket| Event::GradsReady(BucketId(bucket));
    for stage in [Stage::Zero2, Stage::Zero3] {
        let mut schedule = Schedule::new(stage, &buckets(4, Bucketing::Unit), vec![]);
        // The last bucket has a parameter that nobody uses.
        let first = run(&mut schedule, [ready(0), ready(2), ready(1), Event::BackwardEnd]);
        assert_eq!(first, [3, 2, 1, 0].map(reduce));
        run(&mut schedule, [ready(1), ready(0), ready(2), Event::BackwardEnd]);
        let turns = schedule.turns_seen().unwrap();
        assert_eq!(turns, [0, 2, 1, 3].map(BucketId));
        schedule.take_turns(turns);
        assert_eq!(schedule.turns_seen(), None);
        for bucket in [0, 2, 1] {
            assert_eq!(run(&mut schedule, [ready(bucket)]), [reduce(bucket)]);
            assert!(schedule.in_pass() && schedule.has_reduced(BucketId(bucket)));
        }
        assert!(!schedule.has_reduced(BucketId(3)));
        assert_eq!(run(&mut schedule, [Event::BackwardEnd]), [reduce(3)]);
        // Another rank's order, too, once it is agreed.
        assert_eq!(run(&mut schedule, [ready(2)]), []);
        assert_eq!(run(&mut schedule, [ready(0)]), [0, 2].map(reduce));
        assert_eq!(run(&mut schedule, [Event::BackwardEnd]), [1, 3].map(reduce));
    }
}

#[test]
fn no_order_is_asked_where_there_is_one_or_gradients_rest_whole() {
    let buckets = buckets(2, Bucketing::Unit);
    let order = vec![UnitId(0), UnitId(1)];
    assert_eq!(Schedule::new(Stage::Zero3, &buckets, order).turns_seen(), None);
    assert_eq!(Schedule::new(Stage::Zero1, &buckets, vec![]).turns_seen(), None);
}

/// At every event too, for the model may communicate between them.
#[test]
fn a_rank_without_some_gradients_asks_for_the_same_at_the_same_time() {
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
                let mut asked = Vec::new();
                for event in micro_batch(&order).into_iter().chain([Event::Boundary]) {
                    let ready = match event {
                        Event::PostBackward(unit) => grads(unit).map(Event::GradsReady),
                        _ => None,
                    };
                    assert_eq!(run(&mut schedule, ready), []);
                    asked.push(run(&mut schedule, [event]));
                }
                asked
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
    for (stage, to) in [(Stage::Zero0, Placement::Replicated), (Stage::Zero1, Placement::Sharded)] {
        let mut schedule = Schedule::new(stage, &buckets(2, Bucketing::Unit), vec![]);
        let ready = [Event::GradsReady(BucketId(1)), Event::BackwardEnd, Event::BackwardEnd];
        assert_eq!(run(&mut schedule, ready), []);
        let window = run(&mut schedule, [Event::Boundary]);
        assert_eq!(window, [1, 0].map(|bucket| Action::Reduce(BucketId(bucket), to)));
    }
}

#[test]
fn gradients_that_were_kept_back_are_reduced_with_the_next_pass_or_at_the_boundary() {
    let reduce = [1, 0].map(|bucket| Action::Reduce(BucketId(bucket), Placement::Sharded));
    for ends_behind in [false, true] {
        let mut schedule = Schedule::new(Stage::Zero2, &buckets(2, Bucketing::Unit), vec![]);
        let kept = [Event::GradSync(false), Event::BackwardEnd, Event::BackwardEnd];
        assert_eq!(run(&mut schedule, kept), []);
        assert!(!schedule.has_reduced(BucketId(1)));
        let end = [Event::GradSync(true), Event::BackwardEnd, Event::Boundary];
        let end = if ends_behind { &end[2..] } else { &end[..] };
        assert_eq!(run(&mut schedule, end.iter().copied()), reduce);
        let next = run(&mut schedule, [Event::GradSync(true), Event::BackwardEnd]);
        assert_eq!(next, reduce);
    }
}

#[test]
fn nothing_stays_unsharded_over_an_update() {
    let order: Vec<_> = (0..3).map(UnitId).collect();
    let mut schedule = Schedule::new(Stage::Zero3, &buckets(3, Bucketing::Unit), order);
    let peek = [Event::PreForward(UnitId(0)), Event::PostForward(UnitId(0))];
    for end in [Event::Boundary, Event::Apply] {
        let actions = run(&mut schedule, peek.into_iter().chain([end]));
        assert_eq!(peak_unsharded(&actions), (0, 2));
        assert!(!matches!(actions.last(), Some(Action::Unshard(_))));
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

#[test]
fn a_window_that_is_given_up_leaves_nothing_behind() {
    let order: Vec<_> = (0..3).map(UnitId).collect();
    let mut schedule = Schedule::new(Stage::Zero3, &buckets(3, Bucketing::Unit), order.clone());
    let expected = run(&mut schedule.clone(), micro_batch(&order));
    let begun = micro_batch(&order);
    for end in 0..begun.len() {
        let events = begun[..end].iter().copied().chain([Event::Discard]);
        assert_eq!(peak_unsharded(&run(&mut schedule, events)).0, 0);
        assert_eq!(run(&mut schedule.clone(), micro_batch(&order)), expected);
    }
}
