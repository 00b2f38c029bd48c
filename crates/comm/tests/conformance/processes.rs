//! Worlds of real processes: the test's own binary, started once for each rank.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use oxizero_comm::shm::{self, Replicas};
use oxizero_comm::{Beside, CommError, Communicator, overlapped};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::Buffer;
use rustix::process::{Pid, Signal};

use crate::setting::{SETTING, Setting, is_set};
use crate::{CASES, Case, DEADLINE, WORLDS, deadlocks, meshes, views};

/// What only processes can show.
const ROLES: &[(&str, Case)] = &[
    ("wait_for_the_second_rank", wait_for_the_second_rank),
    ("wait_in_pairs_for_the_second_rank", wait_in_pairs_for_the_second_rank),
    ("reduce_until_the_second_rank_dies", reduce_until_the_second_rank_dies),
    ("time_out_on_the_second_rank", time_out_on_the_second_rank),
    ("time_out_crosswise", deadlocks::time_out_crosswise),
    ("wait_for_a_reader", views::wait_for_a_reader),
    ("time_out_on_a_reader", views::time_out_on_a_reader),
    ("drop_what_others_read", views::drop_what_others_read),
    ("two_threads_may_wait_crosswise", deadlocks::two_threads_may_wait_crosswise),
    ("take_turns", take_turns),
    ("give_memory_back", give_memory_back),
    ("use_kept_blocks", use_kept_blocks),
    ("share_replicas", share_replicas),
    ("keep_replicas_apart", keep_replicas_apart),
    ("run_out_of_addresses", run_out_of_addresses),
    ("run_out_of_groups", run_out_of_groups),
    ("watch_with_too_few_files", watch_with_too_few_files),
    ("split_and_leave", split_and_leave),
];

/// Stands for `main` in the processes that the tests start, and does nothing in the tests' own.
#[test]
fn process_of_a_world() {
    let Ok(case) = std::env::var("OXIZERO_TEST_CASE") else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let rank = Rank(number("OXIZERO_TEST_RANK") as usize);
    let world_size = WorldSize::new(number("OXIZERO_TEST_WORLD") as usize).unwrap();
    let socket = std::env::var("OXIZERO_TEST_SOCKET").unwrap();
    let options = shm::Options {
        deadline: Duration::from_millis(number("OXIZERO_TEST_DEADLINE_MS")),
        replicas: match is_set(Setting::Private) {
            true => Replicas::Private,
            false => Replicas::Shared,
        },
        ..shm::Options::new(rank, world_size, socket)
    };
    let (_, case) = CASES.iter().chain(ROLES).find(|(name, _)| *name == case).unwrap();
    let comm = shm::connect(options).unwrap();
    case(if is_set(Setting::Overlapped) {
        overlapped(comm, Beside::default()).unwrap()
    } else {
        comm
    });
}

/// The processes of one world. Those that still run are killed with it.
pub(crate) struct World {
    ranks: Vec<Child>,
    /// Kept open, as a process fails when nobody takes what it prints.
    outputs: Vec<BufReader<ChildStdout>>,
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn start(case: &str, size: usize, deadline: Duration) -> Self {
        Self::start_with(Setting::Shared, case, size, deadline)
    }

    fn start_with(setting: Setting, case: &str, size: usize, deadline: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let start = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["processes::process_of_a_world", "--exact", "--nocapture"])
                .env("OXIZERO_TEST_CASE", case)
                .env("OXIZERO_TEST_RANK", rank.to_string())
                .env("OXIZERO_TEST_WORLD", size.to_string())
                .current_dir(folder.path())
                .env("OXIZERO_TEST_SOCKET", folder.path().join("name"))
                .env("OXIZERO_TEST_DEADLINE_MS", deadline.as_millis().to_string())
                .env(SETTING, format!("{setting:?}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        Self { ranks: (0..size).map(start).collect(), outputs: Vec::new(), folder }
    }

    /// Waits until every rank has printed `ready`.
    fn wait_until_ready(&mut self) {
        for rank in &mut self.ranks {
            let mut output = BufReader::new(rank.stdout.take().unwrap());
            output
                .by_ref()
                .lines()
                .find(|line| line.as_ref().unwrap().contains("ready"))
                .unwrap()
                .unwrap();
            self.outputs.push(output);
        }
    }

    fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_child(&self.ranks[rank]);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for all ranks but `except`, which must succeed.
    pub(crate) fn finish(mut self, except: Option<usize>) {
        let ranks = std::mem::take(&mut self.ranks);
        let (mut others, mut excepted) = (Vec::new(), Vec::new());
        for (rank, child) in ranks.into_iter().enumerate() {
            if Some(rank) == except { &mut excepted } else { &mut others }.push((rank, child));
        }
        for (rank, child) in others {
            let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
            let text = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            assert!(status.success(), "rank {rank}: {status}\n{}", text.concat());
        }
        for (_, mut child) in excepted {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0, "files are left");
        assert_eq!(shared_files(), Vec::<String>::new());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Files that this crate could have left in /dev/shm.
fn shared_files() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("oxizero")).collect()
}

pub(crate) fn run_in_every_world(case: &str, setting: Setting) {
    for size in WORLDS {
        World::start_with(setting, case, size, DEADLINE).finish(None);
    }
}

fn say_ready(comm: &dyn Communicator) {
    comm.barrier().unwrap();
    println!("ready");
}

fn expect_the_second_rank_to_be_dead(error: &CommError) {
    assert!(matches!(error, CommError::PeerDead { rank: Rank(1), .. }), "{error}");
}

fn wait_for_the_second_rank(comm: Box<dyn Communicator>) {
    say_ready(&*comm);
    if comm.rank() == Rank(1) {
        std::thread::sleep(DEADLINE);
    }
    expect_the_second_rank_to_be_dead(&comm.barrier().unwrap_err());
    expect_the_second_rank_to_be_dead(&comm.exchange("a test", &[1]).unwrap_err());
}

fn wait_in_pairs_for_the_second_rank(comm: Box<dyn Communicator>) {
    meshes::wait_in_pairs_until(&*comm, Rank(1), || {
        println!("ready");
        if comm.rank() == Rank(1) {
            std::thread::sleep(DEADLINE);
        }
    });
}

fn reduce_until_the_second_rank_dies(comm: Box<dyn Communicator>) {
    use oxizero_comm::{ReduceScatter, ReduceTarget::InPlace};
    let bytes = Bytes(comm.world_size().get() << 20);
    let mut partial = Buffer::new(comm.alloc(bytes).unwrap(), DType::Bf16);
    say_ready(&*comm);
    loop {
        let op = ReduceScatter { partial, target: InPlace };
        match comm.reduce_scatter(op).unwrap().wait() {
            Ok(op) => partial = op.partial,
            Err(error) => return expect_the_second_rank_to_be_dead(&error),
        }
    }
}

#[test]
fn a_killed_rank_is_named_within_a_second() {
    let cases = [
        "wait_for_the_second_rank",
        "wait_in_pairs_for_the_second_rank",
        "reduce_until_the_second_rank_dies",
    ];
    for case in cases {
        for size in [2, 4] {
            let mut world = World::start(case, size, DEADLINE);
            world.wait_until_ready();
            std::thread::sleep(Duration::from_millis(50));
            let killed = Instant::now();
            world.signal(1, Signal::KILL);
            world.finish(Some(1));
            assert!(killed.elapsed() < Duration::from_secs(1), "{case}: {:?}", killed.elapsed());
        }
    }
}

fn time_out_on_the_second_rank(comm: Box<dyn Communicator>) {
    say_ready(&*comm);
    let error = loop {
        if let Err(error) = comm.barrier() {
            break error;
        }
    };
    let CommError::Timeout { rank: Rank(1), waiter, .. } = error else { panic!("{error}") };
    assert_ne!(waiter, Rank(1));
}

#[test]
fn a_stopped_rank_is_named_after_the_deadline() {
    let mut world = World::start("time_out_on_the_second_rank", 3, Duration::from_millis(500));
    world.wait_until_ready();
    world.signal(1, Signal::STOP);
    let stopped = Instant::now();
    world.finish(Some(1));
    let waited = stopped.elapsed();
    assert!(waited > Duration::from_millis(400) && waited < Duration::from_secs(5), "{waited:?}");
}

#[test]
fn late_processes_tell_where_they_wait() {
    World::start("time_out_crosswise", 2, Duration::from_millis(400)).finish(None);
}

fn take_turns(comm: Box<dyn Communicator>) {
    comm.barrier().unwrap();
    let started = Instant::now();
    for _ in 0..1000 {
        comm.barrier().unwrap();
    }
    let took = started.elapsed();
    println!("1000 barriers of {} ranks: {took:?}", comm.world_size());
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn more_ranks_than_processors_take_turns() {
    World::start("take_turns", 4, DEADLINE).finish(None);
}

/// Bytes of shared memory that this process sees.
fn resident_shared() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssShmem:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn give_memory_back(comm: Box<dyn Communicator>) {
    let bytes = Bytes(65 << 20);
    let held = |own, replicas| {
        let allocated = comm.allocated();
        assert_eq!((allocated.own, allocated.replicas), (own, replicas));
    };
    let before = resident_shared();
    for _ in 0..3 {
        let mut own = comm.alloc(bytes).unwrap();
        let mut replica = comm.alloc_replica(bytes).unwrap();
        held(bytes, bytes);
        own.bytes_mut().fill(1);
        if comm.rank() == Rank(0) {
            replica.bytes_mut().fill(2);
        }
        comm.barrier().unwrap();
        assert!(replica.bytes().iter().all(|byte| *byte == 2));
        assert!(resident_shared() >= before + (130 << 20));
        comm.barrier().unwrap();
        drop((own, replica));
        held(Bytes(0), Bytes(0));
        comm.barrier().unwrap();
        assert!(resident_shared() < before + (1 << 20));
        comm.barrier().unwrap();
    }
    let heap = Buffer::heap(Numel(130 << 18), DType::F32);
    let shard = Buffer::heap(Numel(65 << 18), DType::F32);
    drop(comm.all_gather_into(shard, heap).unwrap().wait().unwrap());
    comm.barrier().unwrap();
    assert!(resident_shared() < before + (1 << 20), "heap memory was copied, and not given back");
    keep_two_blocks(&*comm, before);
}

/// Of all the blocks of middle size that were used, the last two are kept.
fn keep_two_blocks(comm: &dyn Communicator, before: usize) {
    for mib in 1..20 {
        comm.alloc(Bytes(mib << 20)).unwrap().bytes_mut().fill(1);
    }
    comm.barrier().unwrap();
    let kept = resident_shared() - before;
    assert!((37 << 20..40 << 20).contains(&kept), "{kept} bytes are kept");
    let again = comm.alloc(Bytes(18 << 20)).unwrap();
    assert!(again.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn memory_is_counted_and_given_back() {
    World::start("give_memory_back", 2, DEADLINE).finish(None);
}

/// What lies there is never more than two blocks that were used and the one in use, nor, where a
/// kept block serves nearly as large a one, more than that.
fn use_kept_blocks(comm: Box<dyn Communicator>) {
    let base = comm.allocated().resident.0;
    let used = |bytes| {
        let mut block = comm.alloc(Bytes(bytes)).unwrap();
        assert!(block.bytes().iter().all(|byte| *byte == 0));
        block.bytes_mut().fill(1);
        comm.allocated().resident.0 - base
    };
    assert_eq!([8, 8, 9, 8, 9].map(|mib| used(mib << 20) >> 20), [8, 8, 17, 17, 17]);
    assert_eq!(used((9 << 20) - 5000) >> 20, 17);
    assert_eq!([20, 8, 20].map(|mib| used(mib << 20) >> 20), [29, 28, 28]);
}

#[test]
fn kept_blocks_are_used_again_or_make_room() {
    World::start("use_kept_blocks", 1, DEADLINE).finish(None);
}

/// One rank writes, all read the same; and the place is used again when all have let go.
fn share_replicas(comm: Box<dyn Communicator>) {
    assert!(comm.shares_replicas());
    let mut places = Vec::new();
    for round in 0..5_u8 {
        let mut replica = comm.alloc_replica(Bytes(100)).unwrap();
        places.push(replica.start());
        if comm.rank() == Rank(1) {
            replica.bytes_mut().fill(round + 1);
        }
        comm.barrier().unwrap();
        assert_eq!(replica.bytes(), [round + 1; 100]);
        comm.barrier().unwrap();
        drop(replica);
        comm.barrier().unwrap();
    }
    assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
}

#[test]
fn replicas_are_one_memory() {
    World::start("share_replicas", 3, DEADLINE).finish(None);
}

/// Every rank writes all of its own, in groups too; a gather moves only other ranks' shards.
fn keep_replicas_apart(comm: Box<dyn Communicator>) {
    let bytes = 1 << 20;
    let pair = comm.split(&ProcessGroup::new(vec![Rank(0), Rank(1)]).unwrap()).unwrap();
    pair.barrier().unwrap();
    let before = comm.allocated();
    pair.barrier().unwrap();
    for comm in [&*comm, &*pair] {
        assert!(!comm.shares_replicas());
        let mut replica = comm.alloc_replica(Bytes(bytes)).unwrap();
        replica.bytes_mut().fill(comm.rank().0 as u8 + 1);
        comm.barrier().unwrap();
        assert!(replica.bytes().iter().all(|byte| *byte == comm.rank().0 as u8 + 1));
        let allocated = comm.allocated();
        assert_eq!((allocated.own, allocated.replicas), (Bytes(0), Bytes(bytes)));
        let resident = allocated.resident.0 - before.resident.0;
        assert!((2 * bytes..3 * bytes).contains(&resident), "{resident}");

        let full = comm.all_gather(Buffer::new(replica, DType::F32)).unwrap().wait().unwrap();
        let (first, second) = full.region().bytes().split_at(bytes / 2);
        assert!(first.iter().all(|byte| *byte == 1) && second.iter().all(|byte| *byte == 2));
        comm.barrier().unwrap();
    }
}

#[test]
fn private_replicas_are_each_ranks_own() {
    World::start_with(Setting::Private, "keep_replicas_apart", 2, DEADLINE).finish(None);
}

/// The others learn at once what failed on one rank alone.
fn expect_rank_1_to_fail(comm: &dyn Communicator, result: Result<(), CommError>, why: &str) {
    match (comm.rank(), result) {
        (Rank(1), Err(error @ CommError::System { .. })) => {
            assert!(error.to_string().contains(why), "{error}");
        }
        (_, Err(CommError::Aborted { rank: Rank(1), why: told })) => {
            assert!(told.contains(why), "{told}");
        }
        (_, result) => panic!("{result:?} instead of a failure of rank 1"),
    }
}

/// Rank 1 cannot set aside what it has on the heap, nor memory for a replica.
fn run_out_of_addresses(comm: Box<dyn Communicator>) {
    let mut all = Vec::new();
    if comm.rank() == Rank(1) {
        for bytes in (6..47).rev().map(|power| Bytes(1 << power)) {
            all.extend(std::iter::from_fn(|| comm.alloc(bytes).ok()));
        }
    }
    comm.barrier().unwrap();
    let full = Buffer::heap(Numel(comm.world_size().get() << 10), DType::F32);
    let result = comm.all_gather(full).unwrap().wait().map(drop);
    expect_rank_1_to_fail(&*comm, result, "do not fit into what is left");
    expect_rank_1_to_fail(&*comm, comm.barrier(), "do not fit into what is left");
}

/// Rank 1 is the first of many groups, and finds no place for one more.
fn run_out_of_groups(comm: Box<dyn Communicator>) {
    let group = ProcessGroup::new(vec![Rank(1), Rank(2)]).unwrap();
    comm.barrier().unwrap();
    if group.rank_of(comm.rank()).is_none() {
        return expect_rank_1_to_fail(&*comm, comm.barrier(), "256 groups are open already");
    }
    let mut open = Vec::new();
    let error = loop {
        match comm.split(&group) {
            Ok(group) => open.push(group),
            Err(error) => break error,
        }
    };
    assert_eq!(open.len(), 255);
    expect_rank_1_to_fail(&*comm, Err(error), "256 groups are open already");
    expect_rank_1_to_fail(&*comm, comm.barrier(), "256 groups are open already");
}

#[test]
fn what_fails_on_one_rank_ends_the_others_waiting() {
    for case in ["run_out_of_addresses", "run_out_of_groups"] {
        let started = Instant::now();
        World::start(case, 3, DEADLINE).finish(None);
        assert!(started.elapsed() < DEADLINE / 3, "{case}: {:?}", started.elapsed());
    }
}

/// The system does not let rank 0 watch so many ranks any more, once it has to look again.
fn watch_with_too_few_files(comm: Box<dyn Communicator>) {
    use rustix::process::{Resource, Rlimit};
    if comm.rank() == Rank(0) {
        let few = Rlimit { current: Some(2), maximum: Some(2) };
        rustix::process::setrlimit(Resource::Nofile, few).unwrap();
    }
    let _ = comm.barrier(); // it may have had to look again already
    if comm.rank() == Rank(3) {
        return;
    }
    let others = ProcessGroup::new((0..3).map(Rank).collect()).unwrap();
    let error = loop {
        match comm.split(&others) {
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("rank 0 gave up: it cannot watch the other ranks"), "{error}");
}

#[test]
fn a_rank_that_cannot_watch_the_others_says_so() {
    World::start("watch_with_too_few_files", 4, DEADLINE).finish(None);
}

/// Groups come and go; most often, a group's first member is the last to leave, and clears its
/// place while the others already look for the group's next one.
fn split_and_leave(comm: Box<dyn Communicator>) {
    let groups = [&[0, 1][..], &[1, 2], &[0, 1, 2], &[0, 2]];
    let groups =
        groups.map(|ranks| ProcessGroup::new(ranks.iter().copied().map(Rank).collect()).unwrap());
    for round in 0..ROUNDS {
        let group = &groups[round / 64 % groups.len()];
        if group.rank_of(comm.rank()).is_none() {
            continue;
        }
        let part = comm.split(group).unwrap();
        part.barrier().unwrap_or_else(|error| panic!("round {round}, {group:?}: {error}"));
        if part.rank() == Rank(0) {
            (0..round % 64).for_each(|_| std::hint::spin_loop());
        }
    }
}

const ROUNDS: usize = 24_000;

#[test]
fn places_of_groups_are_taken_again_and_again() {
    World::start("split_and_leave", 3, DEADLINE).finish(None);
}
