//! How many samples a step has.

use super::Section;
use crate::{ConfigError, WorldSize, counted};

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
    let conflict = |relation| {
        Err(ConfigError::Refused {
            field: top.path("train_batch_size"),
            value: train.unwrap_or_default().to_string(),
            reason: format!("it is {relation} {}", factors(accumulation, micro, ranks)),
            instead: match (accumulation, micro) {
                (None, None) => "write a multiple".into(),
                _ => "correct one of the sizes, or leave one out".into(),
            },
        })
    };
    let product = |sizes: &[usize]| sizes.iter().try_fold(ranks, |all, n| all.checked_mul(*n));
    let passes = match (train, micro, accumulation) {
        (_, _, Some(accumulation)) => accumulation,
        (Some(train), Some(micro), None) => match product(&[micro]) {
            Some(pass) if train.is_multiple_of(pass) => train / pass,
            _ => return conflict("no multiple of"),
        },
        _ => 1,
    };
    let of_rank = match (train, micro) {
        (Some(train), None) => match product(&[passes]) {
            Some(samples) if train.is_multiple_of(samples) => Some(train / samples),
            _ => return conflict("no multiple of"),
        },
        _ => micro,
    };
    let whole = of_rank.and_then(|micro| product(&[micro, passes]));
    match (train, whole) {
        (Some(train), whole) if whole != Some(train) => conflict("not"),
        _ => Ok(BatchSizes { micro: of_rank, accumulation: passes, train: whole }),
    }
}

/// The product of what the file gives and the ranks, such as
/// `2 (gradient_accumulation_steps) x 4 ranks = 8`.
fn factors(accumulation: Option<usize>, micro: Option<usize>, ranks: usize) -> String {
    let given =
        [(accumulation, "gradient_accumulation_steps"), (micro, "train_micro_batch_size_per_gpu")];
    let given = given.into_iter().filter_map(|(size, name)| Some((size?, name)));
    let mut words: Vec<_> = given.clone().map(|(size, name)| format!("{size} ({name})")).collect();
    words.push(counted(ranks, "rank"));
    let product = given.map(|(size, _)| size).try_fold(ranks, usize::checked_mul);
    match product.filter(|_| words.len() > 1) {
        Some(product) => format!("{} = {product}", words.join(" x ")),
        None => words.join(" x "),
    }
}
