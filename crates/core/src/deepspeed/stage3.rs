//! The fields of `zero_optimization` that are about weights which rest sharded.

use super::Section;
use crate::{ConfigError, Numel};

/// Modules whose parameters are gathered and reduced as a whole, whatever each rank uses of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeafModules {
    /// By the names of their classes, with or without that of the Python module.
    pub classes: Vec<String>,
    /// By their names in the model.
    pub names: Vec<String>,
    /// By how these names end.
    pub name_suffixes: Vec<String>,
}

/// Whether `save_16bit_model` makes a file of weights that rest sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelSave {
    /// It does not, which is DeepSpeed's default: gathering takes rank 0 memory for all of them.
    #[default]
    NotGathered,
    /// Rank 0 gathers them.
    Gathered,
}

/// How far weights are gathered ahead, where that runs beside the model's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// Elements that are gathered ahead, at most: those of the next module, or none of them.
    pub numel_max: Numel,
    /// Elements that are whole at once, beyond which nothing is gathered ahead.
    pub live_numel_max: Numel,
}

impl Default for Prefetch {
    /// DeepSpeed's.
    fn default() -> Self {
        Self { numel_max: Numel(50_000_000), live_numel_max: Numel(1_000_000_000) }
    }
}

/// Takes what is gathered ahead.
pub(super) fn prefetch(zero: &mut Section) -> Result<Prefetch, ConfigError> {
    let default = Prefetch::default();
    let mut numel = |name, default| zero.count(name, 0).map(|numel| numel.map_or(default, Numel));
    Ok(Prefetch {
        numel_max: numel("stage3_prefetch_bucket_size", default.numel_max)?,
        live_numel_max: numel("stage3_max_live_parameters", default.live_numel_max)?,
    })
}

/// Takes the others.
pub(super) fn parse(zero: &mut Section) -> Result<(LeafModules, ModelSave), ConfigError> {
    // How long weights are kept and in how many pieces they are updated moves work in time, and
    // changes no result. Here a module's weights are let go when it has run, which is within any of
    // these bounds.
    for name in [
        "sub_group_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_reuse_distance",
    ] {
        zero.count(name, 0)?;
    }
    // Linear layers are torch's own; and a bucket is gathered by one collective.
    for name in ["memory_efficient_linear", "allgather_sequential"] {
        zero.switch(name)?;
    }
    let mut model_save = ModelSave::default();
    for name in
        ["stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"]
    {
        if zero.switch(name)? == Some(true) {
            model_save = ModelSave::Gathered;
        }
    }
    for name in ["stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"] {
        zero.only(name, false, "weights are gathered, not summed")?;
    }
    let threshold = zero.count("stage3_module_granularity_threshold", 0)?.filter(|size| *size > 0);
    if let Some(size) = threshold {
        return Err(ConfigError::Refused {
            field: zero.path("stage3_module_granularity_threshold"),
            value: size.to_string(),
            reason: "a module is a leaf where it is declared one".into(),
            instead: format!("name classes in `{}`", zero.path("leaf_module.classes")),
        });
    }
    let Some(mut leaves) = zero.section("leaf_module")? else {
        return Ok((LeafModules::default(), model_save));
    };
    let declared = LeafModules {
        classes: leaves.strings("classes")?,
        names: leaves.strings("names")?,
        name_suffixes: leaves.strings("name_suffixes")?,
    };
    leaves.end()?;
    Ok((declared, model_save))
}
