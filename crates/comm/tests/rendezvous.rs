//! How processes find each other, and what they are told where they do not. The ranks are threads
//! here: a rendezvous cannot tell.
#![allow(clippy::unwrap_used, reason = "in a test, an unwrap is an assertion")]

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use oxizero_comm::{CommError, Communicator, shm};
use oxizero_core::{Rank, WorldSize};

const SOON: Duration = Duration::from_millis(300);
const LATE: Duration = Duration::from_secs(30);

/// A name that no other test uses.
fn name() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("oxizero-test-{}-{}", std::process::id(), COUNT.fetch_add(1, SeqCst))
}

type Joined = Result<Box<dyn Communicator>, CommError>;

/// Starts ranks as (rank, world size), and returns what became of each.
fn join(socket: &str, deadline: Duration, ranks: &[(usize, usize)]) -> Vec<Joined> {
    std::thread::scope(|scope| {
        let start = |&(rank, size): &(usize, usize)| {
            let world_size = WorldSize::new(size).unwrap();
            let options = shm::Options::new(Rank(rank), world_size, socket);
            scope.spawn(move || shm::connect(shm::Options { deadline, ..options }))
        };
        let threads: Vec<_> = ranks.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Every rank's error, all of them of the rendezvous.
fn refusals(joined: Vec<Joined>) -> Vec<String> {
    let refusal = |joined: Joined| match joined.map(drop) {
        Err(CommError::Rendezvous { why, .. }) => why,
        result => panic!("{result:?} instead of a refusal"),
    };
    joined.into_iter().map(refusal).collect()
}

#[test]
fn ranks_join_in_any_order_and_the_name_is_free_again() {
    let socket = name();
    let world = join(&socket, LATE, &[(3, 4), (1, 4), (0, 4), (2, 4)]);
    let mut ranks: Vec<_> = world.into_iter().map(|comm| comm.unwrap()).collect();
    assert!(join(&socket, LATE, &[(0, 2), (1, 2)]).iter().all(Result::is_ok));
    ranks.sort_by_key(|comm| comm.rank());
    std::thread::scope(|scope| {
        for comm in &ranks {
            scope.spawn(move || {
                let all = comm.exchange("a test", &[comm.rank().0 as u8]).unwrap();
                assert_eq!(all, [[0], [1], [2], [3]]);
            });
        }
    });
}

#[test]
fn missing_ranks_are_named_to_all_who_came() {
    for why in refusals(join(&name(), SOON, &[(0, 5), (2, 5)])) {
        assert!(why.contains("ranks 1, 3 and 4 of 5 did not come within 300ms"), "{why}");
    }
}

#[test]
fn rank_0_is_missed_too() {
    for why in refusals(join(&name(), SOON, &[(1, 2)])) {
        assert!(why.contains("rank 0 did not open oxizero-test-"), "{why}");
    }
}

#[test]
fn a_rank_that_is_there_twice_is_named_at_once() {
    let started = Instant::now();
    for why in refusals(join(&name(), LATE, &[(0, 3), (1, 3), (1, 3)])) {
        assert!(why.contains("two processes were started as rank 1"), "{why}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn another_world_size_is_named_at_once() {
    for why in refusals(join(&name(), LATE, &[(0, 2), (1, 3)])) {
        assert!(why.contains("rank 1 was started for a world of 3, and rank 0 for 2"), "{why}");
    }
}

#[test]
fn ranks_that_differ_in_their_replicas_are_refused() {
    use shm::Replicas::{Private, Shared};
    for (first, second) in [(Shared, Private), (Private, Shared)] {
        let socket = name();
        let join = |rank, replicas| {
            let options = shm::Options::new(Rank(rank), WorldSize::new(2).unwrap(), &socket);
            shm::connect(shm::Options { deadline: LATE, replicas, ..options })
        };
        let joined = std::thread::scope(|scope| {
            let other = scope.spawn(|| join(1, second));
            vec![join(0, first), other.join().unwrap()]
        });
        for why in refusals(joined) {
            let of = if first == Shared { "machine" } else { "rank" };
            let own = format!("copy of replicated weights a {of}, and rank 1 was not");
            assert!(why.starts_with("rank 0 was started with ") && why.ends_with(&own), "{why}");
        }
    }
}

#[test]
fn impossible_ranks_worlds_and_names_are_refused() {
    let refused = |name: &str, rank, size| refusals(join(name, SOON, &[(rank, size)])).remove(0);
    let socket = name();
    assert!(refused(&socket, 2, 2).contains("a world of 2 has no rank 2"));
    assert!(refused(&socket, 0, 65).contains("at most 64"));
    let long = "x".repeat(108);
    assert!(refused(&long, 0, 2).contains("shorter"));
    assert!(refused(&long, 1, 2).contains("shorter"));
    assert!(refused(&long[1..], 1, 2).contains("did not open"));
}

#[test]
fn a_name_in_use_is_refused_at_once() {
    let socket = name();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| refusals(join(&socket, SOON * 3, &[(0, 2)])));
        std::thread::sleep(SOON);
        let why = refusals(join(&socket, LATE, &[(0, 2)])).remove(0);
        assert!(why.contains("another world uses this name"), "{why}");
        other.join().unwrap();
    });
}

/// A connection that sends nothing, or something else, neither joins nor stops the others.
#[test]
fn other_connections_do_no_harm() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let socket = name();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(&socket, LATE, &[(0, 2)]).remove(0).map(drop));
        let address = SocketAddrUnix::new_abstract_name(socket.as_bytes()).unwrap();
        let mut others = Vec::new();
        while others.len() < 3 {
            let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
            let other = rustix::net::socket_with(kind.0, kind.1, kind.2, None).unwrap();
            if rustix::net::connect(&other, &address).is_ok() {
                others.push(other);
            }
        }
        rustix::net::send(&others[1], b"GET / HTTP/1.1", SendFlags::empty()).unwrap();
        drop(others.remove(2));
        let second = join(&socket, LATE, &[(1, 2)]).remove(0).map(drop);
        assert!(second.is_ok(), "{second:?}");
        assert!(first.join().unwrap().is_ok());
    });
}

/// Neither side trusts another user. Only root can act as another user, so that others skip this.
#[test]
fn another_user_is_refused_by_both_sides() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let socket = name();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| refusals(join(&socket, SOON * 3, &[(0, 2)])));
        let second = scope.spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let world_size = WorldSize::new(2).unwrap();
            let options = shm::Options::new(Rank(1), world_size, &socket);
            refusals(vec![shm::connect(shm::Options { deadline: LATE, ..options })])
        });
        let second = second.join().unwrap().remove(0);
        assert!(second.contains("another user listens under"), "{second}");
        let first = first.join().unwrap().remove(0);
        assert!(first.contains("rank 1 of 2 did not come"), "{first}");
    });
}
