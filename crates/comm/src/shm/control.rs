//! The shared control pages: what ranks tell each other besides data.
//!
//! Everything here is an atomic whose zero is its resting state, so that fresh shared memory is a
//! valid [`Control`], and whatever another process writes is a valid value.

use oxizero_core::{ProcessGroup, Rank, WorldSize};

use super::signal::Signal;
use super::word::{AtomicU8, AtomicU32, AtomicU64, SeqCst};
use crate::operation::{Operation, WORDS};
use crate::transport::Failure;
use crate::waits::{Callers, Wait};

/// Ranks that a world may have: a group's members are the bits of one word.
pub(super) const RANKS_MAX: usize = 64;
/// Groups of several ranks that may be open at once, the world among them: more than those of an
/// engine on a mesh of three axes, which are at most three a rank. A place that is not used takes
/// no memory.
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
    /// By rank: who has called, as that rank's process knows its threads.
    pub(super) callers: [Callers; RANKS_MAX],
    /// By rank: for the opening of which group it waits.
    pub(super) openings: [Opening; RANKS_MAX],
    reasons: [Reason; RANKS_MAX],
    /// The first so many places have been used, or are about to be.
    used: AtomicU32,
    pub(super) meetings: [Meeting; GROUPS_MAX],
    pub(super) replicas: [Holders; REPLICAS_MAX],
}

/// What a rank says of the failure that it makes the world's: written by that rank alone, once,
/// before the failure is.
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
        let [kind, teller, rank, ..] = word.to_le_bytes();
        let [teller, rank] = [teller, rank].map(|rank| Rank(rank.into()));
        let reason = || self.reasons[teller.0 % RANKS_MAX].read();
        match kind {
            0 => None,
            DEAD => Some(Failure::Dead(rank)),
            LATE => Some(Failure::Late { rank, waiter: teller, waits: reason() }),
            DEADLOCK => Some(Failure::Deadlock { finder: teller, waits: reason() }),
            _ => Some(Failure::Aborted(teller, reason())),
        }
    }

    /// Makes `failure` the world's, unless there is one already; returns the first. A rank tells
    /// its first reason only.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        let (kind, teller, rank, reason) = match &failure {
            Failure::Dead(rank) => (DEAD, rank, rank, None),
            Failure::Late { rank, waiter, waits } => (LATE, waiter, rank, Some(waits)),
            Failure::Deadlock { finder, waits } => (DEADLOCK, finder, finder, Some(waits)),
            Failure::Aborted(rank, why) => (ABORTED, rank, rank, Some(why)),
        };
        if reason.is_some_and(|reason| !self.reasons[teller.0].write(reason)) {
            // Another thread of this process has told its reason, or is about to.
            return loop {
                match self.failure() {
                    Some(first) => break first,
                    None => std::thread::yield_now(),
                }
            };
        }
        let word = encode(kind, *teller, *rank);
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

    /// Every rank that waits for others to come. They go on meanwhile: each group is read by
    /// itself, as it is while it is open.
    pub(super) fn waits(&self, world_size: WorldSize) -> Vec<Wait> {
        let meetings = self.used().iter().enumerate();
        let met = meetings.flat_map(|(index, meeting)| meeting.waits(index, &self.callers));
        met.chain(world_size.ranks().filter_map(|rank| self.opening(rank))).collect()
    }

    /// How `rank` waits for a group's first member to open a place, if it does.
    fn opening(&self, rank: Rank) -> Option<Wait> {
        let (turn, members) = self.openings[rank.0].read()?;
        let group = group(members)?;
        let own = group.rank_of(rank)?;
        let missing = vec![group.ranks()[0]];
        let is_opened = self.place(&group, own).is_some();
        let still_waits = self.openings[rank.0].read() == Some((turn, members));
        (still_waits && !is_opened).then(|| Wait {
            rank,
            operation: Operation::split(&group),
            group,
            place: (GROUPS_MAX, turn),
            missing,
            is_all_of_rank: self.callers[rank.0].is_one(),
        })
    }

    /// Takes a place for `group`: the first is the world's.
    pub(super) fn open(&self, group: &ProcessGroup) -> Option<usize> {
        let index = (1..GROUPS_MAX).find(|index| {
            self.used.fetch_max(*index as u32 + 1, SeqCst);
            self.meetings[*index].open(group)
        })?;
        self.opened.bump();
        Some(index)
    }

    /// The place that `group`, which waits for it, has been given for its member `rank`.
    pub(super) fn place(&self, group: &ProcessGroup, rank: Rank) -> Option<usize> {
        self.used().iter().position(|meeting| meeting.awaits(group, rank))
    }

    /// The places that may be open. To look at another would make the system hold its page.
    fn used(&self) -> &[Meeting] {
        let used = (self.used.load(SeqCst) as usize).clamp(1, GROUPS_MAX);
        &self.meetings[..used]
    }

    fn wake_all(&self) {
        self.opened.wake();
        self.used().iter().for_each(Meeting::wake);
    }
}

const DEAD: u8 = 1;
const LATE: u8 = 2;
const ABORTED: u8 = 3;
const DEADLOCK: u8 = 4;

/// A byte for each: there are at most [`RANKS_MAX`] ranks.
fn encode(kind: u8, teller: Rank, rank: Rank) -> u64 {
    u64::from_le_bytes([kind, teller.0 as u8, rank.0 as u8, 0, 0, 0, 0, 0])
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

/// A rank's wait for a group's first member to open a place for it; written by that rank alone.
#[repr(C)]
pub(super) struct Opening {
    /// Odd while it waits.
    turn: AtomicU64,
    members: AtomicU64,
}

impl Opening {
    /// Says that the rank waits, until `wait` has returned.
    pub(super) fn during<R>(&self, group: &ProcessGroup, wait: impl FnOnce() -> R) -> R {
        self.members.store(mask(group), SeqCst);
        self.turn.fetch_add(1, SeqCst);
        let result = wait();
        self.turn.fetch_add(1, SeqCst);
        result
    }

    /// The how many-th turn this is, and the group's members, while the rank waits.
    fn read(&self) -> Option<(u64, u64)> {
        let turn = self.turn.load(SeqCst);
        (turn % 2 == 1).then(|| (turn, self.members.load(SeqCst)))
    }
}

/// The place where the members of one group meet.
#[repr(C)]
pub(super) struct Meeting {
    state: AtomicU32,
    /// How many groups have met here, with the one that does.
    times: AtomicU32,
    /// Members that have left.
    left: AtomicU32,
    /// One bit a rank of the world.
    members: AtomicU64,
    pub(super) seats: [Seat; RANKS_MAX],
}

impl Default for Meeting {
    fn default() -> Self {
        let seats = std::array::from_fn(|_| Seat::default());
        let [state, times, left] = std::array::from_fn(|_| AtomicU32::default());
        Self { state, times, left, members: AtomicU64::default(), seats }
    }
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
            self.times.fetch_add(1, SeqCst);
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

    /// The how many-th group meets here, and its members; `None` while none does.
    fn meets(&self) -> Option<(u32, u64)> {
        let times = self.times.load(SeqCst);
        let members = self.members.load(SeqCst);
        let is_open = self.state.load(SeqCst) == OPEN && self.times.load(SeqCst) == times;
        is_open.then_some((times, members))
    }

    /// Every member that waits for others to come here; `index` is the place's.
    fn waits(&self, index: usize, callers: &[Callers]) -> Vec<Wait> {
        let Some((times, members)) = self.meets() else { return Vec::new() };
        let Some(group) = group(members) else { return Vec::new() };
        let seats = || group.ranks().iter().copied().zip(&self.seats);
        let wait = |(rank, seat): (Rank, &Seat)| {
            let posted = seat.posted.value();
            if posted == 0 || seat.has_left() {
                return None;
            }
            let operation = seat.operation(posted);
            let sequence = operation.sequence as u32;
            let missing = seats().filter(|(_, seat)| !seat.posted.has_reached(sequence));
            let missing: Vec<Rank> = missing.map(|(rank, _)| rank).collect();
            let (place, is_all_of_rank) = ((index, times.into()), callers[rank.0].is_one());
            (!missing.is_empty()).then(|| {
                let group = group.clone();
                Wait { rank, operation, group, place, missing, is_all_of_rank }
            })
        };
        let waits = seats().filter_map(wait).collect();
        // What was read belongs to this group if it still meets here: none but an open place has
        // its members' seats, and a place that is opened anew has been counted.
        if self.meets() == Some((times, members)) { waits } else { Vec::new() }
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

/// The members whose [`mask`] this is.
fn group(mask: u64) -> Option<ProcessGroup> {
    ProcessGroup::new((0..RANKS_MAX).filter(|rank| mask >> rank & 1 == 1).map(Rank).collect())
}

const INVITED: u32 = 0;
const JOINED: u32 = 1;
const LEFT: u32 = 2;

/// What a member says of one operation.
#[derive(Default)]
#[repr(C)]
struct Post {
    operation: [AtomicU64; WORDS],
    /// Start and length in the shared memory.
    offer: [AtomicU64; 2],
}

/// One member's part of a meeting. The signals count operations.
#[derive(Default)]
#[repr(C, align(64))]
pub(super) struct Seat {
    /// The member has posted its operation and offer.
    pub(super) posted: Signal,
    /// The member has read the others' offers.
    pub(super) read: Signal,
    presence: AtomicU32,
    /// By turns: some operations end when all have posted. Then a member may post the next while
    /// others still read this one, but not the one after that.
    posts: [Post; 2],
}

impl Seat {
    /// Whether the member has left the group.
    pub(super) fn has_left(&self) -> bool {
        self.presence.load(SeqCst) == LEFT
    }

    pub(super) fn post(&self, operation: &Operation, offer: std::ops::Range<usize>) {
        let post = self.post_of(operation.sequence as u32);
        let words = operation.to_words();
        post.operation.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst));
        let words = [offer.start as u64, offer.len() as u64];
        post.offer.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst));
        self.posted.post(operation.sequence as u32);
    }

    fn post_of(&self, sequence: u32) -> &Post {
        &self.posts[sequence as usize % 2]
    }

    /// What the member has posted as the operation of this number.
    pub(super) fn operation(&self, sequence: u32) -> Operation {
        let words = &self.post_of(sequence).operation;
        Operation::from_words(std::array::from_fn(|index| words[index].load(SeqCst)))
    }

    /// Where the member's offer for that lies in the shared memory.
    pub(super) fn offer(&self, sequence: u32) -> std::ops::Range<usize> {
        let [start, len] = self.post_of(sequence).offer.each_ref().map(|word| word.load(SeqCst));
        start as usize..(start as usize).saturating_add(len as usize)
    }

    fn reset(&self) {
        self.posted.reset();
        self.read.reset();
        self.presence.store(INVITED, SeqCst);
    }
}

/// How many ranks hold a replica. The rank that allocated it takes the memory back.
#[derive(Default)]
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
