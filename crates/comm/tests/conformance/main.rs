//! What every back end promises, run on each of them with the same cases.
#![allow(clippy::unwrap_used, reason = "in a test, an unwrap is an assertion")]

mod cases;
mod data;
mod deadlocks;
mod failures;
mod library;
mod many;
mod meshes;
mod one_by_one;
mod overlap;
mod processes;
mod setting;
mod views;

use std::time::Duration;

use oxizero_comm::{Beside, CommError, Communicator, overlapped, threads};
use oxizero_core::{Rank, WorldSize};

use self::processes::run_in_every_world;
use self::setting::Setting;

/// What one rank does in a test; it fails by a panic.
type Case = fn(Box<dyn Communicator>);

const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;

/// Long enough for a busy machine; what hangs fails the test.
const DEADLINE: Duration = Duration::from_secs(30);

macro_rules! conformance {
    ($($module:ident::$name:ident),* $(,)?) => {
        mod on_threads {
            $(#[test] fn $name() { super::in_threads(super::$module::$name); })*
        }
        mod on_threads_overlapped {
            $(#[test] fn $name() { super::in_threads_overlapped(super::$module::$name); })*
        }
        mod on_processes {
            use super::processes::run_in_every_world;
            use super::setting::Setting;
            $(#[test] fn $name() { run_in_every_world(stringify!($name), Setting::Shared); })*
        }
        mod on_processes_overlapped {
            use super::processes::run_in_every_world;
            use super::setting::Setting;
            $(#[test] fn $name() { run_in_every_world(stringify!($name), Setting::Overlapped); })*
        }
        mod on_processes_with_private_replicas {
            use super::processes::run_in_every_world;
            use super::setting::Setting;
            $(#[test] fn $name() { run_in_every_world(stringify!($name), Setting::Private); })*
        }
        /// What a process of a test's world may be asked to do.
        const CASES: &[(&str, Case)] = &[$((stringify!($name), $module::$name)),*];
    };
}

conformance! {
    cases::sums_equal_a_plain_loop,
    cases::sums_are_trees_in_rank_order,
    cases::partial_sums_become_replicated,
    cases::gathers_complete_every_buffer,
    cases::replicas_hold_every_shard,
    cases::broadcasts_come_from_each_root,
    cases::exchanges_are_in_rank_order,
    cases::traffic_is_counted,
    cases::groups_work_apart,
    cases::memory_is_zeroed_whenever_it_is_handed_out,
    many::many_shards_are_one_collective,
    many::shards_of_replicas_are_gathered,
    one_by_one::shards_that_are_gathered_one_by_one_are_the_same,
    many::lengths_that_do_not_add_up_are_an_error_on_every_rank,
    many::other_sums_of_shards_are_named,
    many::shards_that_do_not_fit_are_refused,
    views::every_rank_views_all_shards,
    views::shards_that_cannot_be_viewed_are_refused,
    meshes::all_groups_of_a_mesh_work_at_once,
    meshes::groups_of_one_rank_are_without_number,
    meshes::a_rank_that_leaves_one_group_ends_all_who_wait,
    meshes::a_mismatch_in_one_group_ends_the_others,
    failures::mismatches_name_both_sides,
    failures::misuse_is_refused_and_harmless,
    failures::an_abort_reaches_every_rank,
    failures::a_rank_that_leaves_is_named_by_those_who_wait,
    failures::leaving_early_harms_nobody_who_does_not_wait,
    deadlocks::two_ranks_that_wait_for_each_other_end_all,
    deadlocks::three_ranks_that_wait_in_a_ring_end_all,
    deadlocks::a_split_that_a_rank_does_not_come_to_ends_all,
    deadlocks::a_slow_rank_is_waited_for,
    deadlocks::one_order_of_many_groups_is_no_deadlock,
}

/// Where each operation runs on the thread that asks for it: elsewhere all are in one order.
#[test]
fn two_threads_may_wait_crosswise() {
    in_threads(deadlocks::two_threads_may_wait_crosswise);
}

#[test]
fn two_threads_of_processes_may_wait_crosswise() {
    run_in_every_world("two_threads_may_wait_crosswise", Setting::Shared);
}

fn in_threads_overlapped(case: Case) {
    for size in WORLDS {
        let world = threads::group_with_deadline(WorldSize::new(size).unwrap(), DEADLINE);
        std::thread::scope(|scope| {
            for comm in world {
                scope.spawn(move || case(overlapped(comm, Beside::default()).unwrap()));
            }
        });
    }
}

macro_rules! on_a_library {
    ($($module:ident::$name:ident),* $(,)?) => {
        mod on_a_library {
            $(#[test] fn $name() {
                super::in_threads(|comm| super::$module::$name(super::library::over(comm)));
            })*
        }
    };
}

// Without those cases in which ranks learn of an error only from the library.
on_a_library! {
    cases::sums_equal_a_plain_loop,
    cases::sums_are_trees_in_rank_order,
    cases::partial_sums_become_replicated,
    cases::gathers_complete_every_buffer,
    cases::replicas_hold_every_shard,
    cases::broadcasts_come_from_each_root,
    cases::exchanges_are_in_rank_order,
    cases::traffic_is_counted,
    cases::groups_work_apart,
    cases::memory_is_zeroed_whenever_it_is_handed_out,
    many::many_shards_are_one_collective,
    many::shards_of_replicas_are_gathered,
    one_by_one::shards_that_are_gathered_one_by_one_are_the_same,
    many::lengths_that_do_not_add_up_are_an_error_on_every_rank,
    many::other_sums_of_shards_are_named,
    many::shards_that_do_not_fit_are_refused,
    failures::mismatches_name_both_sides,
}

#[test]
fn a_library_sums_in_pieces() {
    in_threads(library::pieces_of_any_size_give_the_same_sum);
}

fn in_threads(case: Case) {
    WORLDS.for_each(|size| in_threads_of(size, DEADLINE, case));
}

fn in_threads_of(size: usize, deadline: Duration, case: Case) {
    let world = threads::group_with_deadline(WorldSize::new(size).unwrap(), deadline);
    std::thread::scope(|scope| {
        for communicator in world {
            scope.spawn(move || case(communicator));
        }
    });
}

#[test]
fn late_threads_tell_where_they_wait() {
    in_threads_of(2, Duration::from_millis(400), deadlocks::time_out_crosswise);
}

#[test]
fn a_thread_that_is_late_is_named() {
    let deadline = Duration::from_millis(100);
    let mut world = threads::group_with_deadline(WorldSize::new(3).unwrap(), deadline);
    let busy = world.remove(1);
    std::thread::scope(|scope| {
        for comm in &world {
            scope.spawn(move || match comm.barrier() {
                Err(CommError::Timeout { rank, waiter, deadline: allowed, .. }) => {
                    assert_eq!((rank, allowed), (Rank(1), deadline));
                    assert_ne!(waiter, rank);
                }
                result => panic!("{result:?} instead of a timeout"),
            });
        }
    });
    let late = busy.barrier().unwrap_err().to_string();
    assert!(late.contains("rank 1 let rank ") && late.contains("wait for more than"), "{late}");
}

#[test]
fn a_thread_that_panics_is_named() {
    let mut world = threads::group_with_deadline(WorldSize::new(3).unwrap(), DEADLINE);
    let broken = world.remove(2);
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            world.iter().map(|comm| scope.spawn(|| comm.exchange("a test", &[1]))).collect();
        let panics = scope.spawn(move || {
            let _held = broken;
            panic!("planned by the test");
        });
        assert!(panics.join().is_err());
        for result in waiting.into_iter().map(|thread| thread.join().unwrap()) {
            assert!(matches!(result, Err(CommError::PeerDead { rank: Rank(2), .. })), "{result:?}");
        }
    });
}
