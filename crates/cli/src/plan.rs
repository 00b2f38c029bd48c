//! `oxizero plan`: the bytes of a rank, before anything is allocated.

use std::fmt;
use std::io::Write;

use oxizero_burn::Model;
use oxizero_burn::llama::Tokens;
use oxizero_core::config::Launch;
use oxizero_core::{
    Bytes, Config, GradientPath, MemoryPlan, Mesh, Numel, PlanInput, Stage, UnitId, WorldSize,
    assign_buckets, counted, gradient_paths,
};

use crate::error::CliError;
use crate::report::{AT_ONE_MOMENT, role_rows, write_roles};
use crate::setup;

/// Prints the plan of `config`'s stage beside plain data parallelism, and every stage's total.
pub(crate) fn show(config: &Config) -> Result<(), CliError> {
    let refused = |error: &dyn fmt::Display| CliError::Start(error.to_string());
    let model = setup::model(config).map_err(|error| refused(&error))?;
    let state_count = setup::optimizer(config).map_err(|error| refused(&error))?;
    let state_count = state_count.rule.state_names().len();
    let plan = Plan { config, model: &model, state_count };
    let written = writeln!(std::io::stdout(), "{plan}");
    written.map_err(CliError::output("the plan"))
}

/// What a plan is made of.
pub(crate) struct Plan<'a> {
    pub(crate) config: &'a Config,
    pub(crate) model: &'a Model<Tokens>,
    /// State tensors that the optimizer keeps a parameter.
    pub(crate) state_count: usize,
}

impl Plan<'_> {
    /// What a rank holds in the configuration's own stage.
    pub(crate) fn sharded(&self) -> MemoryPlan {
        self.memory(self.config.zero.stage, self.shares_replicas())
    }

    /// What a rank holds in plain data parallelism, with its own copy of everything.
    pub(crate) fn data_parallel(&self) -> MemoryPlan {
        self.memory(Stage::Zero0, false)
    }

    /// Elements of all parameters.
    pub(crate) fn numel(&self) -> Numel {
        self.model.specs.iter().map(|spec| spec.numel()).sum()
    }

    fn shares_replicas(&self) -> bool {
        self.config.run.launch == Launch::Processes
    }

    fn memory(&self, stage: Stage, shares_replicas: bool) -> MemoryPlan {
        self.planned(stage, shares_replicas, |input, _| MemoryPlan::new(input))
    }

    /// The dtypes on the way of the gradients, in the configuration's own stage.
    pub(crate) fn gradient_paths(&self) -> Vec<GradientPath> {
        self.planned(self.config.zero.stage, self.shares_replicas(), gradient_paths)
    }

    fn planned<T>(
        &self,
        stage: Stage,
        shares_replicas: bool,
        plan: impl FnOnce(&PlanInput<'_>, &Mesh) -> T,
    ) -> T {
        let options = setup::engine_options(self.config);
        let world_size = WorldSize::new(self.config.run.ranks).expect("a validated configuration");
        let mesh = Mesh::data(world_size);
        let buckets = assign_buckets(&self.model.specs, &mesh, options.bucketing, options.align);
        let order: Vec<UnitId> = self.model.chain.iter().map(|(unit, _)| *unit).collect();
        let input = PlanInput {
            stage,
            precision: self.config.precision,
            accumulation: options.accumulation,
            state_count: self.state_count,
            shares_replicas,
            scratch: Bytes(0),
            overlap: setup::overlap(self.config),
            buckets: &buckets,
            order: &order,
        };
        plan(&input, &mesh)
    }
}

impl fmt::Display for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, .. } = self;
        let ranks = config.run.ranks;
        let stage = u8::from(config.zero.stage);
        writeln!(
            f,
            "{} parameters, {} weights, {}",
            self.numel(),
            config.precision.model,
            counted(ranks, "rank")
        )?;
        writeln!(f)?;
        let (plan, plain) = (self.sharded(), self.data_parallel());
        let column = format!("ZeRO stage {stage}");
        let columns = [column.as_str(), "data-parallel"];
        let rows = role_rows(plan.rest, plain.rest);
        write_roles(f, "planned a rank, at rest", columns, &rows)?;
        writeln!(f)?;
        write_roles(
            f,
            "planned a rank, at most",
            columns,
            &role_rows(plan.fullest, plain.fullest),
        )?;
        writeln!(f, "{AT_ONE_MOMENT}")?;
        writeln!(f)?;
        writeln!(
            f,
            "{:<26}{:>18}{:>24}",
            "planned a rank, by stage", "at rest", "at once, at most"
        )?;
        for stage in Stage::ALL {
            let plan = self.memory(stage, self.shares_replicas());
            let (rest, peak) = (plan.rest.total().to_string(), plan.peak_total().to_string());
            let stage = format!("stage {}", u8::from(stage));
            writeln!(f, "{stage:<26}{rest:>18}{peak:>24}")?;
        }
        if self.shares_replicas() && ranks > 1 && config.zero.stage < Stage::Zero3 {
            let host = plan.rest.total() * ranks - plan.rest.model * (ranks - 1);
            writeln!(f, "\nThe ranks share one copy of the model weights: {host} on this host.")?;
        }
        writeln!(f, "\nActivations are not counted.")?;
        for path in self.gradient_paths() {
            write!(f, "\n{path}")?;
        }
        Ok(())
    }
}
