//! The words of the oxizero ZeRO engine: counts, dtypes, placements, layouts, the schedule, the
//! memory plan and the configuration.
//!
//! This crate decides and performs nothing: no I/O, no threads, no clock, no unsafe code.
#![forbid(unsafe_code)]

mod arrangement;
mod bucket;
pub mod config;
mod counted;
pub mod deepspeed;
mod dtype;
mod elastic;
mod error;
mod gradient_path;
mod layout;
mod loss_scale;
mod mesh;
mod param;
mod parts;
mod placement;
mod plan;
mod random;
mod schedule;
mod units;

pub use arrangement::{Arrangement, Holds, Mark};
pub use bucket::{BucketId, BucketSpec, Bucketing, assign_buckets};
pub use config::Config;
pub use counted::counted;
pub use dtype::{DType, Precision};
pub use elastic::{GlobalBatch, Indivisible};
pub use error::ConfigError;
pub use gradient_path::{GradientPath, Hop, gradient_paths};
pub use layout::{Layout, Piece};
pub use loss_scale::{
    DynamicLossScale, LossScale, LossScaleAtMinimum, LossScaler, LossScalerState, LossScaling,
};
pub use mesh::{Along, Axes, Batches, Mesh, MeshAxis, Sharing};
pub use param::{OptimGroup, ParamId, ParamSpec, UnitId};
pub use parts::{Part, Run};
pub use placement::{Placement, Stage, Transition};
pub use plan::{MemoryPlan, Overlap, PlanInput, RoleBytes, model_is_master};
pub use random::Random;
pub use schedule::{Action, Event, Schedule};
pub use units::{Bytes, Numel, ProcessGroup, Rank, WorldSize};
