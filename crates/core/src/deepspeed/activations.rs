//! The section `activation_checkpointing`.

use super::section::Section;
use crate::ConfigError;

/// Reads the section. What it may ask for, checkpointing does anyway.
pub(super) fn parse(mut section: Section) -> Result<(), ConfigError> {
    // Activations are partitioned over the ranks of one model, of which there is one.
    section.switch("partition_activations")?;
    // It sizes the contiguous memory, which there is not.
    section.count("number_checkpoints", 1)?;
    section.off(&[
        ("contiguous_memory_optimization", "activations lie where torch puts them"),
        ("cpu_checkpointing", "activations stay on the model's device"),
        ("synchronize_checkpoint_boundary", "nothing runs beside that would have to be awaited"),
        ("profile", "checkpointing is not timed; use torch.profiler"),
    ])?;
    section.end()
}
