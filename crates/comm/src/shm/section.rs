//! Regions of shared memory: each rank allocates from its own section.
//!
//! Free memory is always zero: it is cleared when it is given back, so that handing it out is
//! only arithmetic, and its pages come when they are first written to; small blocks keep theirs.
//! Only the last few blocks of middle size are kept as they are, since steps ask for the same sizes
//! again and again, and new pages cost many times as much as zeroing old ones. One of them is
//! cleared before another block takes new pages, so that a step's peak is not their sum.
//!
//! After a failure nothing is cleared or used again: a collective that did not complete may have
//! left a rank that still reads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oxizero_core::{Bytes, Rank};
use oxizero_device::{COLOURS_LEN, REGION_ALIGN, Region, colour};

use super::control::Holders;
use super::free_list::FreeList;
use super::memory::{HUGE_PAGE, Mapping, PAGE};
use crate::{Allocated, CommError};

/// Blocks from this size on are multiples of it, so that all of their memory can be given back,
/// and one that is kept serves another of nearly its size; their regions start within them at a
/// [`colour`]. What is not written to takes addresses only.
const UNIT: usize = 1 << 20;

/// Smaller blocks keep their pages: the system takes longer to take them back, and to give new
/// ones, than they are zeroed.
const SMALL: usize = 64 << 10;

/// Blocks of at most so many bytes are kept for the next of their size, and at most so many: this
/// is what a process may hold beyond what is allocated.
const KEPT_BYTES_MAX: usize = 64 << 20;
const KEPT_MAX: usize = 2;

/// Blocks of different ranks with the same number are so many colours apart.
const COLOURS_APART: usize = 5;

/// Huge pages are asked for in blocks from this size on, for as long as they are allocated. Each
/// such block may take an entry of the system's list of a process's mappings, which is short.
const HUGE_FROM: usize = 16 << 20;

/// One process's allocator.
pub(super) struct Section {
    mapping: Arc<Mapping>,
    blocks: Mutex<Blocks>,
    own: AtomicUsize,
    replicas: AtomicUsize,
}

struct Blocks {
    free: FreeList,
    /// Neither free nor cleared; the last to be dropped comes last.
    kept: Vec<Range<usize>>,
    /// Replicas that this rank has allocated: the index of their holders' count, and where.
    replicas: Vec<(usize, Range<usize>)>,
    /// The number of the next block's colour. Ranks start with different ones, since they read
    /// each other's blocks side by side.
    colour: usize,
}

impl Section {
    pub(super) fn new(mapping: Arc<Mapping>, rank: Rank) -> Arc<Self> {
        let blocks = Blocks {
            free: FreeList::new(mapping.section(rank)),
            kept: Vec::new(),
            replicas: Vec::new(),
            colour: COLOURS_APART * rank.0,
        };
        let (own, replicas) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Self { mapping, blocks: Mutex::new(blocks), own, replicas })
    }

    pub(super) fn allocated(&self) -> Allocated {
        Allocated {
            own: Bytes(self.own.load(Relaxed)),
            replicas: Bytes(self.replicas.load(Relaxed)),
            resident: self.mapping.resident(),
        }
    }

    /// A region of this rank's own, zeroed.
    pub(super) fn alloc(self: &Arc<Self>, bytes: Bytes) -> Result<Region, CommError> {
        self.zeroed_region(bytes, Counted::Own)
    }

    /// A region of this rank's own, zeroed or as this rank left it.
    pub(super) fn scratch(self: &Arc<Self>, bytes: Bytes) -> Result<Region, CommError> {
        Ok(self.own_region(bytes, Counted::Own)?.0)
    }

    /// A replica that no other rank holds, zeroed.
    pub(super) fn own_replica(self: &Arc<Self>, bytes: Bytes) -> Result<Region, CommError> {
        self.zeroed_region(bytes, Counted::Replica)
    }

    /// A region to pass other memory on through, not zeroed.
    pub(super) fn staging(self: &Arc<Self>, bytes: Bytes) -> Result<Region, CommError> {
        Ok(self.own_region(bytes, Counted::No)?.0)
    }

    fn zeroed_region(
        self: &Arc<Self>,
        bytes: Bytes,
        counted: Counted,
    ) -> Result<Region, CommError> {
        let (mut region, is_zero) = self.own_region(bytes, counted)?;
        if !is_zero {
            region.bytes_mut().fill(0);
        }
        Ok(region)
    }

    /// A region, and whether it is zero.
    fn own_region(
        self: &Arc<Self>,
        bytes: Bytes,
        counted: Counted,
    ) -> Result<(Region, bool), CommError> {
        if bytes.0 == 0 {
            return Ok((Region::heap(bytes), true));
        }
        let mut blocks = self.blocks();
        let kept = blocks.kept.iter().position(|range| Some(range.len()) == block_len(bytes));
        let range = match kept {
            Some(index) => blocks.kept.remove(index),
            None => {
                self.make_room(&mut blocks, bytes);
                self.take(&mut blocks, bytes)?
            }
        };
        let start = self.mapping.address(range.start + blocks.next_colour(bytes));
        drop(blocks);
        if let Some(count) = self.count(counted) {
            count.fetch_add(bytes.0, Relaxed);
        }
        let block = OwnBlock { section: Arc::clone(self), range, bytes, counted };
        // SAFETY: `block` keeps the mapping alive and the range out of the free list, which gave
        // it to nobody else; other ranks read of it only what is offered to them.
        let region = unsafe { Region::from_foreign(start, bytes, Box::new(block)) };
        Ok((region, kept.is_none()))
    }

    /// Sets memory aside for a replica with so many holders; what [`replica`](Self::replica)
    /// needs to know on every holder.
    pub(super) fn reserve_replica(
        &self,
        bytes: Bytes,
        holders: usize,
    ) -> Result<Reservation, CommError> {
        let mut blocks = self.blocks();
        let range = self.take(&mut blocks, bytes)?;
        let entries = &self.mapping.control().replicas;
        let Some(index) = entries.iter().position(|entry| entry.claim(holders)) else {
            blocks.free.give(range);
            let why = format!("{} replicas are alive, and no more are possible", entries.len());
            return Err(CommError::System { operation: "allocate a replica", why });
        };
        blocks.replicas.push((index, range.clone()));
        let colour = blocks.next_colour(bytes);
        Ok(Reservation { index, start: range.start, len: range.len(), colour })
    }

    /// One holder's region of a reserved replica; each holder makes it once.
    pub(super) fn replica(self: &Arc<Self>, reservation: Reservation, bytes: Bytes) -> Region {
        let Reservation { index, start, len, colour } = reservation;
        assert!(colour + bytes.0 <= len, "a replica of {bytes} in {len} bytes");
        self.replicas.fetch_add(bytes.0, Relaxed);
        let block =
            ReplicaBlock { section: Arc::clone(self), index, range: start..start + len, bytes };
        let start = self.mapping.address(start + colour);
        // SAFETY: `block` keeps the mapping alive, and the count of holders keeps the range out of
        // its owner's free list. Processes share it as `alloc_replica` says: each writes its own
        // shard only, and only while no rank reads.
        unsafe { Region::from_foreign(start, bytes, Box::new(block)) }
    }

    /// Clears the block that was kept longest if there are as many as may be, and more is needed.
    fn make_room(&self, blocks: &mut Blocks, bytes: Bytes) {
        if bytes.0 >= UNIT && blocks.kept.len() == KEPT_MAX {
            let longest = blocks.kept.remove(0);
            // What cannot be cleared is not used again.
            if self.clear(&longest) {
                blocks.free.give(longest);
            }
        }
    }

    fn take(&self, blocks: &mut Blocks, bytes: Bytes) -> Result<Range<usize>, CommError> {
        let returned = |(index, _): &mut (usize, Range<usize>)| self.holders(*index).reclaim();
        for (_, range) in blocks.replicas.extract_if(.., returned) {
            self.advise_huge_pages(&range, false); // another holder may have cleared it
            blocks.free.give(range);
        }
        let taken = block_len(bytes).and_then(|len| blocks.free.take(len, align(bytes)));
        let range = taken.ok_or_else(|| {
            let why = format!("{bytes} do not fit into what is left of this rank's addresses");
            CommError::System { operation: "allocate shared memory", why }
        })?;
        self.advise_huge_pages(&range, true);
        Ok(range)
    }

    fn advise_huge_pages(&self, range: &Range<usize>, wanted: bool) {
        if range.len() >= HUGE_FROM {
            self.mapping.advise_huge_pages(range, wanted);
        }
    }

    fn count(&self, counted: Counted) -> Option<&AtomicUsize> {
        match counted {
            Counted::Own => Some(&self.own),
            Counted::Replica => Some(&self.replicas),
            Counted::No => None,
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `range`, which nobody refers to any more; returns the one that was kept longest if
    /// there are too many.
    fn keep(&self, range: Range<usize>) -> Option<Range<usize>> {
        if !self.may_use_again() {
            return None;
        }
        let kept = &mut self.blocks().kept;
        kept.push(range);
        (kept.len() > KEPT_MAX).then(|| kept.remove(0))
    }

    /// Zeroes what nobody refers to any more; whether it may be used again.
    fn clear(&self, range: &Range<usize>) -> bool {
        if self.may_use_again() && range.len() < SMALL {
            self.mapping.zero(range.clone());
            return true;
        }
        self.advise_huge_pages(range, false);
        self.may_use_again() && self.mapping.clear(range.clone()).is_ok()
    }

    fn may_use_again(&self) -> bool {
        self.mapping.control().failure().is_none()
    }

    fn holders(&self, index: usize) -> &Holders {
        &self.mapping.control().replicas[index]
    }
}

impl Blocks {
    /// How far into its block a region of so many bytes starts.
    fn next_colour(&mut self, bytes: Bytes) -> usize {
        if bytes.0 < UNIT {
            return 0;
        }
        self.colour += 1;
        colour(self.colour)
    }
}

fn align(bytes: Bytes) -> usize {
    match bytes.0 {
        ..UNIT => REGION_ALIGN,
        UNIT..HUGE_FROM => PAGE,
        _ => HUGE_PAGE,
    }
}

fn block_len(bytes: Bytes) -> Option<usize> {
    match bytes.0 {
        ..UNIT => Some(bytes.0.next_multiple_of(REGION_ALIGN)),
        _ => bytes.0.checked_add(COLOURS_LEN)?.checked_next_multiple_of(UNIT),
    }
}

/// Where a replica lies, as its holders tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    index: usize,
    start: usize,
    len: usize,
    colour: usize,
}

impl Reservation {
    pub(super) const BYTES: usize = 32;

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        bytemuck::cast([self.index, self.start, self.len, self.colour].map(|word| word as u64))
    }

    /// What [`to_bytes`](Self::to_bytes) wrote.
    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let words: [u64; 4] = bytemuck::cast(bytes);
        let [index, start, len, colour] = words.map(|word| word as usize);
        Self { index, start, len, colour }
    }
}

/// Gives a block of this rank's own back when it is dropped.
struct OwnBlock {
    section: Arc<Section>,
    range: Range<usize>,
    bytes: Bytes,
    counted: Counted,
}

/// As what a block of this rank's own counts in [`Section::allocated`].
#[derive(Clone, Copy)]
enum Counted {
    Own,
    Replica,
    No,
}

impl Drop for OwnBlock {
    fn drop(&mut self) {
        let section = &self.section;
        if let Some(count) = section.count(self.counted) {
            count.fetch_sub(self.bytes.0, Relaxed);
        }
        let mut dropped = Some(self.range.clone());
        if (UNIT..=KEPT_BYTES_MAX).contains(&self.range.len()) {
            dropped = section.keep(self.range.clone());
        }
        // What cannot be cleared is not used again.
        if let Some(range) = dropped.filter(|range| section.clear(range)) {
            section.blocks().free.give(range);
        }
    }
}

/// Gives up one holding of a replica when it is dropped.
struct ReplicaBlock {
    section: Arc<Section>,
    index: usize,
    range: Range<usize>,
    bytes: Bytes,
}

impl Drop for ReplicaBlock {
    fn drop(&mut self) {
        let section = &self.section;
        section.replicas.fetch_sub(self.bytes.0, Relaxed);
        section.holders(self.index).release(|| section.clear(&self.range));
    }
}

#[cfg(test)]
mod tests {
    use oxizero_core::WorldSize;

    use super::super::memory::Offers;
    use super::*;
    use crate::transport::{Failure, Peers};

    #[test]
    fn what_is_dropped_after_a_failure_stays_as_it_is_for_those_who_still_read() {
        let world_size = WorldSize::ONE;
        let mapping = Mapping::new(super::super::memory::create(world_size).unwrap(), world_size);
        let mapping = Arc::new(mapping.unwrap());
        let section = Section::new(Arc::clone(&mapping), Rank(0));
        let place = |region: &Region| mapping.offset(region.start()).unwrap();
        let bytes = Bytes(1 << 20);

        let before = section.alloc(bytes).unwrap();
        let first = place(&before);
        drop(before);
        let mut own = section.alloc(bytes).unwrap();
        assert!(place(&own).abs_diff(first) <= COLOURS_LEN);
        let reservation = section.reserve_replica(bytes, 1).unwrap();
        let mut replica = section.replica(reservation, bytes);
        own.bytes_mut().fill(7);
        replica.bytes_mut().fill(7);
        let places = [place(&own), place(&replica)];

        mapping.control().fail(Failure::Dead(Rank(1)));
        drop((own, replica));
        let new = section.alloc(bytes).unwrap();
        let offers = Offers::new(&mapping, places.map(|start| start..start + bytes.0).to_vec());
        for (rank, start) in places.into_iter().enumerate() {
            assert!(offers.bytes(Rank(rank), 0..bytes.0).iter().all(|byte| *byte == 7));
            assert_ne!(place(&new), start);
        }
        let allocated = section.allocated();
        assert_eq!((allocated.own, allocated.replicas), (bytes, Bytes(0)));
    }

    #[test]
    fn large_blocks_start_on_huge_pages_and_small_ones_do_not_take_what_is_before_them() {
        let world_size = WorldSize::ONE;
        let mapping = Mapping::new(super::super::memory::create(world_size).unwrap(), world_size);
        let mapping = Arc::new(mapping.unwrap());
        let section = Section::new(Arc::clone(&mapping), Rank(0));
        let place = |region: &Region| mapping.offset(region.start()).unwrap();
        for round in 0..3 {
            let small = section.alloc(Bytes(64)).unwrap();
            let mut large = section.alloc(Bytes(HUGE_FROM + 1)).unwrap();
            let next = section.alloc(Bytes(64)).unwrap();
            assert!(place(&large) % HUGE_PAGE <= COLOURS_LEN, "round {round}");
            assert!(place(&next) < place(&large), "round {round}");
            assert!(large.bytes().iter().all(|byte| *byte == 0), "round {round}");
            large.bytes_mut().fill(7);
            assert!(section.allocated().resident.0 >= HUGE_FROM);
            drop((small, next, large));
        }
    }
}
