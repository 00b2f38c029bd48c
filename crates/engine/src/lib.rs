//! A ZeRO training engine: data parallelism with optimizer states, gradients and model weights
//! sharded over ranks.
//!
//! [`Engine`] takes a front-end's events and gradients, and does what its schedule says; a
//! [`chain::Chain`] of [`segment::Segment`]s makes these calls for a model. Nothing here does
//! arithmetic on elements (that is `oxizero-device` and `oxizero-optim`), knows how ranks
//! communicate (`oxizero-comm`), or decides on an order (`oxizero-core`).
#![forbid(unsafe_code)]

mod access;
mod backend;
mod boundary;
mod bucket;
pub mod chain;
mod checkpoint;
mod clip;
mod copies;
mod engine;
mod error;
mod facts;
mod flight;
mod full_grads;
mod gathered;
mod grad_views;
mod gradient;
mod groups;
mod hyper;
mod ledger;
mod model_grads;
mod norm;
mod observer;
mod options;
mod params;
mod reduction;
mod sampler;
pub mod segment;
mod setup;
mod step;
mod trace;
mod weights;
mod window;
mod written;

pub use access::Local;
pub use backend::Backend;
pub use boundary::Boundary;
pub use checkpoint::{LoadOptions, Loaded, Names, SaveOptions, StoredBuffer, What};
pub use engine::{Engine, GradIn};
pub use error::EngineError;
pub use facts::Fact;
pub use grad_views::{GradPiece, GradPieces, GradViews};
pub use model_grads::{GradNorms, ModelGrads, Scope};
pub use norm::Norm;
pub use observer::{Observer, Span};
pub use options::{EngineOptions, GroupOptions, OptimizerSetup, Reach, Reduction};
pub use oxizero_checkpoint::{
    self as checkpoints, Checkpoint, CheckpointError, RunFolder, step_name,
};
pub use oxizero_comm as comm;
pub use oxizero_core::{
    Along, Axes, Batches, BucketId, BucketSpec, Bucketing, Bytes, ConfigError, DType,
    DynamicLossScale, GradientPath, Hop, LossScale, LossScaling, MemoryPlan, Mesh, MeshAxis, Numel,
    OptimGroup, Overlap, ParamId, ParamSpec, Precision, ProcessGroup, Rank, RoleBytes, Sharing,
    Stage, UnitId, WorldSize,
};
pub use oxizero_device::View as GradView;
pub use oxizero_device::{Buffer, Device, DeviceMemory, Loan, Storage, View, ViewMut};
pub use oxizero_optim as optim;
pub use sampler::Sampler;
pub use step::{SkipReason, StepOutcome};
pub use trace::Trace;
pub use weights::{ParamWeights, RestingWeights, UnitWeights};
