//! Where bytes live and what is computed on them: regions, typed buffers, and kernels, the host's
//! own and those of devices behind a trait.
//!
//! This crate knows no ranks, parameters or stages.

mod buffer;
mod colour;
mod device;
pub mod kernels;
#[expect(unsafe_code, reason = "owned raw storage, behind a safe face")]
mod region;
#[expect(unsafe_code, reason = "instructions that plain Rust has no words for")]
pub mod simd;
mod storage;

pub use buffer::{Buffer, View, ViewMut};
pub use colour::{COLOURS_LEN, colour};
pub use device::{Device, DeviceMemory, DeviceView, DeviceViewMut};
pub use region::{Loan, REGION_ALIGN, Region};
pub use storage::Storage;
