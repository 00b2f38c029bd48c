//! The shared memory: one memfd, mapped once by every rank.
//!
//! It has no name, and its pages go when the last process that maps it ends, however it ends.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use oxizero_core::{Bytes, Rank, WorldSize};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::control::Control;
use crate::CommError;
use crate::transport::Peers;

/// Addresses for one rank's allocations, at least. Only what is written to takes memory.
const SECTION_MIN: usize = 4 << 30;
/// Addresses for all ranks' allocations, at most: a process has twice as many.
const SECTIONS_LEN_MAX: usize = 1 << 46;
/// Where the first section starts: the control pages end before it.
const SECTIONS: usize = (size_of::<Control>() + PAGE).next_multiple_of(1 << 21);
pub(super) const PAGE: usize = 1 << 12;
/// A huge page.
pub(super) const HUGE_PAGE: usize = 1 << 21;
/// The unit of `st_blocks`, whatever the file's blocks are.
const STAT_BLOCK: usize = 512;

/// This process's mapping of the shared memory.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    world_size: WorldSize,
    file: OwnedFd,
}

// SAFETY: the mapping is plain memory that every thread may use; who may use which part of it is
// for `control` (atomics) and `Section` (exclusive ranges) to keep.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A new shared memory for so many ranks, of fixed size from here on.
pub(super) fn create(world_size: WorldSize) -> Result<OwnedFd, CommError> {
    let make = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("oxizero", flags)?;
        let len = SECTIONS + world_size.get() * section_len(world_size);
        rustix::fs::ftruncate(&file, len as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    };
    make().map_err(|errno| system("create shared memory", errno))
}

/// Refuses memory that could shrink under a reader, or whose size [`create`] would not choose.
pub(super) fn verify(file: &OwnedFd, world_size: WorldSize) -> Result<(), String> {
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|errno| errno.to_string())?;
    if !seals.contains(SEALS) {
        return Err(format!("the shared memory lacks seals: it has {seals:?}"));
    }
    let len = len(file).map_err(|errno| errno.to_string())?;
    let sections = len.checked_sub(SECTIONS).filter(|sections| *sections > 0);
    if sections.is_none_or(|sections| !sections.is_multiple_of(world_size.get() * PAGE)) {
        return Err(format!("the shared memory's {len} bytes are not for {world_size} ranks"));
    }
    Ok(())
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn len(file: &OwnedFd) -> rustix::io::Result<usize> {
    usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(|_| Errno::OVERFLOW)
}

/// Addresses for one rank: twice the machine's memory and more, so that gaps do no harm, but not
/// many times, since addresses may be limited. Rank 0 decides, and the others go by the file's
/// size.
fn section_len(world_size: WorldSize) -> usize {
    let machine = rustix::system::sysinfo();
    let memory = u64::from(machine.mem_unit) * (machine.totalram + machine.totalswap);
    let enough = usize::try_from(2 * memory).ok().and_then(usize::checked_next_power_of_two);
    let most = (SECTIONS_LEN_MAX / world_size.get()).next_multiple_of(PAGE);
    enough.unwrap_or(most).clamp(SECTION_MIN, most)
}

impl Mapping {
    /// Maps what [`create`] made, or [`verify`] accepted.
    pub(super) fn new(file: OwnedFd, world_size: WorldSize) -> Result<Self, CommError> {
        let len = len(&file).map_err(|errno| system("measure shared memory", errno))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an unused address.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) };
        let start = start.map_err(|errno| not_mapped(errno, len, world_size))?;
        // SAFETY: the range was mapped just now; whether it is dumped changes no byte of it.
        let _ = unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontDump) };
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len, world_size, file })
    }

    /// How many ranks map this memory.
    pub(super) fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// The addresses of `rank`'s own allocations.
    pub(super) fn section(&self, rank: Rank) -> Range<usize> {
        let len = (self.len - SECTIONS) / self.world_size.get();
        let start = SECTIONS + rank.0 * len;
        start..start + len
    }

    /// The control pages.
    pub(super) fn control(&self) -> &Control {
        // SAFETY: a `Control` fits before the sections, page alignment suffices for it, it is made
        // of atomics for which all bits are valid, and nobody makes other references to it.
        unsafe { self.start.cast().as_ref() }
    }

    /// The address of what lies at `offset`.
    pub(super) fn address(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "{offset} of {} mapped bytes", self.len);
        // SAFETY: in bounds of the mapping or at its end, by the assertion.
        unsafe { self.start.add(offset) }
    }

    /// The bytes of `range`.
    ///
    /// # Safety
    ///
    /// Nobody writes to them for as long as they are borrowed.
    unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        let end = range.start.checked_add(range.len()).filter(|end| *end <= self.len);
        assert!(end.is_some(), "an offer of {range:?} lies outside of the mapping");
        let start = self.address(range.start);
        // SAFETY: in bounds by the assertion, and initialised, as all of a memfd is; the caller
        // promises that nobody writes there.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) }
    }

    /// Where `address` lies in the shared memory, if it does.
    pub(super) fn offset(&self, address: NonNull<u8>) -> Option<usize> {
        let offset = address.addr().get().checked_sub(self.start.addr().get())?;
        (offset < self.len).then_some(offset)
    }

    /// What the system holds for the memory, all ranks' together.
    pub(super) fn resident(&self) -> Bytes {
        let counted = rustix::fs::fstat(&self.file).expect("an open memfd can be asked about");
        Bytes(usize::try_from(counted.st_blocks).unwrap_or(0) * STAT_BLOCK)
    }

    /// Zeroes `range`, and keeps its pages: for small ranges, to take new ones costs more. Nobody
    /// may refer to it.
    pub(super) fn zero(&self, range: Range<usize>) {
        assert!(range.end <= self.len, "{range:?} of {} mapped bytes", self.len);
        // SAFETY: in bounds by the assertion; `Section`, which alone calls this, does so when the
        // last region in the range is gone, and before the range is free for another.
        unsafe { self.address(range.start).write_bytes(0, range.len()) }
    }

    /// Asks for huge pages in `range`, which is one block's, or takes that back before others have
    /// the range. Only whole ones within it are asked for, so that no page belongs to two blocks,
    /// or holds more than is allocated. Many systems give none; see
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
    pub(super) fn advise_huge_pages(&self, range: &Range<usize>, wanted: bool) {
        let start = range.start.next_multiple_of(HUGE_PAGE);
        let end = range.end - range.end % HUGE_PAGE;
        if start >= end {
            return;
        }
        let advice = if wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        let address = self.address(start).as_ptr().cast();
        // SAFETY: in bounds of the mapping; which pages it gets changes no byte of it.
        let _unheeded = unsafe { rustix::mm::madvise(address, end - start, advice) };
    }

    /// Zeroes `range`, and gives its whole pages back to the system. Nobody may refer to it.
    pub(super) fn clear(&self, range: Range<usize>) -> rustix::io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, range.start as u64, range.len() as u64)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this; every region and view of it holds the mapping alive.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(result.is_ok(), "{result:?}");
    }
}

/// A member that offers several pieces offers a list of where they lie, so many bytes for each.
pub(super) const PIECE_BYTES: usize = 16;

pub(super) fn piece_to_bytes(place: Range<usize>) -> [u8; PIECE_BYTES] {
    bytemuck::cast([place.start as u64, place.len() as u64])
}

/// What [`piece_to_bytes`] wrote.
fn piece_from_bytes(bytes: [u8; PIECE_BYTES]) -> Range<usize> {
    let words: [u64; 2] = bytemuck::cast(bytes);
    let [start, len] = words.map(|word| word as usize);
    start..start.saturating_add(len)
}

/// What the members of a group offer during one operation.
pub(super) struct Offers<'a> {
    mapping: &'a Mapping,
    ranges: Vec<Range<usize>>,
}

impl<'a> Offers<'a> {
    /// `ranges` were posted for the operation that is running, by members who write to no byte of
    /// them, nor of the pieces that are listed there, that another member reads or writes until
    /// all have read.
    pub(super) fn new(mapping: &'a Mapping, ranges: Vec<Range<usize>>) -> Self {
        Self { mapping, ranges }
    }

    /// Where piece `index` of `rank` lies.
    fn entry(&self, rank: Rank, index: usize) -> Range<usize> {
        let entry = index * PIECE_BYTES..(index + 1) * PIECE_BYTES;
        piece_from_bytes(self.bytes(rank, entry).try_into().expect("the length of an entry"))
    }

    fn slice(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: nobody writes to it meanwhile: its owner lent it to the operation, which
        // completes for the owner when this process, too, has said that it has read;
        // `ShmTransport::meet` keeps that order, and the collectives keep each rank's writes off
        // what others read. Where the operation fails for the owner once others may read, the
        // world's failure is set before the owner has its memory back, and from then on `Section`
        // neither clears nor hands out again what is dropped. (Where ranks disagree on the
        // operation, all of them find that before they read.)
        unsafe { self.mapping.slice(range) }
    }
}

/// Pieces that the members of a group lend each other beyond one operation.
pub(super) struct LentPieces {
    mapping: Arc<Mapping>,
    /// Of the rank that reads there are none.
    places: Vec<Vec<Range<usize>>>,
}

impl LentPieces {
    /// `places`, by rank, were posted by members who write to no byte there until all members have
    /// said that they read no more, by dropping this.
    pub(super) fn new(mapping: Arc<Mapping>, places: Vec<Vec<Range<usize>>>) -> Self {
        Self { mapping, places }
    }

    pub(super) fn piece(&self, rank: Rank, index: usize) -> &[u8] {
        let place = self.places[rank.0][index].clone();
        // SAFETY: nobody writes there while `self` lives: the buffer of the owner belongs to the
        // owner's `PeerViews`, which gives it back only when all members have met again, for which
        // this rank first gives up its own `PeerViews`, and `self` with it. An owner that drops
        // them before, or whose meeting fails, makes a failure the world's first, and from then on
        // `Section` neither clears nor hands out again what is dropped.
        unsafe { self.mapping.slice(place) }
    }
}

impl Peers for Offers<'_> {
    fn piece(&self, rank: Rank, index: usize) -> &[u8] {
        self.slice(self.entry(rank, index))
    }

    fn place(&self, rank: Rank, index: usize) -> Option<Range<usize>> {
        Some(self.entry(rank, index))
    }

    fn bytes(&self, rank: Rank, range: Range<usize>) -> &[u8] {
        let offer = &self.ranges[rank.0];
        assert!(range.end <= offer.len(), "{range:?} of {} offered bytes", offer.len());
        self.slice(offer.start + range.start..offer.start + range.end)
    }

    fn write(&self, rank: Rank, range: Range<usize>, bytes: &[u8]) {
        let offer = &self.ranges[rank.0];
        assert!(range.len() == bytes.len() && range.end <= offer.len(), "{range:?} of {offer:?}");
        let end = offer.start + range.end;
        assert!(end <= self.mapping.len, "an offer of {offer:?} lies outside of the mapping");
        let start = self.mapping.address(offer.start + range.start);
        // SAFETY: in bounds by the assertions, and nobody else reads or writes there meanwhile: the
        // owner lent it to the operation, in which this member alone has to do with these bytes.
        // When the owner may have its memory back, or has lost it, is as in `slice`.
        unsafe { start.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    fn lies_at(&self, rank: Rank, address: usize) -> bool {
        let offer = &self.ranges[rank.0];
        !offer.is_empty() && self.mapping.address(offer.start).addr().get() == address
    }
}

fn not_mapped(errno: Errno, len: usize, world_size: WorldSize) -> CommError {
    let advice = match errno {
        Errno::NOMEM => {
            "; these are addresses only, and the limit of addresses is lower: raise it (`ulimit -v \
             unlimited`), or start fewer ranks"
        }
        _ => "",
    };
    let why = format!("{} for {world_size} ranks: {errno}{advice}", Bytes(len));
    CommError::System { operation: "map shared memory", why }
}

pub(super) fn system(operation: &'static str, errno: Errno) -> CommError {
    CommError::System { operation, why: errno.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Mapping, Mapping) {
        let file = create(WorldSize::ONE).unwrap();
        verify(&file, WorldSize::ONE).unwrap();
        let again = file.try_clone().unwrap();
        let map = |file| Mapping::new(file, WorldSize::ONE).unwrap();
        (map(file), map(again))
    }

    #[test]
    fn the_size_is_sealed_and_checked() {
        let file = create(WorldSize::ONE).unwrap();
        assert!(rustix::fs::ftruncate(&file, 1).is_err());
        assert!(rustix::fs::ftruncate(&file, 1 << 50).is_err());
        assert!(verify(&file, WorldSize::new(3).unwrap()).unwrap_err().contains("for 3 ranks"));
        let unsealed = unsealed(len(&file).unwrap());
        assert!(verify(&unsealed, WorldSize::ONE).unwrap_err().contains("seals"));
    }

    fn unsealed(len: usize) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("unsealed", flags).unwrap();
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        file
    }

    #[test]
    fn sections_follow_each_other_and_fill_the_memory() {
        for size in [1, 2, 3, 64] {
            let world_size = WorldSize::new(size).unwrap();
            let mapping = Mapping::new(create(world_size).unwrap(), world_size).unwrap();
            let sections: Vec<_> = world_size.ranks().map(|rank| mapping.section(rank)).collect();
            assert!(sections.iter().all(|section| section.len() >= SECTION_MIN));
            assert!(sections.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((sections[0].start, sections[size - 1].end), (SECTIONS, mapping.len));
        }
    }

    #[test]
    fn a_limit_of_addresses_is_named() {
        let beyond_any = unsealed(1 << 57);
        let error = Mapping::new(beyond_any, WorldSize::ONE).err().unwrap().to_string();
        assert!(error.contains("ulimit -v") && error.contains("map shared memory"), "{error}");
    }

    #[test]
    fn two_mappings_see_one_memory() {
        let (one, other) = pair();
        one.control().depart(Rank(3));
        assert!(other.control().has_departed(Rank(3)));
        assert_eq!(one.offset(other.address(0)), None);
        assert_eq!(one.offset(one.address(77)), Some(77));
        assert_eq!(one.resident(), other.resident());
    }
}
