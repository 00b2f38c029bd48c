//! The shared memory: one memfd, mapped once by every rank.
//!
//! It has no name, and its pages go when the last process that maps it ends, however it ends.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use oxizero_core::{Rank, WorldSize};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::control::Control;
use crate::CommError;
use crate::transport::Peers;

/// Addresses for one rank's allocations. Only what is written to takes memory.
const SECTION: usize = 1 << 40;
/// Where the first section starts: the control pages end before it.
const SECTIONS: usize = (size_of::<Control>() + PAGE).next_multiple_of(1 << 21);
pub(super) const PAGE: usize = 1 << 12;

/// This process's mapping of the shared memory.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
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
        rustix::fs::ftruncate(&file, len(world_size) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    };
    make().map_err(|errno| system("create shared memory", errno))
}

/// Refuses memory that could shrink under a reader, or that has another size.
pub(super) fn verify(file: &OwnedFd, world_size: WorldSize) -> Result<(), String> {
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|errno| errno.to_string())?;
    if !seals.contains(SEALS) {
        return Err(format!("the shared memory lacks seals: it has {seals:?}"));
    }
    let size = rustix::fs::fstat(file).map_err(|errno| errno.to_string())?.st_size;
    if usize::try_from(size) != Ok(len(world_size)) {
        return Err(format!("the shared memory has {size} bytes; {} expected", len(world_size)));
    }
    Ok(())
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn len(world_size: WorldSize) -> usize {
    SECTIONS + world_size.get() * SECTION
}

/// The addresses of `rank`'s own allocations.
pub(super) fn section(rank: Rank) -> Range<usize> {
    let start = SECTIONS + rank.0 * SECTION;
    start..start + SECTION
}

impl Mapping {
    /// Maps what [`create`] made, or [`verify`] accepted.
    pub(super) fn new(file: OwnedFd, world_size: WorldSize) -> Result<Self, CommError> {
        let len = len(world_size);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an unused address.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) };
        let start = start.map_err(|errno| system("map shared memory", errno))?;
        // SAFETY: the range was mapped just now; whether it is dumped changes no byte of it.
        let _ = unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontDump) };
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len, file })
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

    /// Where `address` lies in the shared memory, if it does.
    pub(super) fn offset(&self, address: NonNull<u8>) -> Option<usize> {
        let offset = address.addr().get().checked_sub(self.start.addr().get())?;
        (offset < self.len).then_some(offset)
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

/// What the members of a group offer during one operation.
pub(super) struct Offers<'a> {
    mapping: &'a Mapping,
    ranges: Vec<Range<usize>>,
}

impl<'a> Offers<'a> {
    /// `ranges` were posted for the operation that is running, by members who write to no byte of
    /// them that another member reads until all have read.
    pub(super) fn new(mapping: &'a Mapping, ranges: Vec<Range<usize>>) -> Self {
        let fits = |range: &Range<usize>| range.is_empty() || range.end <= mapping.len;
        assert!(ranges.iter().all(fits), "offers {ranges:?} lie outside of the mapping");
        Self { mapping, ranges }
    }
}

impl Peers for Offers<'_> {
    fn bytes(&self, rank: Rank, range: Range<usize>) -> &[u8] {
        let offer = &self.ranges[rank.0];
        assert!(range.end <= offer.len(), "{range:?} of {} offered bytes", offer.len());
        let start = self.mapping.address(offer.start + range.start);
        // SAFETY: in bounds by the assertions here and in `new`, and initialised, as all of a
        // memfd is. Nobody writes to it meanwhile: its owner lent it to the operation, which ends
        // for the owner when this process, too, has said that it has read; `Transport::meet`
        // keeps that order, and the collectives keep each rank's writes off what others read.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) }
    }

    fn lies_at(&self, rank: Rank, address: usize) -> bool {
        let offer = &self.ranges[rank.0];
        !offer.is_empty() && self.mapping.address(offer.start).addr().get() == address
    }
}

pub(super) fn system(operation: &'static str, errno: rustix::io::Errno) -> CommError {
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
        let two = WorldSize::new(2).unwrap();
        assert!(verify(&file, two).unwrap_err().contains("bytes"));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("unsealed", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, len(WorldSize::ONE) as u64).unwrap();
        assert!(verify(&unsealed, WorldSize::ONE).unwrap_err().contains("seals"));
    }

    #[test]
    fn two_mappings_see_one_memory() {
        let (one, other) = pair();
        one.control().depart(Rank(3));
        assert!(other.control().has_departed(Rank(3)));
        assert_eq!(one.offset(other.address(0)), None);
        assert_eq!(one.offset(one.address(77)), Some(77));
    }
}
