//! Operations on a thread of their own: what their handles, their order and their end promise.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use oxizero_comm::{Beside, CommError, Communicator, issue, overlapped, threads};
use oxizero_core::{DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::Buffer;

use crate::DEADLINE;

fn world(size: usize) -> Vec<Box<dyn Communicator>> {
    let world = threads::group_with_deadline(WorldSize::new(size).unwrap(), DEADLINE).into_iter();
    world.map(|comm| overlapped(comm, Beside::default()).unwrap()).collect()
}

fn pair() -> [Box<dyn Communicator>; 2] {
    world(2).try_into().ok().unwrap()
}

#[test]
fn an_operation_goes_on_while_its_caller_does_something_else() {
    let [first, second] = pair();
    let full = || Buffer::heap(Numel(4), DType::F32);
    // On one thread neither would come to its second call.
    let handles = [&first, &second].map(|comm| comm.all_gather(full()).unwrap());
    for handle in handles {
        assert_eq!(handle.wait().unwrap().numel(), Numel(4));
    }
}

#[test]
fn operations_of_all_groups_run_in_the_order_in_which_they_were_issued() {
    let comm = world(1).remove(0);
    let part = comm.split(&ProcessGroup::world(WorldSize::ONE)).unwrap();
    let (tell, told) = mpsc::channel();
    for round in 0..100 {
        let (tell, comm) = (tell.clone(), if round % 3 == 0 { &part } else { &comm });
        let name = thread::current().id();
        drop(issue(&**comm, move |_| {
            assert_ne!(thread::current().id(), name);
            thread::sleep(Duration::from_micros(10));
            tell.send(round).unwrap();
            Ok(())
        }));
    }
    part.barrier().unwrap();
    assert_eq!(told.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
}

/// What the operation owned goes with it, and nobody hangs.
#[test]
fn handles_that_nobody_waits_for_run_all_the_same() {
    let owned = Arc::new(());
    let [first, second] = pair();
    for comm in [&first, &second] {
        let held = Arc::clone(&owned);
        drop(issue(&**comm, move |comm| comm.barrier().map(|()| held)));
        drop(comm.all_gather(Buffer::heap(Numel(2), DType::F32)).unwrap());
    }
    drop(first); // its thread ends when the second's has come
    second.barrier().unwrap_err();
    drop(second);
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
fn a_panic_is_an_error_on_every_rank_and_stays_one() {
    let [first, second] = pair();
    let waits = second.all_gather(Buffer::heap(Numel(2), DType::F32)).unwrap();
    let broken = issue(&*first, |_| -> Result<(), CommError> { panic!("planned by {}", "a test") });
    match broken.wait() {
        Err(CommError::System { why, .. }) => assert!(why.contains("planned by a test"), "{why}"),
        result => panic!("{result:?} instead of the panic"),
    }
    for result in [waits.wait().map(drop), first.barrier(), second.barrier()] {
        match result {
            Err(CommError::Aborted { rank: Rank(0), why }) => {
                assert!(why.contains("planned by a test"), "{why}");
            }
            result => panic!("{result:?} instead of the end of all"),
        }
    }
}

#[test]
fn an_abort_passes_by_what_was_issued() {
    let [first, _second] = pair();
    let waits = first.all_gather(Buffer::heap(Numel(2), DType::F32)).unwrap();
    first.abort("the data ended");
    assert!(matches!(waits.wait(), Err(CommError::Aborted { .. })));
}

#[test]
fn what_was_issued_counts_as_traffic() {
    let comm = world(1).remove(0);
    for _ in 0..3 {
        drop(issue(&*comm, |comm| {
            thread::sleep(Duration::from_millis(5));
            comm.all_gather(Buffer::heap(Numel(2), DType::F32))?.wait()
        }));
    }
    assert_eq!(comm.traffic().collectives, 3);
}

/// The thread that waits is asked, as signals are handled there.
#[test]
fn a_rank_that_is_interrupted_while_it_waits_gives_up() {
    static INTERRUPTED: AtomicBool = AtomicBool::new(false);
    let mut inner = threads::group_with_deadline(WorldSize::new(2).unwrap(), DEADLINE);
    let _absent = inner.pop();
    let beside = Beside { interrupted: || INTERRUPTED.load(SeqCst), ..Beside::default() };
    let comm = overlapped(inner.remove(0), beside).unwrap();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            INTERRUPTED.store(true, SeqCst);
        });
        let result = comm.barrier();
        assert!(matches!(result, Err(CommError::Aborted { rank: Rank(0), .. })), "{result:?}");
    });
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// What was issued waits for a rank that does not come, and nobody waits for its handle.
#[test]
fn a_rank_that_is_interrupted_while_it_ends_gives_up() {
    let mut inner = threads::group_with_deadline(WorldSize::new(2).unwrap(), DEADLINE);
    let absent = inner.pop().unwrap();
    let beside = Beside { interrupted: || true, ..Beside::default() };
    let comm = overlapped(inner.remove(0), beside).unwrap();
    drop(comm.all_gather(Buffer::heap(Numel(2), DType::F32)).unwrap());
    let started = Instant::now();
    drop(comm);
    assert!(started.elapsed() < DEADLINE / 2, "{:?}", started.elapsed());
    let told = absent.barrier();
    assert!(matches!(told, Err(CommError::Aborted { rank: Rank(0), .. })), "{told:?}");
}
