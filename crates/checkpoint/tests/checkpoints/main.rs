//! Checkpoints as they are written and read, and as nobody wrote them.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod exported;
mod hostile;
mod mutated;
mod round_trip;
mod sample;
mod saves;
