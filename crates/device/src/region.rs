//! Owned storage: a run of bytes with one owner, wherever it lies.
//!
//! A [`Region`] is heap memory, or memory that somebody else mapped (shared between processes, or
//! a file), or a device's. Whoever holds the region may read it, and who holds it exclusively may
//! write it; a device's through the device alone.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oxizero_core::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::DeviceMemory;
use crate::colour::colour;

/// Every region starts on a multiple of so many bytes: a cache line, and an AVX-512 vector.
pub const REGION_ALIGN: usize = 64;

/// Owned, 64-byte aligned storage; zeroed when it is made.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    Heap,
    /// The system, which maps pages for this region alone.
    Mapped(Pages),
    /// Keeps foreign memory alive, and takes it back when dropped.
    Foreign(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>),
    /// The memory is another region's, which loans keep alive too.
    Lent(Arc<Region>),
    /// The memory is not the host's.
    Device(Box<dyn DeviceMemory>),
}

/// Keeps a region's memory where it is, also after the region itself is gone: what a foreign
/// framework holds while its tensors lie there. It gives the address and no access: whoever reads
/// or writes there promises not to do so while the region's owner does.
#[derive(Clone, Debug)]
pub struct Loan(Arc<Region>);

impl Loan {
    /// Where the memory starts; nowhere if it is a device's.
    pub fn start(&self) -> NonNull<u8> {
        self.0.start
    }

    /// The device's memory, where it is one's.
    pub fn device_memory(&self) -> Option<&dyn DeviceMemory> {
        self.0.device_memory()
    }

    /// The memory's size.
    pub fn len(&self) -> Bytes {
        self.0.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

// SAFETY: a region owns its bytes as a Vec<u8> does; `from_foreign`'s caller promises the same of
// foreign memory, and the foreign owner is Send and Sync by its bound.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` only gives `&[u8]`.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory from the heap.
    pub fn heap(bytes: Bytes) -> Self {
        let owner = Owner::Heap;
        if bytes.0 == 0 {
            return Self { start: dangling(), len: 0, owner };
        }
        let layout = heap_layout(bytes.0);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self { start, len: bytes.0, owner }
    }

    /// Zeroed memory that the system maps for this region alone, and takes back with it: for what
    /// is large and stays. Allocators round large sizes up, by an eighth and more, and keep for
    /// later what is freed.
    pub fn mapped(bytes: Bytes) -> Self {
        if bytes.0 == 0 {
            return Self::heap(bytes);
        }
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let colour = colour(NUMBER.fetch_add(1, Ordering::Relaxed));
        let len = colour + bytes.0;
        let pages = map(len).unwrap_or_else(|| handle_alloc_error(heap_layout(len)));
        // SAFETY: in bounds of what was mapped.
        let start = unsafe { pages.start.add(colour) };
        Self { start, len: bytes.0, owner: Owner::Mapped(pages) }
    }

    /// Memory that `owner` keeps alive, and takes back when it is dropped.
    ///
    /// # Safety
    ///
    /// For as long as `owner` lives, `bytes` bytes from `start` are readable and writable, and
    /// nobody else in this process refers to them but through this region. Other processes may
    /// write to them only while this process cannot tell: between the two halves of a collective.
    ///
    /// # Panics
    ///
    /// If `start` is not a multiple of [`REGION_ALIGN`].
    pub unsafe fn from_foreign(
        start: NonNull<u8>,
        bytes: Bytes,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(start.addr().get().is_multiple_of(REGION_ALIGN), "a region at {start:p}");
        Self { start, len: bytes.0, owner: Owner::Foreign(owner) }
    }

    /// Memory on a device.
    pub fn on_device(memory: Box<dyn DeviceMemory>) -> Self {
        Self { start: dangling(), len: memory.bytes().0, owner: Owner::Device(memory) }
    }

    /// The device's memory, where it is one's; then the host cannot address the bytes.
    pub fn device_memory(&self) -> Option<&dyn DeviceMemory> {
        match &self.owner {
            Owner::Device(memory) => Some(&**memory),
            Owner::Lent(region) => region.device_memory(),
            Owner::Heap | Owner::Mapped(_) | Owner::Foreign(_) => None,
        }
    }

    /// Whether it is a device's.
    pub fn is_on_device(&self) -> bool {
        self.device_memory().is_some()
    }

    /// Keeps the memory where it is for as long as the loan, or a clone of it, lives.
    pub fn lend(&mut self) -> Loan {
        if let Owner::Lent(memory) = &self.owner {
            return Loan(Arc::clone(memory));
        }
        let (start, len) = (self.start, self.len);
        let empty = Self { start: dangling(), len: 0, owner: Owner::Heap };
        let memory = Arc::new(std::mem::replace(self, empty));
        *self = Self { start, len, owner: Owner::Lent(Arc::clone(&memory)) };
        Loan(memory)
    }

    /// Whether the memory was lent, and a borrower may have written there.
    pub fn is_lent(&self) -> bool {
        matches!(self.owner, Owner::Lent(_))
    }

    /// The region's size.
    pub fn len(&self) -> Bytes {
        Bytes(self.len)
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the region starts, for telling which mapping it came from; nowhere if it lies on a
    /// device.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// All bytes.
    ///
    /// # Panics
    ///
    /// If they lie on a device.
    pub fn bytes(&self) -> &[u8] {
        self.assert_host();
        // SAFETY: the region owns `len` initialised bytes of the host from `start` (see the
        // constructors, and the assertion).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes of `range`, for writing. Only these are borrowed from memory, so that ranks which
    /// share a replica may each write their own range of it.
    ///
    /// # Panics
    ///
    /// If the range ends after the region, or the region lies on a device.
    pub fn range_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.assert_host();
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the host's and in bounds by the assertions; exclusive, as `self` is borrowed so.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// All bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.range_mut(0..self.len)
    }

    fn assert_host(&self) {
        assert!(!self.is_on_device(), "{self:?} is read or written by the host");
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: `heap` allocated this with the same layout, and nobody else frees it.
            Owner::Heap if self.len > 0 => unsafe {
                dealloc(self.start.as_ptr(), heap_layout(self.len));
            },
            Owner::Mapped(Pages { start, len }) => {
                // SAFETY: `mapped` mapped exactly this, and nobody refers to it any more.
                let result = unsafe { munmap(start.as_ptr().cast(), len) };
                debug_assert!(result.is_ok(), "{result:?}");
            }
            Owner::Heap | Owner::Foreign(_) | Owner::Lent(_) | Owner::Device(_) => {}
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Heap => "heap",
            Owner::Mapped(_) => "mapped",
            Owner::Foreign(_) => "foreign",
            Owner::Lent(_) => "lent",
            Owner::Device(_) => "device",
        };
        write!(f, "Region({owner}, {})", self.len())
    }
}

/// What the system mapped.
#[derive(Clone, Copy)]
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

/// Zeroed pages; `None` if the system gives none. They are large ones where it likes and they fit,
/// for a page fault costs more than zeroing what it brings.
fn map(len: usize) -> Option<Pages> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
    let start = start.ok()?;
    // SAFETY: the range was mapped just now; which pages it gets changes no byte of it.
    let _unheeded = unsafe { madvise(start, len, Advice::LinuxHugepage) };
    NonNull::new(start.cast()).map(|start| Pages { start, len })
}

fn heap_layout(len: usize) -> Layout {
    Layout::from_size_align(len, REGION_ALIGN).expect("a region is smaller than isize::MAX")
}

fn dangling() -> NonNull<u8> {
    NonNull::without_provenance(REGION_ALIGN.try_into().expect("the alignment is not zero"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_zeroed_and_writable() {
        let lens = [0, 1, 63, 64, 65, 4097, (5 << 20) + 1];
        for (len, make) in lens
            .into_iter()
            .flat_map(|len| [(len, Region::heap as fn(_) -> _), (len, Region::mapped)])
        {
            let mut region: Region = make(Bytes(len));
            assert_eq!(region.len(), Bytes(len));
            assert_eq!(region.start().addr().get() % REGION_ALIGN, 0);
            assert!(region.bytes().iter().all(|byte| *byte == 0));
            region.bytes_mut().fill(7);
            assert_eq!(region.bytes(), vec![7; len]);
        }
    }

    #[test]
    fn a_foreign_owner_is_dropped_with_its_region() {
        let owner = Arc::new(());
        let mut memory = Region::heap(Bytes(128));
        let start = NonNull::new(memory.bytes_mut().as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives `region`, and is not used meanwhile.
        let region = unsafe { Region::from_foreign(start, Bytes(64), Box::new(owner.clone())) };
        assert_eq!(region.bytes().len(), 64);
        drop(region);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn lent_memory_stays_where_it_is_until_the_last_loan_ends() {
        let owner = Arc::new(());
        let mut memory = Region::heap(Bytes(128));
        let start = NonNull::new(memory.bytes_mut().as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives `region`, and is not used meanwhile.
        let mut region = unsafe { Region::from_foreign(start, Bytes(64), Box::new(owner.clone())) };
        region.bytes_mut().fill(3);
        let (first, second) = (region.lend(), region.lend());
        assert_eq!((first.start(), second.start(), region.start()), (start, start, start));
        assert_eq!((first.len(), region.bytes()), (Bytes(64), [3; 64].as_slice()));
        drop((region, first));
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(second);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
