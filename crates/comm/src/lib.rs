//! Collectives over a process group: the trait, and the back ends for ranks on one machine.
//!
//! Every collective is written once, over a small internal trait that says how ranks meet; the
//! back ends implement that trait and nothing else. [`library`] does the same for libraries that
//! bring collectives of their own. This crate knows no buckets, parameters or
//! stages of training.

mod checks;
mod communicator;
mod error;
mod failure;
mod group;
mod handle;
pub mod library;
mod numbers;
mod one_by_one;
mod operation;
mod overlapped;
mod peer_views;
mod queue;
mod redistribute;
pub mod shm;
mod streams;
pub mod threads;
mod transport;
mod waits;

pub use communicator::{Allocated, Communicator, OwnShard, ReduceScatter, ReduceTarget, Traffic};
pub use error::CommError;
pub use handle::Handle;
pub use overlapped::{Beside, Computes, overlap, overlapped};
pub use peer_views::PeerViews;
pub use queue::{Queue, issue};
pub use redistribute::redistribute;
pub use streams::{Mark, Streams};

/// How long a rank waits for another by default. Long, since rank 0 may evaluate alone.
pub const DEFAULT_DEADLINE: std::time::Duration = std::time::Duration::from_secs(600);
