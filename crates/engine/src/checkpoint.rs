//! An engine's state on disk, to be gone on from in any world.
//!
//! What is stored are whole tensors by name: master weights and optimizer states of what is
//! trained, model weights of what is frozen (those of others are rounded master weights), each
//! element once. A rank writes the elements of its shard of each bucket, whatever the stage, and
//! reads those that the stage has it hold. Which elements these are, the buckets' layouts say;
//! where they lie in tensors of which ranks hold parts, the mesh does.

mod background;
mod load;
mod save;
mod stored;
#[cfg(test)]
mod tests;

pub(crate) use background::InFlight;
pub use load::{LoadOptions, Loaded, Names, What};
pub use save::{SaveOptions, StoredBuffer};
