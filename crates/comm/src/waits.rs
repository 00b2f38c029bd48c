//! Who waits for whom, and that some wait for each other for good.
//!
//! Ranks that disagree within a group find it when they compare their operations. Ranks that
//! disagree on the order of operations of several groups do not: each waits, in another group, for
//! a rank that waits elsewhere. Back ends say which ranks wait, and here a cycle is found.
//!
//! A cycle is a deadlock if no rank on it has a thread that may still come. Of that, the only sign
//! is that all its calls so far came from the thread that waits. So that a second thread has time
//! for its first call, a cycle must also stand for a while; a rank whose calls came from several
//! threads is never taken to be blocked, and the deadline ends its wait.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use oxizero_core::{ProcessGroup, Rank};

use crate::operation::Operation;
use crate::transport::Failure;

/// A rank that has come to an operation, and waits for others to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) rank: Rank,
    pub(crate) operation: Operation,
    pub(crate) group: ProcessGroup,
    /// Where the group meets, and the how many-th group there it is.
    pub(crate) place: (usize, u64),
    /// The members that have not come.
    pub(crate) missing: Vec<Rank>,
    /// Whether all the rank's calls so far came from one thread, the one that waits.
    pub(crate) is_all_of_rank: bool,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, operation, group, missing, .. } = self;
        let (missing, members) = (list(missing), list(group.ranks()));
        let sequence = operation.sequence;
        write!(f, "rank {rank} waits for {missing} in {operation} ")?;
        write!(f, "(operation {sequence} of {members})")
    }
}

/// Which of a rank's threads have called so far. Zero, as in fresh shared memory, is none.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Callers(AtomicU64);

const NONE: u64 = 0;
/// No thread's mark: nothing lies at this address.
const SEVERAL: u64 = 1;

impl Callers {
    /// Counts the calling thread in, before it waits; only this rank's process may.
    pub(crate) fn count(&self) {
        let caller = mark();
        let before = self.0.load(SeqCst);
        if before == caller || before == SEVERAL {
            return;
        }
        if self.0.compare_exchange(NONE, caller, SeqCst, SeqCst).is_err() {
            self.0.store(SEVERAL, SeqCst);
        }
    }

    pub(crate) fn is_one(&self) -> bool {
        self.0.load(SeqCst) != SEVERAL
    }
}

/// Differs between the threads of a process that are alive; one that has ended calls no more.
fn mark() -> u64 {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark).addr() as u64)
}

/// A rank that waits looks so often for reasons to give up.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Such a part of the deadline a cycle stands before it is called a deadlock: a rank may have
/// another thread that has not called yet.
const STANDS: u32 = 10;

/// What one rank has seen while it waits in one operation.
pub(crate) struct Watch {
    started: Instant,
    deadline: Duration,
    next: Instant,
    /// The last cycle that was seen, or nothing, and since when.
    cycle: Vec<Wait>,
    since: Instant,
}

impl Watch {
    pub(crate) fn new(deadline: Duration) -> Self {
        let started = Instant::now();
        let next = started + LOOK_EVERY;
        Self { started, deadline, next, cycle: Vec::new(), since: started }
    }

    /// How long the rank may sleep before it looks again.
    pub(crate) fn sleep(&self) -> Duration {
        self.deadline.saturating_sub(self.started.elapsed()).min(LOOK_EVERY)
    }

    /// Whether `me`, who waits for `late` and maybe others, has to give up: in a deadlock, or at
    /// the deadline. `waits` are read as they are now.
    ///
    /// They may be read while ranks go on, not all in one instant, if nothing in a group's state
    /// goes back while it meets at its place: a rank's coming is counted up. Then a cycle that is
    /// read twice did stand when the first reading ended: who had come in the first had come
    /// then, and who had not in the second had not.
    pub(crate) fn look(
        &mut self,
        me: Rank,
        late: Rank,
        waits: impl FnOnce() -> Vec<Wait>,
    ) -> Option<Failure> {
        let now = Instant::now();
        let is_late = now - self.started >= self.deadline;
        if now < self.next && !is_late {
            return None;
        }
        self.next = now + LOOK_EVERY;
        let waits = waits();
        let seen = cycle(&waits, me);
        if seen.is_empty() || seen != self.cycle {
            (self.cycle, self.since) = (seen, now);
        } else if now - self.since >= self.deadline / STANDS {
            return Some(Failure::Deadlock { finder: me, waits: text(&self.cycle) });
        }
        is_late.then(|| {
            let own: Vec<Wait> = waits.into_iter().filter(|wait| wait.rank == late).collect();
            Failure::Late { rank: late, waiter: me, waits: text(&own) }
        })
    }
}

/// A shortest way from `me` over ranks that wait, each for the next, back to `me`; empty if there
/// is none.
fn cycle(waits: &[Wait], me: Rank) -> Vec<Wait> {
    let mut seen = vec![me];
    let mut open = VecDeque::from([(me, Vec::new())]);
    while let Some((rank, way)) = open.pop_front() {
        let its = waits.iter().filter(|wait| wait.rank == rank && wait.is_all_of_rank);
        for (wait, &next) in its.flat_map(|wait| wait.missing.iter().map(move |next| (wait, next)))
        {
            let mut way: Vec<Wait> = way.clone();
            way.push(Wait { missing: vec![next], ..wait.clone() });
            if next == me {
                return way;
            }
            if !seen.contains(&next) {
                seen.push(next);
                open.push_back((next, way));
            }
        }
    }
    Vec::new()
}

fn text(waits: &[Wait]) -> String {
    let tell = |(index, wait): (usize, &Wait)| {
        let is_like = |other: &Wait| other.group == wait.group && other.place != wait.place;
        let which = if waits[..index].iter().any(is_like) {
            ", another group of the same ranks"
        } else {
            ""
        };
        format!("{wait}{which}")
    };
    waits.iter().enumerate().map(tell).collect::<Vec<_>>().join("; ")
}

/// `ranks 1 and 3`, or `ranks 0 to 7`.
pub(crate) fn list(ranks: &[Rank]) -> String {
    let names: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    let is_run = ranks.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0);
    match names.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, [first, _, ..])) if is_run => format!("ranks {first} to {last}"),
        Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
        None => "no rank".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use oxizero_core::Numel;

    use super::*;
    use crate::operation::{Kind, Label};

    /// `rank` waits in a group of its own number.
    fn wait(rank: usize, missing: &[usize]) -> Wait {
        let ranks = |ranks: &[usize]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
        let mut members = [missing, &[rank]].concat();
        members.sort_unstable();
        Wait {
            rank: Rank(rank),
            operation: Operation {
                sequence: 7,
                kind: Kind::Exchange { label: Label::new("step") },
                dtype: None,
                numel: Numel(3),
            },
            group: ProcessGroup::new(ranks(&members)).unwrap(),
            place: (rank, 0),
            missing: ranks(missing),
            is_all_of_rank: true,
        }
    }

    fn ranks(waits: &[Wait]) -> Vec<usize> {
        waits.iter().map(|wait| wait.rank.0).collect()
    }

    #[test]
    fn a_shortest_cycle_is_found_by_those_on_it() {
        let waits = [wait(0, &[1, 4]), wait(1, &[2]), wait(2, &[0, 1]), wait(3, &[0])];
        assert_eq!(ranks(&cycle(&waits, Rank(0))), [0, 1, 2]);
        assert_eq!(ranks(&cycle(&waits, Rank(1))), [1, 2]);
        assert_eq!(ranks(&cycle(&waits, Rank(3))), [0; 0]);
        assert_eq!(cycle(&waits, Rank(2))[1].missing, [Rank(2)]);
        assert_eq!(ranks(&cycle(&waits[..2], Rank(0))), [0; 0]);
    }

    #[test]
    fn no_cycle_goes_through_a_rank_of_several_threads() {
        let threaded = Wait { is_all_of_rank: false, ..wait(1, &[0]) };
        assert_eq!(cycle(&[wait(0, &[1]), threaded.clone()], Rank(0)), []);
        assert_eq!(cycle(&[wait(0, &[1]), threaded], Rank(1)), []);
    }

    #[test]
    fn threads_are_told_apart() {
        let callers = Callers::default();
        callers.count();
        callers.count();
        assert!(callers.is_one());
        std::thread::scope(|scope| scope.spawn(|| callers.count()).join().unwrap());
        assert!(!callers.is_one());
        callers.count();
        assert!(!callers.is_one());
    }

    #[test]
    fn a_cycle_that_changes_is_no_deadlock_and_one_that_stands_is() {
        let stands = Duration::from_secs(1);
        let mut watch = Watch::new(stands * STANDS);
        let mut look = |waits: [Wait; 2], later: Duration| {
            // The clock is the system's, so that the watch's is set back.
            watch.next -= later;
            watch.since -= later;
            watch.look(Rank(0), Rank(1), || waits.to_vec())
        };
        let standing = || [wait(0, &[1]), wait(1, &[0])];
        let other = [wait(0, &[1]), Wait { place: (1, 1), ..wait(1, &[0]) }];
        assert_eq!(look(standing(), Duration::ZERO), None);
        assert_eq!(look(standing(), stands), None);
        assert_eq!(look(other, stands), None);
        assert_eq!(look(standing(), stands), None);
        assert_eq!(look(standing(), stands / 2), None);
        let Some(Failure::Deadlock { waits, .. }) = look(standing(), stands) else {
            panic!("a cycle that stands is not found")
        };
        let own = "rank 0 waits for rank 1 in exchange of 3 bytes for step \
                   (operation 7 of ranks 0 and 1)";
        assert!(waits.starts_with(own) && waits.contains("; rank 1 waits for rank 0"), "{waits}");
    }

    #[test]
    fn who_is_late_is_told_with_what_it_waits_for() {
        let mut watch = Watch::new(Duration::ZERO);
        let waits = || vec![wait(0, &[1]), wait(1, &[2]), wait(2, &[1])];
        let failure = watch.look(Rank(0), Rank(1), waits);
        let Some(Failure::Late { rank, waiter, waits }) = failure else { panic!("{failure:?}") };
        assert_eq!((rank, waiter), (Rank(1), Rank(0)));
        assert!(waits.starts_with("rank 1 waits for rank 2 in") && !waits.contains(';'), "{waits}");
    }

    #[test]
    fn lists_are_short() {
        let list = |ranks: &[usize]| list(&ranks.iter().copied().map(Rank).collect::<Vec<_>>());
        let lists = [list(&[3]), list(&[0, 1]), list(&[0, 1, 2]), list(&[0, 2, 3])];
        assert_eq!(lists, ["rank 3", "ranks 0 and 1", "ranks 0 to 2", "ranks 0, 2 and 3"]);
    }
}
