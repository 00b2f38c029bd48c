//! The shared control pages: what ranks tell each other besides data.
//!
//! Everything here is an atomic whose zero is its resting state, so that fresh shared memory is a
//! valid [`Control`], and whatever another process writes is a valid value.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};

use oxizero_core::{ProcessGroup, Rank};

use super::signal::Signal;
use crate::operation::Operation;
use crate::transport::Failure;

/// Ranks that a world may have: a group's members are the bits of one word.
pub(super) const RANKS_MAX: usize = 64;
/// Groups of several ranks that may be open at once, the world among them: more than those of any
/// mesh of three axes, which are at most three a rank. A place that is not used takes no memory.
pub(super) const GROUPS_MAX: usize = 4 * RANKS_MAX;
/// Replicas that may be alive at once.
pub(super) const REPLICAS_MAX: usize = 16 << 10;
const REASON_BYTES_MAX: usize = 1 << 10;

/// The start of the shared memory.
#[repr(C)]
pub(super) struct Control {
    /// The first failure; see [`encode`].
    failure: AtomicU64,
    /// Posted when a group was opened.
    pub(super) opened: Signal,
    /// By rank: whether it has left the world by itself.
    departed: [AtomicU32; RANKS_MAX],
    reasons: [Reason; RANKS_MAX],
    pub(super) meetings: [Meeting; GROUPS_MAX],
    pub(super) replicas: [Holders; REPLICAS_MAX],
}

/// Why a rank has aborted: written by that rank alone, once, before its failure is.
#[repr(C)]
struct Reason {
    claimed: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; REASON_BYTES_MAX],
}

impl Control {
    /// The first failure of any rank, if there is one.
    pub(super) fn failure(&self) -> Option<Failure> {
        let word = self.failure.load(SeqCst);
        let [kind, rank, waiter, ..] = word.to_le_bytes();
        let [rank, waiter] = [rank, waiter].map(|rank| Rank(rank.into()));
        match kind {
            0 => None,
            DEAD => Some(Failure::Dead(rank)),
            LATE => Some(Failure::Late { rank, waiter }),
            _ => Some(Failure::Aborted(rank, self.reasons[rank.0 % RANKS_MAX].read())),
        }
    }

    /// Makes `failure` the world's, unless there is one already; returns the first. A rank aborts
    /// for its first reason only.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        let word = match &failure {
            Failure::Dead(rank) => encode(DEAD, *rank, *rank),
            Failure::Late { rank, waiter } => encode(LATE, *rank, *waiter),
            Failure::Aborted(rank, why) => {
                if !self.reasons[rank.0].write(why) {
                    return self.failure().unwrap_or(failure);
                }
                encode(ABORTED, *rank, *rank)
            }
        };
        // Whoever was first, the failure is set from here on.
        let _ = self.failure.compare_exchange(0, word, SeqCst, SeqCst);
        self.wake_all();
        self.failure().unwrap_or(failure)
    }

    /// Says that `rank` leaves the world by itself: its end is no failure.
    pub(super) fn depart(&self, rank: Rank) {
        self.departed[rank.0].store(1, SeqCst);
    }

    pub(super) fn has_departed(&self, rank: Rank) -> bool {
        self.departed[rank.0].load(SeqCst) != 0
    }

    fn wake_all(&self) {
        self.opened.wake();
        self.meetings.iter().for_each(Meeting::wake);
    }
}

const DEAD: u8 = 1;
const LATE: u8 = 2;
const ABORTED: u8 = 3;

/// A byte for each: there are at most [`RANKS_MAX`] ranks.
fn encode(kind: u8, rank: Rank, waiter: Rank) -> u64 {
    u64::from_le_bytes([kind, rank.0 as u8, waiter.0 as u8, 0, 0, 0, 0, 0])
}

impl Reason {
    /// Whether this is the first reason, which alone is kept.
    fn write(&self, why: &str) -> bool {
        if self.claimed.swap(1, SeqCst) != 0 {
            return false;
        }
        let len = why.floor_char_boundary(REASON_BYTES_MAX);
        self.text.iter().zip(why[..len].bytes()).for_each(|(to, byte)| to.store(byte, SeqCst));
        self.len.store(len as u32, SeqCst);
        true
    }

    fn read(&self) -> String {
        let len = self.len.load(SeqCst) as usize;
        let bytes: Vec<u8> = self.text.iter().take(len).map(|byte| byte.load(SeqCst)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The place where the members of one group meet.
#[repr(C)]
pub(super) struct Meeting {
    state: AtomicU32,
    /// Members that have left.
    left: AtomicU32,
    /// One bit a rank of the world.
    members: AtomicU64,
    pub(super) seats: [Seat; RANKS_MAX],
}

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const OPEN: u32 = 2;

impl Meeting {
    /// Takes the place for `group`, if it is free.
    pub(super) fn open(&self, group: &ProcessGroup) -> bool {
        let claimed = self.state.compare_exchange(FREE, CLAIMED, SeqCst, SeqCst).is_ok();
        if claimed {
            self.members.store(mask(group), SeqCst);
            self.state.store(OPEN, SeqCst);
        }
        claimed
    }

    /// Whether `group` meets here and member `rank` has not joined it yet.
    ///
    /// After the seat, the place is looked at again: a seat that the last member of an earlier
    /// group has just cleared is seen to be in no open place, or in one that was opened anew, with
    /// the new members. Looked at first, it keeps from touching the seats of places not in use,
    /// which would take memory.
    pub(super) fn awaits(&self, group: &ProcessGroup, rank: Rank) -> bool {
        let is_open =
            || self.state.load(SeqCst) == OPEN && self.members.load(SeqCst) == mask(group);
        is_open() && self.seats[rank.0].presence.load(SeqCst) == INVITED && is_open()
    }

    pub(super) fn join(&self, rank: Rank) {
        self.seats[rank.0].presence.store(JOINED, SeqCst);
    }

    /// Gives up member `rank`'s seat; when the last of `group` has left, the place is free.
    pub(super) fn leave(&self, group: &ProcessGroup, rank: Rank) {
        self.seats[rank.0].presence.store(LEFT, SeqCst);
        self.wake();
        if self.left.fetch_add(1, SeqCst) + 1 == group.ranks().len() as u32 {
            self.state.store(CLAIMED, SeqCst); // nobody may take a cleared seat for an invitation
            self.seats.iter().for_each(Seat::reset);
            self.left.store(0, SeqCst);
            self.state.store(FREE, SeqCst);
        }
    }

    fn wake(&self) {
        if self.state.load(SeqCst) != FREE {
            for seat in &self.seats {
                seat.posted.wake();
                seat.read.wake();
            }
        }
    }
}

fn mask(group: &ProcessGroup) -> u64 {
    group.ranks().iter().map(|rank| 1 << rank.0).sum()
}

const INVITED: u32 = 0;
const JOINED: u32 = 1;
const LEFT: u32 = 2;

/// One member's part of a meeting. The signals count operations.
#[repr(C, align(64))]
pub(super) struct Seat {
    /// The member has posted its operation and offer.
    pub(super) posted: Signal,
    /// The member has read the others' offers.
    pub(super) read: Signal,
    presence: AtomicU32,
    operation: [AtomicU64; 3],
    /// Start and length in the shared memory.
    offer: [AtomicU64; 2],
}

impl Seat {
    /// Whether the member has left the group.
    pub(super) fn has_left(&self) -> bool {
        self.presence.load(SeqCst) == LEFT
    }

    pub(super) fn post(&self, operation: &Operation, offer: std::ops::Range<usize>) {
        let words = operation.to_words();
        self.operation.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst));
        let words = [offer.start as u64, offer.len() as u64];
        self.offer.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst));
        self.posted.post(operation.sequence as u32);
    }

    /// What the member has posted.
    pub(super) fn operation(&self) -> Operation {
        Operation::from_words([0, 1, 2].map(|index| self.operation[index].load(SeqCst)))
    }

    /// Where the member's offer lies in the shared memory.
    pub(super) fn offer(&self) -> std::ops::Range<usize> {
        let [start, len] = [0, 1].map(|index| self.offer[index].load(SeqCst) as usize);
        start..start.saturating_add(len)
    }

    fn reset(&self) {
        self.posted.reset();
        self.read.reset();
        self.presence.store(INVITED, SeqCst);
    }
}

/// How many ranks hold a replica. The rank that allocated it takes the memory back.
#[repr(transparent)]
pub(super) struct Holders(AtomicU32);

const UNUSED: u32 = 0;
/// No holder is left, and the memory is zero again.
const RETURNED: u32 = 2;
/// In use by no holder; each holder adds two.
const BUSY: u32 = 1;

impl Holders {
    /// Takes the entry for a replica with so many holders, if it is unused.
    pub(super) fn claim(&self, holders: usize) -> bool {
        let held = BUSY + 2 * holders as u32;
        self.0.compare_exchange(UNUSED, held, SeqCst, SeqCst).is_ok()
    }

    /// Gives up one holding. The last holder runs `clear`; if that fails, the memory is not used
    /// again.
    pub(super) fn release(&self, clear: impl FnOnce() -> bool) {
        if self.0.fetch_sub(2, SeqCst) == BUSY + 2 && clear() {
            self.0.store(RETURNED, SeqCst);
        }
    }

    /// Makes the entry unused if its replica's memory has been returned.
    pub(super) fn reclaim(&self) -> bool {
        self.0.compare_exchange(RETURNED, UNUSED, SeqCst, SeqCst).is_ok()
    }
}
