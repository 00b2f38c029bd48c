//! Optimizer update rules, and the schedules of their learning rate.
//!
//! A rule takes the gradient of some elements of one parameter, and in one pass divides and clips
//! it, updates the f32 master weights and the f32 states, and writes the model weights. Rules work
//! element by element: they give the same bits however a parameter is cut, and on every CPU. They
//! know no ranks, stages, buckets or tiers.
//!
//! Operations and their order are those of the single-tensor CPU path of `torch.optim`, whose
//! vector code fuses a few multiplications with the addition that follows; here every operation
//! rounds. Coefficients that are the same for all elements are computed in f64 and rounded to f32
//! once.
//!
//! # Denormals
//!
//! Many CPUs are ten and more times slower on numbers below 2^-126, into which the moments of
//! elements decay that get no gradient for a while. Rules therefore take for +0 what is too small
//! to matter, by comparing before they multiply, so that a product with a learning rate or a
//! weight of an average is a normal number too:
//!
//! | what | is zero where its magnitude is below |
//! |---|---|
//! | the gradient after division and clipping, and after L2 decay | 2^-100 |
//! | first moments, averages and momentum | 2^-100 |
//! | a gradient's square, in a second moment or a sum | 2^-116: where the gradient is below 2^-58 |
//! | second moments | 2^-126 |
//!
//! Weights are never taken for zero. With an `eps` of 2^-50 (9e-16) or more no step of Adam
//! changes by more than 2^-8 of the learning rate for it. The CPU's own flush-to-zero mode is not
//! used, for to set it is undefined behaviour in Rust.
#![forbid(unsafe_code)]

mod adagrad;
mod adam;
mod adamw;
mod error;
mod lion;
mod lr_schedule;
mod moments;
mod pass;
#[cfg(test)]
mod reference;
mod sgd;
mod tiny;

use std::fmt::Debug;

pub use adagrad::{Adagrad, AdagradOptions};
pub use adam::Adam;
pub use adamw::AdamW;
pub use error::OptimError;
pub use lion::{Lion, LionOptions};
pub use lr_schedule::{Decay, LrSchedule};
pub use moments::MomentOptions;
pub use pass::{Gradient, Weights};
pub use sgd::{Momentum, Sgd};

/// An update rule; element by element, with f32 states of the weights' length.
pub trait Optimizer: Debug + Send + Sync {
    /// The rule and its settings in words, such as `SGD with momentum 0.9`: others with other
    /// settings.
    fn description(&self) -> String;

    /// The states' names in a checkpoint, those of `torch.optim`; one state each.
    fn state_names(&self) -> &'static [&'static str];

    /// What every element of every state is before the first update.
    fn initial_state(&self) -> f32 {
        0.0
    }

    /// Updates `weights`, some or all elements of one parameter, by the gradient of the same
    /// elements.
    ///
    /// `step` counts the updates of this parameter, this one included, so the first is 1.
    ///
    /// # Panics
    ///
    /// If `step` is 0, if lengths differ, or if there are not as many states as names.
    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>);
}

/// What may differ from one step, and from one optimizer group, to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// The learning rate.
    pub lr: f64,
    /// The weight decay; each rule says what it does with it.
    pub weight_decay: f64,
}
