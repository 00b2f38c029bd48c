//! One rank's end of a group in shared memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oxizero_core::{Bytes, Numel, ProcessGroup, Rank};
use oxizero_device::Region;

use super::Process;
use super::control::{Meeting, Seat};
use super::memory::Offers;
use super::section::Reservation;
use super::signal::Signal;
use crate::operation::{Kind, Operation};
use crate::transport::{Failure, Offer, Peers, Transport};
use crate::{Allocated, CommError};

/// A staging block of at most so many bytes is kept for the next operation.
const STAGING_KEPT: usize = 64 << 10;

/// Dropping it gives up this rank's seat.
pub(super) struct ShmTransport {
    process: Arc<Process>,
    /// Where the group meets, in the control pages.
    meeting: usize,
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
        Self::new(process, 0, members, rank, deadline)
    }

    fn new(
        process: Arc<Process>,
        meeting: usize,
        members: ProcessGroup,
        rank: Rank,
        deadline: Duration,
    ) -> Self {
        Self { process, meeting, members, rank, deadline, staging: Mutex::new(None) }
    }

    fn meeting(&self) -> &Meeting {
        &self.process.control().meetings[self.meeting]
    }

    /// The members' seats, by their ranks in the world.
    fn seats(&self) -> impl Iterator<Item = (Rank, &Seat)> {
        self.members.ranks().iter().copied().zip(&self.meeting().seats)
    }

    /// Returns once the signal of every member has reached `operation`.
    fn wait(
        &self,
        operation: &Operation,
        signal: impl Fn(&Seat) -> &Signal,
    ) -> Result<(), CommError> {
        let started = Instant::now();
        let value = operation.sequence as u32;
        for (rank, seat) in self.seats() {
            let look =
                || self.look(operation, started, rank, |seat| signal(seat).has_reached(value));
            signal(seat).wait(value, self.process.spins, look)?;
        }
        Ok(())
    }

    /// Gives up if there is a reason to, while `rank` has not come: a failure, a member that left
    /// without having `come`, or the deadline.
    fn look(
        &self,
        operation: &Operation,
        started: Instant,
        rank: Rank,
        come: impl Fn(&Seat) -> bool,
    ) -> Result<(), CommError> {
        let control = self.process.control();
        // In this order: who leaves because of a failure has made it known before.
        let gone = self.seats().find(|(_, seat)| seat.has_left() && !come(seat));
        let failure = control.failure().or_else(|| {
            let late = started.elapsed() > self.deadline;
            let new = gone.map(|(rank, _)| Failure::Dead(rank));
            let late = late.then_some(Failure::Late { rank, waiter: self.process.rank });
            new.or(late).map(|new| control.fail(new))
        });
        self.failed(operation, failure)
    }

    fn failed(&self, operation: &Operation, failure: Option<Failure>) -> Result<(), CommError> {
        failure.map_or(Ok(()), |failure| Err(failure.error(operation, self.deadline)))
    }

    /// Where what is offered lies in the shared memory; what lies elsewhere is copied there first.
    fn place(
        &self,
        offer: &Offer<'_>,
        staging: &mut Option<Region>,
    ) -> Result<std::ops::Range<usize>, CommError> {
        let mapping = &self.process.mapping;
        let len = offer.range.len();
        if len == 0 {
            return Ok(0..0);
        }
        if let Some(start) = mapping.offset(offer.region.start()) {
            return Ok(start + offer.range.start..start + offer.range.end);
        }
        let mut block = match staging.take() {
            Some(block) if block.len().0 >= len => block,
            _ => self.process.section.staging(Bytes(len))?,
        };
        block.range_mut(0..len).copy_from_slice(&offer.region.bytes()[offer.range.clone()]);
        let start = mapping.offset(block.start()).expect("staging lies in shared memory");
        *staging = Some(block);
        Ok(start..start + len)
    }

    /// Waits for the first member of `group` to open a place for it.
    fn await_opening(&self, group: &ProcessGroup, rank: Rank) -> Result<usize, CommError> {
        let control = self.process.control();
        let operation = Operation {
            sequence: 0,
            kind: Kind::Split,
            dtype: None,
            numel: Numel(group.size().get()),
        };
        let first = group.ranks()[0];
        let started = Instant::now();
        loop {
            let count = control.opened.value();
            let mut meetings = control.meetings.iter();
            if let Some(meeting) = meetings.position(|meeting| meeting.awaits(group, rank)) {
                return Ok(meeting);
            }
            let look = || {
                let is_first = |(rank, seat): &(Rank, &Seat)| *rank == first && seat.has_left();
                let gone = self.seats().find(is_first).map(|(rank, _)| Failure::Dead(rank));
                let late = Failure::Late { rank: first, waiter: self.process.rank };
                let late = (started.elapsed() > self.deadline).then_some(late);
                let failure = control.failure();
                let new = failure.or_else(|| gone.or(late).map(|new| control.fail(new)));
                self.failed(&operation, new)
            };
            control.opened.wait(count.wrapping_add(1), 0, look)?;
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

    fn meet(
        &self,
        operation: &Operation,
        offer: Offer<'_>,
        read: &mut dyn FnMut(&mut Region, &dyn Peers),
    ) -> Result<(), CommError> {
        self.failed(operation, self.process.control().failure())?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let own = &self.meeting().seats[self.rank.0];
        own.post(operation, self.place(&offer, &mut staging)?);
        self.wait(operation, |seat| &seat.posted)?;

        let others = self.seats().map(|(rank, seat)| (rank, seat.operation()));
        operation.agree(self.process.rank, others)?;
        let offers = self.seats().map(|(_, seat)| seat.offer()).collect();
        read(offer.region, &Offers::new(&self.process.mapping, offers));

        own.read.post(operation.sequence as u32);
        self.wait(operation, |seat| &seat.read)?;
        staging.take_if(|block| block.len().0 > STAGING_KEPT);
        Ok(())
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.process.section.alloc(bytes)
    }

    /// The group's first member sets the memory aside, and tells the others where it lies.
    fn alloc_replica(&self, operation: &Operation) -> Result<Region, CommError> {
        let bytes = Bytes(operation.numel.0);
        let section = &self.process.section;
        let first = self.rank == Rank(0);
        let mut reserved = None;
        if first && bytes.0 > 0 {
            reserved = Some(section.reserve_replica(bytes, self.members.size().get()));
        }
        let mut words = Region::heap(Bytes(Reservation::BYTES));
        if let Some(Ok(reservation)) = &reserved {
            words.bytes_mut().copy_from_slice(&reservation.to_bytes());
        }
        let mut told = [0; Reservation::BYTES];
        let range = 0..Reservation::BYTES;
        let mut read = |own: &mut Region, peers: &dyn Peers| {
            let from = if first { own.bytes() } else { peers.bytes(Rank(0), range.clone()) };
            told.copy_from_slice(from);
        };
        let offer = Offer { region: &mut words, range: range.clone() };
        self.meet(operation, offer, &mut read)?;
        if let Some(Err(error)) = reserved {
            return Err(error);
        }
        if bytes.0 == 0 {
            return Ok(Region::heap(bytes));
        }
        match Reservation::from_bytes(told) {
            Some(reservation) => Ok(section.replica(reservation, bytes)),
            None => Err(CommError::System {
                operation: "allocate a replica",
                why: format!("rank {} has no memory for it", self.members.ranks()[0]),
            }),
        }
    }

    fn shares_replicas(&self) -> bool {
        true
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, CommError> {
        let control = self.process.control();
        let rank =
            group.rank_of(self.process.rank).expect("the caller is a member of the new group");
        let meeting = if rank == Rank(0) {
            let mut meetings = control.meetings.iter().skip(1);
            let Some(index) = meetings.position(|meeting| meeting.open(group)) else {
                let why = format!("{} groups are open already", control.meetings.len());
                return Err(CommError::System { operation: "split", why });
            };
            control.opened.bump();
            index + 1
        } else {
            self.await_opening(group, rank)?
        };
        control.meetings[meeting].join(rank);
        let process = Arc::clone(&self.process);
        Ok(Self::new(process, meeting, group.clone(), rank, self.deadline))
    }

    fn abort(&self, why: &str) {
        let Process { rank, aborted, .. } = &*self.process;
        aborted.call_once(|| {
            self.process.control().fail(Failure::Aborted(*rank, why.to_owned()));
        });
    }

    fn allocated(&self) -> Allocated {
        self.process.section.allocated()
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.meeting().leave(&self.members, self.rank);
    }
}
