//! Where bytes live and what is computed on them: regions, typed buffers, and the host's kernels.
//!
//! This crate knows no ranks, parameters or stages.

mod buffer;
pub mod kernels;
#[expect(unsafe_code, reason = "owned raw storage, behind a safe face")]
mod region;

pub use buffer::{Buffer, View, ViewMut};
pub use region::{Loan, REGION_ALIGN, Region};
