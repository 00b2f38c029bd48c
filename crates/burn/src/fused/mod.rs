//! What a transformer does between its matrix products, each as one pass forward and one backward.
//!
//! burn composes these of many passes, which on a CPU take as long as the products. They are used
//! for f32 tensors on burn's CPU back end; [`apply`](op::apply) returns `None` for every other
//! tensor, and the caller composes the same of burn's operations. Sums run in an order that does
//! not depend on threads or on the width of the CPU's vectors, and nothing is contracted to fused
//! multiply-adds.

mod causal_softmax;
mod cross_entropy;
mod linear;
mod op;
mod rms_norm;
mod rotary;
mod simd;
mod swiglu;
#[cfg(test)]
mod tests;

pub(crate) use causal_softmax::causal_softmax;
pub(crate) use cross_entropy::cross_entropy;
pub(crate) use linear::linear;
pub(crate) use rms_norm::rms_norm;
pub(crate) use rotary::{Angles, split_and_turn};
pub(crate) use swiglu::swiglu;
