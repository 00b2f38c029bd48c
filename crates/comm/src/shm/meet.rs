//! One rank's end of a group in shared memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oxizero_core::{Bytes, ProcessGroup, Rank, WorldSize};
use oxizero_device::{Region, kernels};

use super::control::{Meeting, Seat};
use super::memory::{LentPieces, Offers, PIECE_BYTES, piece_to_bytes};
use super::section::Reservation;
use super::signal::Signal;
use super::{Process, Replicas};
use crate::operation::{Kind, Operation};
use crate::peer_views::PeerPieces;
use crate::queue::{INTERRUPTED, is_interrupted};
use crate::transport::{Failure, Lender, Offer, Peers, Transport};
use crate::waits::Watch;
use crate::{Allocated, CommError};

/// A staging block of at most so many bytes is kept for the next operation.
const STAGING_KEPT: usize = 64 << 10;

/// Dropping it gives up this rank's seat.
pub(super) struct ShmTransport {
    process: Arc<Process>,
    /// Where the group meets, in the control pages; a rank that is alone meets nobody.
    meeting: Option<usize>,
    members: ProcessGroup,
    rank: Rank,
    deadline: Duration,
    /// Passes on what does not lie in shared memory.
    staging: Mutex<Option<Region>>,
}

impl ShmTransport {
    /// The group of all ranks, whose place is the first.
    pub(super) fn world(process: Arc<Process>, members: ProcessGroup, deadline: Duration) -> Self {
        let rank = process.rank;
        let meeting = (members.size() != WorldSize::ONE).then_some(0);
        if let Some(index) = meeting {
            let place = &process.control().meetings[index];
            place.open(&members); // unless another rank has
            place.join(rank);
        }
        Self::new(process, meeting, members, rank, deadline)
    }

    fn new(
        process: Arc<Process>,
        meeting: Option<usize>,
        members: ProcessGroup,
        rank: Rank,
        deadline: Duration,
    ) -> Self {
        Self { process, meeting, members, rank, deadline, staging: Mutex::new(None) }
    }

    fn meeting(&self) -> Option<&Meeting> {
        self.meeting.map(|index| &self.process.control().meetings[index])
    }

    /// The members' seats, by their ranks in the world; none where this rank is alone.
    fn seats(&self) -> impl Iterator<Item = (Rank, &Seat)> {
        let seats = self.meeting().into_iter().flat_map(|meeting| &meeting.seats);
        self.members.ranks().iter().copied().zip(seats)
    }

    /// Returns once the signal of every member has reached `operation`.
    fn wait(
        &self,
        operation: &Operation,
        signal: impl Fn(&Seat) -> &Signal,
    ) -> Result<(), CommError> {
        let mut watch = Watch::new(self.deadline);
        let value = operation.sequence as u32;
        let has_come = |seat: &Seat| signal(seat).has_reached(value);
        for (rank, seat) in self.seats() {
            let look = || {
                let gone = || self.seats().find(|(_, seat)| seat.has_left() && !has_come(seat));
                self.look(operation, &mut watch, rank, gone)
            };
            signal(seat).wait(value, self.process.spins, look)?;
        }
        Ok(())
    }

    /// Gives up if there is a reason to, while `rank` has not come: a failure, a member that is
    /// `gone` without having come, or what the watch sees.
    fn look<'a>(
        &self,
        operation: &Operation,
        watch: &mut Watch,
        rank: Rank,
        gone: impl Fn() -> Option<(Rank, &'a Seat)>,
    ) -> Result<(), CommError> {
        let control = self.process.control();
        // In this order: who leaves because of a failure has made it known before.
        let gone = gone().map(|(rank, _)| Failure::Dead(rank));
        let failure = control.failure().or_else(|| {
            let own = self.process.rank;
            let mut interrupted = false;
            let waits = || {
                interrupted = is_interrupted(self.process.interrupted);
                control.waits(self.ranks_of_the_world())
            };
            let new = gone.or_else(|| watch.look(own, rank, waits));
            let stop = interrupted.then(|| Failure::Aborted(own, INTERRUPTED.to_owned()));
            stop.or(new).map(|new| control.fail(new))
        });
        self.failed(operation, failure)
    }

    fn failed(&self, operation: &Operation, failure: Option<Failure>) -> Result<(), CommError> {
        failure.map_or(Ok(()), |failure| Err(failure.error(operation, self.deadline)))
    }

    /// Where what is offered lies in the shared memory, or the list of where its pieces do. What
    /// lies elsewhere is copied there first.
    fn place(
        &self,
        offer: &Offer<'_>,
        staging: &mut Option<Region>,
    ) -> Result<Range<usize>, CommError> {
        match offer {
            Offer::Range(region, range) => {
                self.place_or_copy(&region.bytes()[range.clone()], staging)
            }
            Offer::Shared(region) => self.place_or_copy(region.bytes(), staging),
            Offer::Pieces(pieces) => self.list(pieces, staging),
        }
    }

    fn place_or_copy(
        &self,
        bytes: &[u8],
        staging: &mut Option<Region>,
    ) -> Result<Range<usize>, CommError> {
        if let Some(place) = self.place_of(bytes) {
            return Ok(place);
        }
        let (block, place) = self.stage(staging, bytes.len())?;
        kernels::copy(bytes, block.range_mut(0..bytes.len()));
        Ok(place)
    }

    /// Whether others write to a copy of what is offered.
    fn is_copied(&self, offer: &Offer<'_>) -> bool {
        matches!(offer, Offer::Shared(region) if self.place_of(region.bytes()).is_none())
    }

    /// Lists where `pieces` lie, in front of copies of those that do not lie in shared memory.
    fn list(
        &self,
        pieces: &[&[u8]],
        staging: &mut Option<Region>,
    ) -> Result<Range<usize>, CommError> {
        let places: Vec<_> = pieces.iter().map(|piece| self.place_of(piece)).collect();
        let list_len = pieces.len() * PIECE_BYTES;
        let copied = pieces.iter().zip(&places).filter(|(_, place)| place.is_none());
        let copied_len: usize = copied.map(|(piece, _)| piece.len()).sum();
        let (block, place) = self.stage(staging, list_len + copied_len)?;
        let mut next = list_len;
        for (index, (piece, lies_at)) in pieces.iter().zip(places).enumerate() {
            let lies_at = lies_at.unwrap_or_else(|| {
                let copy = next..next + piece.len();
                kernels::copy(piece, block.range_mut(copy.clone()));
                next = copy.end;
                place.start + copy.start..place.start + copy.end
            });
            let entry = index * PIECE_BYTES..(index + 1) * PIECE_BYTES;
            block.range_mut(entry).copy_from_slice(&piece_to_bytes(lies_at));
        }
        Ok(place.start..place.start + list_len)
    }

    /// Whether no member has anything to read: none offers a byte, or all gather into one replica,
    /// in which each has written its part. Every member finds the same: where the offers lie side
    /// by side in a whole buffer of this rank's, it is the buffer of them all.
    fn lies_in_place(
        &self,
        operation: &Operation,
        offer: &Offer<'_>,
        places: &[Range<usize>],
    ) -> bool {
        if places.iter().all(Range::is_empty) {
            return true;
        }
        let (Kind::AllGather, Offer::Range(full, own)) = (operation.kind, offer) else {
            return false;
        };
        let is_whole = operation.dtype.is_some_and(|d| operation.numel.bytes(d) == full.len());
        let start = self.process.mapping.offset(full.start());
        let is_at = |(rank, place): (usize, &Range<usize>)| {
            start.is_some_and(|start| place.start == start + rank * own.len())
        };
        is_whole && places.iter().enumerate().all(is_at)
    }

    /// Where `bytes` lie in the shared memory, if they do.
    fn place_of(&self, bytes: &[u8]) -> Option<Range<usize>> {
        if bytes.is_empty() {
            return Some(0..0);
        }
        let start = self.process.mapping.offset(NonNull::from(bytes).cast())?;
        Some(start..start + bytes.len())
    }

    /// At least `len` bytes of shared memory to pass other memory on through, and where they lie.
    fn stage<'a>(
        &self,
        staging: &'a mut Option<Region>,
        len: usize,
    ) -> Result<(&'a mut Region, Range<usize>), CommError> {
        let block = match staging.take() {
            Some(block) if block.len().0 >= len => block,
            _ => self.process.section.staging(Bytes(len))?,
        };
        let place = self.place_of(&block.bytes()[..len]).expect("staging lies in shared memory");
        Ok((staging.insert(block), place))
    }

    /// Takes a place for `group`, whose first member this rank is.
    fn open(&self, group: &ProcessGroup) -> Result<usize, CommError> {
        let control = self.process.control();
        control.open(group).ok_or_else(|| {
            let why = format!(
                "{} groups are open already, which is all there can be: drop communicators that \
                 are no longer used, and keep one for each group instead of splitting again",
                control.meetings.len()
            );
            CommError::System { operation: "split", why }
        })
    }

    /// Waits for the first member of `group` to open a place for it.
    fn await_opening(&self, group: &ProcessGroup, rank: Rank) -> Result<usize, CommError> {
        let control = self.process.control();
        let operation = Operation::split(group);
        let first = group.ranks()[0];
        let mut watch = Watch::new(self.deadline);
        loop {
            let count = control.opened.value();
            if let Some(place) = control.place(group, rank) {
                return Ok(place);
            }
            let look = || {
                let is_first = |(rank, seat): &(Rank, &Seat)| *rank == first && seat.has_left();
                self.look(&operation, &mut watch, first, || self.seats().find(is_first))
            };
            control.opened.wait(count.wrapping_add(1), 0, look)?;
        }
    }
}

/// Calls `read` with what this rank has offered, or the copy of it that others write to.
fn give_back(
    offer: &mut Offer<'_>,
    copy: Option<&mut Region>,
    others: &Offers<'_>,
    read: &mut dyn FnMut(&mut Region, &dyn Peers),
) {
    match offer {
        Offer::Range(region, _) => read(region, others),
        Offer::Shared(region) => read(copy.unwrap_or(region), others),
        Offer::Pieces(_) => read(&mut Region::heap(Bytes(0)), others),
    }
}

/// Held while others may read what this rank offers. A panic drops the offer before they have
/// read it, which is a failure as any other.
struct Lent<'a>(&'a ShmTransport);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("it panicked in a collective");
        }
    }
}

impl Transport for ShmTransport {
    fn members(&self) -> &ProcessGroup {
        &self.members
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks_of_the_world(&self) -> WorldSize {
        self.process.mapping.world_size()
    }

    fn meet(
        &self,
        operation: &Operation,
        mut offer: Offer<'_>,
        read: &mut dyn FnMut(&mut Region, &dyn Peers),
    ) -> Result<(), CommError> {
        let control = self.process.control();
        self.failed(operation, control.failure())?;
        control.callers[self.process.rank.0].count();
        let Some(meeting) = self.meeting() else {
            give_back(&mut offer, None, &Offers::new(&self.process.mapping, Vec::new()), read);
            return Ok(());
        };
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let own = &meeting.seats[self.rank.0];
        own.post(operation, self.place(&offer, &mut staging)?);
        self.wait(operation, |seat| &seat.posted)?;

        let sequence = operation.sequence as u32;
        let others = self.seats().map(|(rank, seat)| (rank, seat.operation(sequence)));
        operation.agree(self.process.rank, others)?;
        let places: Vec<_> = self.seats().map(|(_, seat)| seat.offer(sequence)).collect();
        let is_read = !self.lies_in_place(operation, &offer, &places);
        let offers = Offers::new(&self.process.mapping, places);
        let _lent = Lent(self);
        let copy = staging.as_mut().filter(|_| self.is_copied(&offer));
        give_back(&mut offer, copy, &offers, read);

        if !is_read {
            return Ok(());
        }
        own.read.post(sequence);
        self.wait(operation, |seat| &seat.read)?;
        let is_copied = self.is_copied(&offer);
        if let (Offer::Shared(region), Some(copy), true) = (offer, &*staging, is_copied) {
            kernels::copy(&copy.bytes()[..region.len().0], region.bytes_mut());
        }
        staging.take_if(|block| block.len().0 > STAGING_KEPT);
        Ok(())
    }

    fn lender(&self) -> Option<&dyn Lender> {
        Some(self)
    }

    fn writes_to_peers(&self) -> bool {
        true
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.process.section.alloc(bytes)
    }

    fn alloc_scratch(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.process.section.scratch(bytes)
    }

    /// Where replicas are shared, the group's first member sets the memory aside, and tells the
    /// others where it lies.
    fn alloc_replica(&self, operation: &Operation) -> Result<Region, CommError> {
        let bytes = Bytes(operation.numel.0);
        let section = &self.process.section;
        if bytes.0 == 0 || !self.shares_replicas() {
            let own = section.own_replica(bytes)?;
            self.meet(operation, Offer::Pieces(&[]), &mut |_, _| {})?;
            return Ok(own);
        }
        let mut words = Region::heap(Bytes(Reservation::BYTES));
        let first = self.rank == Rank(0);
        if first {
            let reservation = section.reserve_replica(bytes, self.members.size().get())?;
            words.bytes_mut().copy_from_slice(&reservation.to_bytes());
        }
        let mut reservation = [0; Reservation::BYTES];
        let range = 0..Reservation::BYTES;
        let mut read = |own: &mut Region, peers: &dyn Peers| {
            let from = if first { own.bytes() } else { peers.bytes(Rank(0), range.clone()) };
            reservation.copy_from_slice(from);
        };
        self.meet(operation, Offer::Range(&mut words, range.clone()), &mut read)?;
        Ok(section.replica(Reservation::from_bytes(reservation), bytes))
    }

    fn shares_replicas(&self) -> bool {
        self.process.replicas == Replicas::Shared
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, CommError> {
        let control = self.process.control();
        let rank =
            group.rank_of(self.process.rank).expect("the caller is a member of the new group");
        let meeting = match rank {
            _ if group.size() == WorldSize::ONE => None,
            Rank(0) => Some(self.open(group)?),
            _ => {
                let wait = || self.await_opening(group, rank);
                control.callers[self.process.rank.0].count();
                Some(control.openings[self.process.rank.0].during(group, wait)?)
            }
        };
        if let Some(index) = meeting {
            control.meetings[index].join(rank);
        }
        let process = Arc::clone(&self.process);
        Ok(Self::new(process, meeting, group.clone(), rank, self.deadline))
    }

    fn abort(&self, why: &str) {
        self.process.control().fail(Failure::Aborted(self.process.rank, why.to_owned()));
    }

    fn allocated(&self) -> Allocated {
        self.process.section.allocated()
    }
}

impl Lender for ShmTransport {
    fn reaches(&self, piece: &[u8]) -> bool {
        self.place_of(piece).is_some()
    }

    fn lend(
        &self,
        operation: &Operation,
        pieces: &[&[u8]],
    ) -> Result<Box<dyn PeerPieces>, CommError> {
        let mut places = vec![Vec::new(); self.members.size().get()];
        let mut read = |_: &mut Region, peers: &dyn Peers| {
            for rank in self.members.size().ranks().filter(|rank| *rank != self.rank) {
                let all = (0..pieces.len()).filter_map(|index| peers.place(rank, index));
                places[rank.0] = all.collect();
            }
        };
        self.meet(operation, Offer::Pieces(pieces), &mut read)?;
        let pieces = LentPieces::new(Arc::clone(&self.process.mapping), places);
        Ok(Box::new(LentByPeers { process: Arc::clone(&self.process), pieces }))
    }
}

struct LentByPeers {
    process: Arc<Process>,
    pieces: LentPieces,
}

impl PeerPieces for LentByPeers {
    fn piece(&self, rank: Rank, index: usize) -> &[u8] {
        self.pieces.piece(rank, index)
    }

    fn abandon(&self) {
        let why = "it dropped what it had lent to other ranks, who may still read it";
        self.process.control().fail(Failure::Aborted(self.process.rank, why.to_owned()));
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        if let Some(meeting) = self.meeting() {
            meeting.leave(&self.members, self.rank);
        }
    }
}
