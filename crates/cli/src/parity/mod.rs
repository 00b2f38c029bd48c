//! `oxizero parity`: trains with the engine and with the oracle, and shows how far they differ.
//!
//! Everything runs in this process, ranks as threads. The exit code is 1 where the two differ by
//! more than the contract allows: nothing for gradients, weights and states, 1e-12 for norms.

mod collectives;
mod rules;
mod self_test;
mod table;
mod trials;

use std::io::{self, Write};
use std::time::Instant;

use clap::{Args, ValueEnum};
use oxizero::EngineError;
use oxizero_core::counted;
use oxizero_sim::trial::{Member, Trained, Trial};
use oxizero_sim::{Differences, first_difference, world};

use self::trials::{Named, Row, Worlds};
use crate::error::CliError;

/// `oxizero parity`.
#[derive(Debug, Args)]
pub(crate) struct ParityArguments {
    /// Trials for a minute at most, on two cores [default].
    #[arg(long, num_args = 0, default_missing_value = "quick", hide_possible_values = true)]
    quick: Option<Width>,
    /// More of everything that is tried.
    #[arg(long, num_args = 0, default_missing_value = "full", hide_possible_values = true)]
    #[arg(conflicts_with = "quick")]
    full: Option<Width>,
    /// Plant faults, and fail unless each of them is caught.
    #[arg(long, conflicts_with_all = ["quick", "full", "ranks"])]
    self_test: bool,
    /// World sizes to try, and groups of as many ranks [default: 1,2,3,4, and all groups].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = ranks)]
    ranks: Option<Vec<usize>>,
    /// For gradients and trials that are drawn.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u32,
    /// Trials of a row, at most.
    #[arg(long, value_name = "K", hide = true)]
    trials: Option<usize>,
}

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Width {
    Quick,
    Full,
}

/// Compares what was asked for, and shows it row by row.
pub(crate) fn run(arguments: &ParityArguments) -> Result<(), CliError> {
    if arguments.self_test {
        return self_test::run(u64::from(arguments.seed));
    }
    let started = Instant::now();
    let width = arguments.full.or(arguments.quick).unwrap_or(Width::Quick);
    let seed = u64::from(arguments.seed);
    let worlds = Worlds::of(arguments.ranks.as_deref());
    let ranks: Vec<_> = worlds.data.iter().map(usize::to_string).collect();
    show(&format!("the engine beside the oracle: ranks {}, seed {seed}\n", ranks.join(" ")))?;
    show(&table::head())?;
    let (mut count, mut first_breach) = (0, None);
    for mut row in trials::rows(width, &worlds, seed) {
        row.trials.truncate(arguments.trials.unwrap_or(usize::MAX));
        let (differences, breach) = compare(&row);
        show(&table::row(&row, differences))?;
        count += row.trials.len();
        first_breach = first_breach.or(breach);
    }
    let (trials, seconds) = (counted(count, "trial"), started.elapsed().as_secs_f64());
    show(&format!("\n{trials} in {seconds:.0} s"))?;
    match first_breach {
        None => Ok(()),
        Some(breach) => Err(CliError::Run(format!("no parity: {breach}"))),
    }
}

/// The largest differences of a row's trials, and what the first that breaks the contract says.
fn compare(row: &Row) -> (Differences, Option<String>) {
    let (mut largest, mut first_breach) = (Differences::default(), None);
    for Named { name, trial } in &row.trials {
        let expected = trial.oracle();
        let ended = world::run(trial.ranks, |comm| Ok(trial.engine(comm)?.0));
        for (trained, expected) in ended.iter().zip(&expected) {
            let differences = trained.as_ref().map(|trained| Differences::of(trained, expected));
            largest = largest.max(differences.unwrap_or_default());
        }
        let context = |breach| format!("{row}, {name}: {breach}");
        first_breach = first_breach.or_else(|| breach(trial, &ended, &expected).map(context));
    }
    (largest, first_breach)
}

/// Trains a trial, each rank with the engine of what `wrap` makes of its own. Returns the first
/// difference from what is expected.
fn breach_of_wrapped(
    trial: &Trial,
    expected: &[Trained],
    wrap: &(impl Fn(Member) -> Member + Sync),
) -> Option<String> {
    let ended = world::run(trial.ranks, |comm| Ok(trial.engine_of(wrap(trial.member(comm)?))?.0));
    breach(trial, &ended, expected)
}

fn breach(
    trial: &Trial,
    ended: &[Result<Trained, EngineError>],
    expected: &[Trained],
) -> Option<String> {
    let mut ranks = ended.iter().zip(expected).enumerate();
    ranks.find_map(|(rank, (ended, expected))| match ended {
        Ok(trained) => first_difference(trained, expected, &trial.specs)
            .map(|difference| format!("on rank {rank}, {difference}")),
        Err(error) => Some(format!("rank {rank} fails: {error}")),
    })
}

/// Writes a line to standard output.
fn show(line: &str) -> Result<(), CliError> {
    writeln!(io::stdout(), "{line}").map_err(CliError::output("the table"))
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=64) => Ok(ranks),
        _ => Err("allowed: 1 to 64".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use oxizero_core::{DType, Precision, Stage};

    use super::*;

    #[test]
    fn the_first_breach_names_trial_parameter_and_both_values() {
        /// What the oracle asks for, first, and the engine, after it, is not the same.
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let precision = Precision::of_model(DType::F32);
        let options = oxizero::EngineOptions::new(Stage::Zero1, precision);
        let trial = Trial::new(options, &[("w", &[0.5])], |_, _| {
            vec![vec![CALLS.fetch_add(1, Ordering::Relaxed) as f32 + 1.0]]
        });
        let trials = vec![Named::new(trial)];
        let row = Row { stage: Stage::Zero1, mesh: None, precision: Some(precision), trials };
        let (differences, breach) = compare(&row);
        let expected = Differences { grads: 1.0, norms: 1.0, weights: 1.0, states: 1.0 };
        assert_eq!(differences, Differences { states: differences.states, ..expected });
        let breach = breach.expect("the gradients differ");
        for part in ["stage 1, f32 weights", "1 rank, ", "`w`", "element 0 is 2e0, not 1e0"] {
            assert!(breach.contains(part), "{breach}");
        }
    }
}
