//! Any burn module as a segment of the engine.
//!
//! Parameters are views of the engine's memory, bound anew for every run and gone with it;
//! gradients leave through burn's public API, a segment at a time. Knows nothing about ranks,
//! stages or buckets. Relies on three things that burn does not document, each held by a test:
//! `backward` on a non-scalar starts from ones, a lazy parameter stays so when mapped, and shared
//! bytes are copied before they are written to.

mod block;
mod error;
mod initial;
mod layer;
mod lend;
mod model;
mod template;

pub use block::{Block, Tape};
pub use error::BurnError;
pub use initial::initial_values;
pub use layer::{Context, Layer, Source};
pub use model::{Model, ModelBuilder, decay_matrices};
