//! Ranks as threads of one process.
//!
//! What a rank offers is copied for the others, so that whoever uses this back end cannot come to
//! rely on shared memory. It is built from a lock and a condition, and needs no `unsafe`.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oxizero_core::{Bytes, ProcessGroup, Rank, WorldSize};
use oxizero_device::Region;

use crate::group::Group;
use crate::operation::Operation;
use crate::transport::{Failure, Offer, Peers, Transport};
use crate::waits::{Callers, Wait, Watch};
use crate::{Allocated, CommError, Communicator, DEFAULT_DEADLINE};

/// The communicators of a new group, one for each rank's thread, in rank order.
///
/// A thread that drops its communicator while others still wait for it, because it panicked or
/// returned early, fails them with [`CommError::PeerDead`].
pub fn group(world_size: WorldSize) -> Vec<Box<dyn Communicator>> {
    group_with_deadline(world_size, DEFAULT_DEADLINE)
}

/// As [`group`], where a rank waits for another at most for `deadline`.
pub fn group_with_deadline(
    world_size: WorldSize,
    deadline: Duration,
) -> Vec<Box<dyn Communicator>> {
    let members = ProcessGroup::world(world_size);
    let mut meeting = Meeting::new(&members);
    meeting.seats.iter_mut().for_each(|seat| seat.presence = Presence::Joined);
    let state = Mutex::new(State { failure: None, meetings: vec![meeting] });
    let callers = world_size.ranks().map(|_| Callers::default()).collect();
    let changed = Condvar::new();
    let world = Arc::new(World { size: world_size, callers, state, changed, deadline });
    let communicator = |rank| -> Box<dyn Communicator> {
        let (world, members) = (Arc::clone(&world), members.clone());
        Box::new(Group::new(ThreadTransport { world, meeting: 0, members, rank }))
    };
    world_size.ranks().map(communicator).collect()
}

/// One rank's end. Dropping it tells the others.
struct ThreadTransport {
    world: Arc<World>,
    /// This group's index in the world's state.
    meeting: usize,
    members: ProcessGroup,
    rank: Rank,
}

struct World {
    size: WorldSize,
    /// By rank.
    callers: Vec<Callers>,
    state: Mutex<State>,
    changed: Condvar,
    deadline: Duration,
}

/// The state of all groups. One lock serves them all: nothing is copied or summed under it.
struct State {
    failure: Option<Failure>,
    meetings: Vec<Meeting>,
}

/// One group's state.
struct Meeting {
    members: ProcessGroup,
    seats: Vec<Seat>,
}

/// One member's state in a group.
#[derive(Default)]
struct Seat {
    presence: Presence,
    posted: Option<Post>,
    /// The last operation whose offers this member has read.
    read: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Presence {
    /// The member has not called `split` yet.
    #[default]
    Invited,
    Joined,
    Left,
}

#[derive(Clone)]
struct Post {
    operation: Operation,
    offer: Arc<Copied>,
}

/// What a member offers: its pieces, one after the other.
struct Copied {
    region: Region,
    pieces: Vec<Range<usize>>,
}

impl Copied {
    fn of(offer: &Offer<'_>) -> Self {
        match offer {
            Offer::Range(region, range) => Self::concat(&[&region.bytes()[range.clone()]]),
            Offer::Shared(region) => Self::concat(&[region.bytes()]),
            Offer::Pieces(pieces) => Self::concat(pieces),
        }
    }

    fn concat(all: &[&[u8]]) -> Self {
        let mut region = Region::heap(Bytes(all.iter().map(|piece| piece.len()).sum()));
        let mut pieces = Vec::with_capacity(all.len());
        let mut start = 0;
        for bytes in all {
            let piece = start..start + bytes.len();
            region.range_mut(piece.clone()).copy_from_slice(bytes);
            start = piece.end;
            pieces.push(piece);
        }
        Self { region, pieces }
    }
}

impl State {
    /// Every rank that waits for others to come.
    fn waits(&self, callers: &[Callers]) -> Vec<Wait> {
        let meetings = self.meetings.iter().enumerate();
        meetings.flat_map(|(index, meeting)| meeting.waits(index, callers)).collect()
    }
}

impl Meeting {
    fn new(members: &ProcessGroup) -> Self {
        let seats = members.ranks().iter().map(|_| Seat::default()).collect();
        Self { members: members.clone(), seats }
    }

    fn waits(&self, index: usize, callers: &[Callers]) -> Vec<Wait> {
        let seats = || self.members.ranks().iter().copied().zip(&self.seats);
        let wait = |(rank, seat): (Rank, &Seat)| {
            let operation = seat.posted.as_ref().filter(|_| seat.presence != Presence::Left)?;
            let operation = operation.operation;
            let missing = seats().filter(|(_, seat)| !seat.has_posted(operation.sequence));
            let missing: Vec<Rank> = missing.map(|(rank, _)| rank).collect();
            let group = self.members.clone();
            // A place is read under the lock, with all others: no reading mixes two groups.
            let place = (index, 0);
            let is_all_of_rank = callers[rank.0].is_one();
            (!missing.is_empty()).then_some(Wait {
                rank,
                operation,
                group,
                place,
                missing,
                is_all_of_rank,
            })
        };
        seats().filter_map(wait).collect()
    }

    fn is_over(&self) -> bool {
        self.seats.iter().all(|seat| seat.presence == Presence::Left)
    }
}

impl Seat {
    fn has_posted(&self, sequence: u64) -> bool {
        self.posted.as_ref().is_some_and(|post| post.operation.sequence >= sequence)
    }
}

impl ThreadTransport {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.world.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seat<'a>(&self, state: &'a mut State) -> &'a mut Seat {
        &mut state.meetings[self.meeting].seats[self.rank.0]
    }

    /// This rank's number in the world.
    fn me(&self) -> Rank {
        self.members.ranks()[self.rank.0]
    }

    /// Returns once every member has `arrived`.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        operation: &Operation,
        arrived: impl Fn(&Seat) -> bool,
    ) -> Result<MutexGuard<'a, State>, CommError> {
        let mut watch = Watch::new(self.world.deadline);
        loop {
            let seats = self.members.ranks().iter().zip(&state.meetings[self.meeting].seats);
            let mut missing = seats.filter(|(_, seat)| !arrived(seat)).peekable();
            let Some(&(&first, _)) = missing.peek() else { return Ok(state) };
            let gone = missing.find(|(_, seat)| seat.presence == Presence::Left);
            let gone = gone.map(|(rank, _)| Failure::Dead(*rank));
            let waits = || state.waits(&self.world.callers);
            let new = gone.or_else(|| watch.look(self.me(), first, waits));
            if let Some(failure) = state.failure.clone().or(new) {
                let error = failure.error(operation, self.world.deadline);
                self.fail(&mut state, failure);
                return Err(error);
            }
            let changed = self.world.changed.wait_timeout(state, watch.sleep());
            state = changed.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn fail(&self, state: &mut State, failure: Failure) {
        state.failure.get_or_insert(failure);
        self.world.changed.notify_all();
    }
}

impl Transport for ThreadTransport {
    fn members(&self) -> &ProcessGroup {
        &self.members
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks_of_the_world(&self) -> WorldSize {
        self.world.size
    }

    fn meet(
        &self,
        operation: &Operation,
        offer: Offer<'_>,
        read: &mut dyn FnMut(&mut Region, &dyn Peers),
    ) -> Result<(), CommError> {
        let alone = self.members.size() == WorldSize::ONE;
        let copied = if alone { Copied::concat(&[]) } else { Copied::of(&offer) };
        let post = Post { operation: *operation, offer: Arc::new(copied) };

        self.world.callers[self.me().0].count();
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.error(operation, self.world.deadline));
        }
        self.seat(&mut state).posted = Some(post);
        self.world.changed.notify_all();
        let state = self.wait(state, operation, |seat| seat.has_posted(operation.sequence))?;
        let seats = state.meetings[self.meeting].seats.iter();
        let posts: Vec<Post> = seats.filter_map(|seat| seat.posted.clone()).collect();
        drop(state);

        let others =
            self.members.ranks().iter().zip(&posts).map(|(rank, post)| (*rank, post.operation));
        operation.agree(self.me(), others)?;
        match offer {
            Offer::Range(region, _) | Offer::Shared(region) => read(region, &Copies(posts)),
            Offer::Pieces(_) => read(&mut Region::heap(Bytes(0)), &Copies(posts)),
        }

        let mut state = self.lock();
        self.seat(&mut state).read = operation.sequence;
        self.world.changed.notify_all();
        let mut state = self.wait(state, operation, |seat| seat.read >= operation.sequence)?;
        let offer = Arc::new(Copied::concat(&[])); // nobody needs the copy any more
        self.seat(&mut state).posted = Some(Post { operation: *operation, offer });
        Ok(())
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        Ok(Region::heap(bytes))
    }

    fn alloc_replica(&self, operation: &Operation) -> Result<Region, CommError> {
        self.meet(operation, Offer::Pieces(&[]), &mut |_, _| {})?;
        Ok(Region::heap(Bytes(operation.numel.0)))
    }

    fn shares_replicas(&self) -> bool {
        false
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, CommError> {
        let rank = group.rank_of(self.me()).expect("the caller is a member of the new group");
        let mut state = self.lock();
        // There is at most one that awaits this rank: a split ends when all members have joined.
        let awaits_me = |meeting: &Meeting| {
            meeting.members == *group && meeting.seats[rank.0].presence == Presence::Invited
        };
        let opened = state.meetings.iter().position(awaits_me);
        let meeting = opened.unwrap_or_else(|| open(&mut state.meetings, group));
        state.meetings[meeting].seats[rank.0].presence = Presence::Joined;
        drop(state);
        Ok(Self { world: Arc::clone(&self.world), meeting, members: group.clone(), rank })
    }

    fn abort(&self, why: &str) {
        self.fail(&mut self.lock(), Failure::Aborted(self.me(), why.to_owned()));
    }

    fn allocated(&self) -> Allocated {
        Allocated::default()
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        self.seat(&mut self.lock()).presence = Presence::Left;
        self.world.changed.notify_all();
    }
}

/// A new meeting's index; the place of one that every member has left is used again.
fn open(meetings: &mut Vec<Meeting>, group: &ProcessGroup) -> usize {
    let index = meetings.iter().position(Meeting::is_over).unwrap_or(meetings.len());
    let meeting = Meeting::new(group);
    match meetings.get_mut(index) {
        Some(place) => *place = meeting,
        None => meetings.push(meeting),
    }
    index
}

struct Copies(Vec<Post>);

impl Peers for Copies {
    fn piece(&self, rank: Rank, index: usize) -> &[u8] {
        let Copied { region, pieces } = &*self.0[rank.0].offer;
        &region.bytes()[pieces[index].clone()]
    }

    fn bytes(&self, rank: Rank, range: Range<usize>) -> &[u8] {
        &self.0[rank.0].offer.region.bytes()[range]
    }

    fn lies_at(&self, _rank: Rank, _address: usize) -> bool {
        false
    }
}
