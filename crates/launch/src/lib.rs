//! Starts the ranks of a program as processes of this machine, and ends them together.
//!
//! `oxizero launch` for any program is [`launch`]; [`Ranks`] is what it has in common with commands
//! that start ranks of their own. Knows processes and what they write; nothing of training.

mod arguments;
mod guard;
mod launch;
mod output;
mod ranks;
#[expect(unsafe_code, reason = "what a child does before it becomes another program")]
mod tether;

pub use launch::{command, launch};
pub use ranks::{Ended, Order, Ranks};
