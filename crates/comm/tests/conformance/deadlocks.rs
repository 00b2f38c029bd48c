//! Ranks that wait for each other in different groups; and ranks that only seem to.

use std::time::{Duration, Instant};

use oxizero_comm::{CommError, Communicator};
use oxizero_core::{ProcessGroup, Random, Rank};

/// Longer than a cycle stands before it is called a deadlock.
const LONG: Duration = Duration::from_millis(1500);

fn group(ranks: &[usize]) -> ProcessGroup {
    ProcessGroup::new(ranks.iter().copied().map(Rank).collect()).unwrap()
}

/// The communicator of `ranks`, if this rank is one of them.
fn part(comm: &dyn Communicator, ranks: &[usize]) -> Option<Box<dyn Communicator>> {
    ranks.contains(&comm.rank().0).then(|| comm.split(&group(ranks)).unwrap())
}

/// All of a world end long before the deadline, told of `parts` of the same text; for good.
fn expect_a_deadlock(
    comm: &dyn Communicator,
    call: impl FnOnce() -> Result<(), CommError>,
    parts: &[String],
) {
    let started = Instant::now();
    for result in [call(), comm.barrier()] {
        let Err(error @ CommError::Deadlock { .. }) = result else {
            panic!("{result:?} instead of a deadlock")
        };
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
    }
    assert!(started.elapsed() < crate::DEADLINE / 3, "{:?}", started.elapsed());
}

fn ranks_of_the_world(size: usize) -> String {
    if size == 2 { "ranks 0 and 1".to_owned() } else { format!("ranks 0 to {}", size - 1) }
}

/// Ranks after the second wait with it in the world, on no cycle.
pub(crate) fn two_ranks_that_wait_for_each_other_end_all(comm: Box<dyn Communicator>) {
    let size = comm.world_size().get();
    if size < 2 {
        return;
    }
    let pair = part(&*comm, &[0, 1]);
    comm.barrier().unwrap();
    let call = || match &pair {
        Some(pair) if comm.rank() == Rank(0) => pair.exchange("a test", &[1; 3]).map(drop),
        _ => comm.barrier(),
    };
    let first =
        "rank 0 waits for rank 1 in exchange of 3 bytes for a test (operation 2 of ranks 0 and 1)";
    let members = ranks_of_the_world(size);
    let second = format!("rank 1 waits for rank 0 in barrier (operation 2 of {members})");
    let which =
        if size == 2 { ", another group of the same ranks" } else { "they wait for each other" };
    expect_a_deadlock(&*comm, call, &[first.to_owned(), second, which.to_owned()]);
}

/// Three ranks, each in a pair with the next; the others wait in the world.
pub(crate) fn three_ranks_that_wait_in_a_ring_end_all(comm: Box<dyn Communicator>) {
    if comm.world_size().get() < 3 {
        return;
    }
    let pairs = [[0, 1], [1, 2], [0, 2]].map(|pair| part(&*comm, &pair));
    comm.barrier().unwrap();
    let call = || match pairs.get(comm.rank().0) {
        Some(pair) => pair.as_ref().unwrap().barrier(),
        None => comm.barrier(),
    };
    let wait = |rank, other, pair| {
        format!("rank {rank} waits for rank {other} in barrier (operation 2 of {pair})")
    };
    let waits =
        [wait(0, 1, "ranks 0 and 1"), wait(1, 2, "ranks 1 and 2"), wait(2, 0, "ranks 0 and 2")];
    expect_a_deadlock(&*comm, call, &waits);
}

/// Some make a new group while one of its members waits for them.
pub(crate) fn a_split_that_a_rank_does_not_come_to_ends_all(comm: Box<dyn Communicator>) {
    let size = comm.world_size().get();
    if !(2..=3).contains(&size) {
        return;
    }
    comm.barrier().unwrap();
    let absent = Rank(size - 2); // the group's first member, who opens it, or not
    let call = || match comm.rank() == absent {
        true => comm.exchange("a test", &[1]).map(drop),
        false => comm.split(&ProcessGroup::world(comm.world_size())).map(drop),
    };
    let split = format!("waits for rank {absent} in split into a group of {size} ranks");
    expect_a_deadlock(&*comm, call, &[split, format!("rank {absent} waits for rank")]);
}

/// Each in turn, while the others wait for it in different groups, or for those who do.
pub(crate) fn a_slow_rank_is_waited_for(comm: Box<dyn Communicator>) {
    if comm.world_size().get() != 3 {
        return;
    }
    let pairs = [[0, 1], [1, 2]].map(|pair| part(&*comm, &pair));
    for slow in comm.world_size().ranks() {
        if comm.rank() == slow {
            std::thread::sleep(LONG);
        }
        for pair in pairs.iter().flatten() {
            pair.barrier().unwrap();
        }
        comm.barrier().unwrap();
    }
}

/// All ranks go through one list of operations of many groups, each at its own pace.
pub(crate) fn one_order_of_many_groups_is_no_deadlock(comm: Box<dyn Communicator>) {
    let (me, size) = (comm.rank().0, comm.world_size().get());
    if size != 4 {
        return;
    }
    let members = |mask: usize| (0..size).filter(|rank| mask >> rank & 1 == 1).collect::<Vec<_>>();
    let mut groups: Vec<_> = (1..1 << size).map(|mask| part(&*comm, &members(mask))).collect();
    let (mut shared, mut own) = (Random::new(5), Random::new(100 + me as u64));
    for round in 0..3000 {
        let (index, is_new) = (shared.below(groups.len()), shared.below(50) == 0);
        if is_new {
            groups[index] = None;
            groups[index] = part(&*comm, &members(index + 1));
        }
        if let Some(group) = &groups[index] {
            let told = group.exchange("a test", &[round as u8]).unwrap();
            assert!(told.iter().all(|told| *told == [round as u8]));
        }
        match own.below(1500) {
            0 => std::thread::sleep(LONG / 2),
            1..40 => std::thread::sleep(Duration::from_micros(own.below(2000) as u64)),
            _ => (0..own.below(2000)).for_each(|_| std::hint::spin_loop()),
        }
    }
    comm.barrier().unwrap();
}

/// Each rank has a thread for each of two groups. For long, rank 0 waits for rank 1 in the first
/// group alone, and rank 1 for rank 0 in the second; and each comes.
pub(crate) fn two_threads_may_wait_crosswise(comm: Box<dyn Communicator>) {
    let world = ProcessGroup::world(comm.world_size());
    if comm.world_size().get() != 2 {
        return;
    }
    let groups = [0, 1].map(|_| comm.split(&world).unwrap());
    std::thread::scope(|scope| {
        for (index, group) in groups.iter().enumerate() {
            let me = comm.rank().0;
            scope.spawn(move || {
                group.barrier().unwrap();
                if index != me {
                    std::thread::sleep(LONG);
                }
                for round in 0..1000 {
                    assert_eq!(
                        group.exchange("a test", &[round as u8]).unwrap(),
                        [[round as u8]; 2]
                    );
                }
            });
        }
    });
    comm.barrier().unwrap();
}

/// A rank of several threads may still come, as far as others know, until the deadline.
pub(crate) fn time_out_crosswise(comm: Box<dyn Communicator>) {
    let pair = comm.split(&group(&[0, 1])).unwrap();
    std::thread::scope(|scope| scope.spawn(|| pair.barrier().unwrap()).join().unwrap());
    let result = if comm.rank() == Rank(0) { pair.barrier() } else { comm.barrier() };
    let Err(CommError::Timeout { rank, waiter, waits: Some(waits), .. }) = &result else {
        panic!("{result:?} instead of a timeout that tells where the late rank waits")
    };
    let start = format!("rank {rank} waits for rank {waiter} in barrier (operation ");
    assert!(waits.starts_with(&start), "{waits}");
    let text = result.unwrap_err().to_string();
    assert!(text.contains(&format!("it waits itself: {start}")), "{text}");
}
