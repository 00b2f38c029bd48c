//! How many samples a step has.

use super::Section;
use crate::{ConfigError, WorldSize};

/// Samples in a batch; `train = micro * accumulation * world size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Samples of one rank's micro-batch; `None` where the file does not say.
    pub micro: Option<usize>,
    /// Micro-batches of a rank in one step.
    pub accumulation: usize,
    /// Samples of all ranks in one step; `None` where the file does not say.
    pub train: Option<usize>,
}

/// Takes the three sizes, of which any two say the third.
pub(super) fn parse(top: &mut Section, world_size: WorldSize) -> Result<BatchSizes, ConfigError> {
    let train = top.count("train_batch_size", 1)?;
    let micro = top.count("train_micro_batch_size_per_gpu", 1)?;
    let accumulation = top.count("gradient_accumulation_steps", 1)?;
    let ranks = world_size.get();
    let conflict = |accumulation: usize, micro: Option<usize>| {
        let of_micro = micro.map(|micro| format!(" * train_micro_batch_size_per_gpu = {micro}"));
        Err(ConfigError::Conflict {
            first: format!("train_batch_size = {}", train.unwrap_or_default()),
            second: format!(
                "gradient_accumulation_steps = {accumulation}{}",
                of_micro.unwrap_or_default()
            ),
            advice: format!("with {ranks} ranks they do not make a whole; leave one of them out"),
        })
    };
    let product = |sizes: &[usize]| sizes.iter().try_fold(ranks, |all, n| all.checked_mul(*n));
    let accumulation = match (train, micro, accumulation) {
        (_, _, Some(accumulation)) => accumulation,
        (Some(train), Some(micro), None) => match product(&[micro]) {
            Some(pass) if train.is_multiple_of(pass) => train / pass,
            _ => return conflict(1, Some(micro)),
        },
        _ => 1,
    };
    let micro = match (train, micro) {
        (Some(train), None) => match product(&[accumulation]) {
            Some(passes) if train.is_multiple_of(passes) => Some(train / passes),
            _ => return conflict(accumulation, None),
        },
        _ => micro,
    };
    let whole = micro.and_then(|micro| product(&[micro, accumulation]));
    match (train, whole) {
        (Some(train), whole) if whole != Some(train) => conflict(accumulation, micro),
        _ => Ok(BatchSizes { micro, accumulation, train: whole }),
    }
}
