//! What a training run asks of the engine.

use oxizero_core::{
    Bucketing, Bytes, ConfigError, LossScaling, MemoryPlan, Mesh, Overlap, ParamSpec, PlanInput,
    Precision, Stage, UnitId, WorldSize, assign_buckets,
};
use oxizero_device::REGION_ALIGN;
use oxizero_optim::{LrSchedule, Optimizer};

use crate::Norm;

/// How the engine shards, accumulates and reduces. The same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// What rests sharded.
    pub stage: Stage,
    /// How the ranks are arranged for several kinds of parallelism; `None` where every rank works
    /// on micro-batches of its own and holds every parameter.
    pub mesh: Option<Mesh>,
    /// How parameters fall into buckets.
    pub bucketing: Bucketing,
    /// The dtypes on a gradient's way. A parameter whose dtype is not `precision.model` keeps its
    /// own; see [`Precision::for_param`].
    pub precision: Precision,
    /// Micro-batches in an accumulation window; at least 1.
    pub accumulation: usize,
    /// What the sum over micro-batches and ranks is divided by.
    pub reduction: Reduction,
    /// Which norm a step reports and clips by.
    pub norm: Norm,
    /// The largest global gradient norm that is applied unscaled; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// How losses are scaled before backward.
    pub loss_scaling: LossScaling,
    /// Whether a window with a gradient that is infinite or NaN is skipped; else it is applied.
    pub check_finite: bool,
    /// The alignment of parameters and shards in a bucket of model weights. Front-ends that lend
    /// weights to SIMD code want the default, 64 bytes; 1 packs them.
    pub align: Bytes,
}

impl EngineOptions {
    /// Stage and precision as given; data parallelism alone, a bucket a unit, windows of one
    /// micro-batch, the mean, no clipping, steps that are not finite skipped, and no loss scaling:
    /// a model whose gradients are f16 wants [`LossScaling::Dynamic`].
    pub fn new(stage: Stage, precision: Precision) -> Self {
        Self {
            stage,
            mesh: None,
            bucketing: Bucketing::Unit,
            precision,
            accumulation: 1,
            reduction: Reduction::Mean,
            norm: Norm::Two,
            clip_norm: None,
            loss_scaling: LossScaling::default(),
            check_finite: true,
            align: Bytes(REGION_ALIGN),
        }
    }

    /// The arrangement of so many ranks, or why they cannot be arranged so.
    pub fn mesh_of(&self, world_size: WorldSize) -> Result<Mesh, ConfigError> {
        match &self.mesh {
            None => Ok(Mesh::data(world_size)),
            Some(mesh) if mesh.world_size() == world_size => Ok(mesh.clone()),
            Some(mesh) => Err(ConfigError::Value {
                field: "mesh".into(),
                value: format!("{} = {} ranks", mesh.names(mesh.all()), mesh.world_size()),
                allowed: format!("axes whose sizes multiply to {world_size}, the world's ranks"),
            }),
        }
    }

    /// What a rank will hold of a model that is trained so, before anything is allocated: what
    /// [`Engine::plan`](crate::Engine::plan) says of an engine with these parameters, this order of
    /// units and this update rule, whose ranks reach each other so, where the communicator takes
    /// nothing beside what it reduces (see [`scratch`](oxizero_comm::Communicator::scratch)).
    pub fn plan(
        &self,
        specs: &[ParamSpec],
        order: &[UnitId],
        rule: &dyn Optimizer,
        reach: Reach,
    ) -> Result<MemoryPlan, ConfigError> {
        self.validate()?;
        let mesh = self.mesh_of(reach.world_size)?;
        let buckets = assign_buckets(specs, &mesh, self.bucketing, self.align);
        Ok(MemoryPlan::new(&PlanInput {
            stage: self.stage,
            precision: self.precision,
            accumulation: self.accumulation,
            state_count: rule.state_names().len(),
            shares_replicas: reach.shares_replicas,
            overlap: reach.overlap,
            scratch: Bytes(0),
            buckets: &buckets,
            order,
        }))
    }

    /// Refuses what the engine cannot run.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.precision.validate()?;
        let refuse = |field: &str, value: String, allowed: &str| {
            Err(ConfigError::Value { field: field.into(), value, allowed: allowed.into() })
        };
        if self.align > ALIGN_MAX {
            return refuse("align", self.align.0.to_string(), "at most 1048576 bytes");
        }
        if self.accumulation == 0 {
            return refuse("accumulation", "0".into(), "1 or more micro-batches");
        }
        if matches!(self.loss_scaling, LossScaling::Dynamic(_)) && !self.check_finite {
            return Err(ConfigError::Conflict {
                first: "loss_scaling = dynamic".into(),
                second: "check_finite = false".into(),
                advice: "overflows that nobody sees never lower the scale; check, or fix the scale"
                    .into(),
            });
        }
        match self.clip_norm {
            Some(norm) if !(norm > 0.0 && (norm as f32).is_normal()) => {
                refuse("clip_norm", norm.to_string(), "a number above 0 that is an f32, or none")
            }
            _ => self.loss_scaling.validate(),
        }
    }
}

/// What a plan depends on of how ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Ranks.
    pub world_size: WorldSize,
    /// Whether the ranks of a host hold one copy of replicated model weights, as the communicator
    /// [says](oxizero_comm::Communicator::shares_replicas).
    pub shares_replicas: bool,
    /// Where operations run: beside the caller where the communicator has a
    /// [queue](oxizero_comm::Communicator::queue).
    pub overlap: Overlap,
}

/// More than any page or vector asks for.
const ALIGN_MAX: Bytes = Bytes(1 << 20);

/// What the sum of gradients over micro-batches and ranks is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// By the micro-batches of the window, all ranks' together; those that ranks of a mesh share
    /// count once. One divisor for all parameters, experts too.
    #[default]
    Mean,
    /// By nothing.
    Sum,
    /// By the weights that ranks state with [`Engine::weigh`](crate::Engine::weigh), such as
    /// numbers of tokens, all micro-batches' and ranks' together, shared ones once.
    Weighted,
}

/// The update rule and its hyper-parameters.
#[derive(Debug)]
pub struct OptimizerSetup {
    /// The update rule.
    pub rule: Box<dyn Optimizer>,
    /// Learning rate and weight decay, by [`oxizero_core::OptimGroup`].
    pub groups: Vec<GroupOptions>,
    /// Multiplies every group's learning rate; advances once an applied step.
    pub schedule: LrSchedule,
}

/// An optimizer group's own hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupOptions {
    /// The learning rate before the schedule.
    pub lr: f64,
    /// The weight decay coefficient.
    pub weight_decay: f64,
}
