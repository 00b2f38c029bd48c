//! The section `zero_optimization`.

use super::off;
use super::section::Section;
use super::stage3::{self, LeafModules, ModelSave, Prefetch};
use crate::{ConfigError, Numel, Overlap, Stage};

/// DeepSpeed's default of 500 million leaves nothing to do while backward runs.
const BUCKET_NUMEL: usize = 16 << 20;

/// What is sharded, in which portions, and whether these travel beside the model's arithmetic.
pub(super) struct Zero {
    pub(super) stage: Stage,
    pub(super) bucket_numel_max: Numel,
    pub(super) leaf_modules: LeafModules,
    pub(super) model_save: ModelSave,
    pub(super) prefetch: Prefetch,
    pub(super) overlap: Option<Overlap>,
}

/// Takes the section.
pub(super) fn parse(top: &mut Section) -> Result<Zero, ConfigError> {
    let Some(mut section) = top.section("zero_optimization")? else {
        return Ok(Zero {
            stage: Stage::Zero0,
            bucket_numel_max: Numel(BUCKET_NUMEL),
            leaf_modules: LeafModules::default(),
            model_save: ModelSave::default(),
            prefetch: Prefetch::default(),
            overlap: None,
        });
    };
    let stage = section.count("stage", 0)?.unwrap_or(0);
    let stage = match Stage::ALL.get(stage) {
        Some(stage) => *stage,
        None => return section.value_error("stage", &stage.into(), "0, 1, 2, 3"),
    };
    // One bucket serves both, so that the smaller of the two bounds it.
    let reduce = section.count("reduce_bucket_size", 1)?.unwrap_or(usize::MAX);
    let gather = section.count("allgather_bucket_size", 1)?.unwrap_or(usize::MAX);
    let asked = Some(reduce.min(gather)).filter(|numel| *numel != usize::MAX);
    section.only("contiguous_gradients", true, "a bucket's gradients are contiguous")?;
    section.only("reduce_scatter", true, "what rests sharded is reduced to shards")?;
    section.only("allgather_partitions", true, "weights are gathered, not broadcast")?;
    section.only("use_multi_rank_bucket_allreduce", true, "a bucket is reduced for all ranks")?;
    section.only("ignore_unused_parameters", true, "unused parameters contribute zeros")?;
    section.only("compute_grad_norm", true, "the pass that checks gradients gives their norm")?;
    section.only("load_from_fp32_weights", true, off::NOT_HERE)?;
    section.only("override_module_apply", true, off::NOT_HERE)?;
    let overlap = section.switch("overlap_comm")?.map(Overlap::from);
    if let Some(size) = section.count("zero_hpz_partition_size", 1)?.filter(|size| *size > 1) {
        let reason = "all ranks are one group".into();
        let instead = "leave the field out".into();
        let (field, value) = (section.path("zero_hpz_partition_size"), size.to_string());
        return Err(ConfigError::Refused { field, value, reason, instead });
    }
    let (leaf_modules, model_save) = stage3::parse(&mut section)?;
    let prefetch = stage3::prefetch(&mut section)?;
    section.off(off::ZERO)?;
    section.end()?;
    let bucket_numel_max = Numel(asked.unwrap_or(BUCKET_NUMEL));
    Ok(Zero { stage, bucket_numel_max, leaf_modules, model_save, prefetch, overlap })
}
