//! What a command answers to the user's first interrupt; the second ends it, whatever it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use oxizero_launch::Order;
use rustix::process::Signal;

use crate::error::{CliError, say_after_keys};

/// What its ranks are told.
pub(super) struct Answer<M> {
    interrupt: Arc<AtomicBool>,
    /// Whether ranks that hear of it end by themselves, and leave something.
    may_go_on: M,
    told: Option<Order>,
}

impl<M: FnMut() -> bool> Answer<M> {
    /// None yet.
    pub(super) fn new(interrupt: Arc<AtomicBool>, may_go_on: M) -> Self {
        Self { interrupt, may_go_on, told: None }
    }

    /// What is to be told now: once, after the interrupt.
    pub(super) fn order(&mut self) -> Option<Order> {
        if self.told.is_some() || !self.interrupt.load(Relaxed) {
            return None;
        }
        self.told = Some(if (self.may_go_on)() {
            say_after_keys(
                "interrupted: the run ends with a checkpoint after this step; interrupt it again \
                 to end it at once",
            );
            Order::Hear(Signal::INT)
        } else {
            Order::End(Signal::INT)
        });
        self.told
    }

    /// The error of ranks that were told to end.
    pub(super) fn check(&self) -> Result<(), CliError> {
        match self.told {
            Some(Order::End(_)) => Err(CliError::interrupted()),
            _ => Ok(()),
        }
    }
}
