//! The closing table: what sharding saved, what it cost, and what the model learned.

use std::fmt;

use oxizero_core::{Bytes, RoleBytes, counted};
use serde::Serialize;

/// Everything that a run ends with.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The ZeRO stage.
    pub(crate) stage: u8,
    /// The world size.
    pub(crate) ranks: usize,
    /// Bytes of rank 0 by role, at the moment at which it held the most of all together.
    pub(crate) memory: Vec<RoleRow>,
    /// Whether the ranks hold one copy of replicated model weights, which counts in full above.
    pub(crate) shares_replicas: bool,
    /// Physical memory of rank 0's process, shared pages divided among those that share them.
    pub(crate) proportional_set_bytes: Option<usize>,
    /// Of all ranks together, over the whole training.
    pub(crate) tokens_per_second: f64,
    /// Without evaluations.
    pub(crate) training_seconds: f64,
    /// Collectives of rank 0 that moved tensors, a step.
    pub(crate) collectives_per_step: usize,
    /// Bytes of others that rank 0 read, a step.
    pub(crate) bytes_per_step: usize,
    /// Validation bits per byte before training.
    pub(crate) bits_per_byte_before: f64,
    /// And after.
    pub(crate) bits_per_byte_after: f64,
    /// Of the validation bytes.
    pub(crate) bigram_entropy: f64,
    /// Why the run failed though it came to its end.
    pub(crate) problem: Option<String>,
    /// Text that the trained model continues; none if there is nothing to be had from it.
    pub(crate) sample: Option<String>,
    /// Where results are.
    pub(crate) folder: String,
}

/// The bytes of one role, or of all, at one moment.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct RoleRow {
    /// Model weights, gradients, and so on.
    pub(crate) role: &'static str,
    /// What the rank held as the engine saw it in this run; in a plan, what it is to hold.
    pub(crate) bytes: usize,
    /// What it is planned to hold in plain data-parallel training.
    pub(crate) data_parallel_bytes: usize,
}

/// Rows for every role that either side has at a moment, and the total, which is their sum.
pub(crate) fn role_rows(held: RoleBytes, data_parallel: RoleBytes) -> Vec<RoleRow> {
    let row = |((role, held), (_, plain)): ((&'static str, Bytes), (&str, Bytes))| RoleRow {
        role,
        bytes: held.0,
        data_parallel_bytes: plain.0,
    };
    let total = (("total", held.total()), ("total", data_parallel.total()));
    let roles = held.roles().into_iter().zip(data_parallel.roles());
    let rows = roles.chain([total]).map(row);
    rows.filter(|row| row.bytes + row.data_parallel_bytes > 0).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = format!("most bytes of 1 rank of {}", self.ranks);
        let stage = format!("stage {}, measured", self.stage);
        write_roles(f, &title, [&stage, "data-parallel, planned"], &self.memory)?;
        writeln!(f, "{AT_ONE_MOMENT}")?;
        if let Some(bytes) = self.proportional_set_bytes {
            let bytes = Bytes(bytes).to_string();
            writeln!(f, "{:<26}{bytes:>18}  with code, text, activations", "process (PSS)")?;
        }
        if self.shares_replicas && self.ranks > 1 && self.stage < 3 {
            writeln!(
                f,
                "The ranks share one copy of the model weights, which is counted in full above."
            )?;
        }
        let bytes = Bytes(self.bytes_per_step);
        let collectives = counted(self.collectives_per_step, "collective");
        let traffic = format!("{collectives}, {bytes} from others");
        let (before, after) = (self.bits_per_byte_before, self.bits_per_byte_after);
        let side = if after < self.bigram_entropy { "below" } else { "not below" };
        let lines = [
            ("speed", format!("{:.0} tokens/s", self.tokens_per_second)),
            ("training time", format!("{:.1} s", self.training_seconds)),
            ("a step", traffic),
            ("bits per byte", format!("{before:.3} before, {after:.3} after training")),
            (
                "bigram entropy",
                format!(
                    "{:.3}: the model is {side} it (what the byte before alone tells)",
                    self.bigram_entropy
                ),
            ),
            ("results", self.folder.clone()),
        ];
        writeln!(f)?;
        for (name, words) in lines {
            writeln!(f, "{name:<16}{words}")?;
        }
        match (&self.problem, &self.sample) {
            (Some(problem), _) => write!(f, "{:<16}{problem}", "problem"),
            (None, Some(sample)) => write!(f, "\nA sample:\n{sample}"),
            (None, None) => Ok(()),
        }
    }
}

/// What stands under a table of the most that a rank holds.
pub(crate) const AT_ONE_MOMENT: &str =
    "Rows are of the moment at which the total is largest, each column's own.";

/// The table of bytes by role, beside plain data parallelism.
pub(crate) fn write_roles(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    [column, plain]: [&str; 2],
    rows: &[RoleRow],
) -> fmt::Result {
    writeln!(f, "{title:<26}{column:>18}{plain:>24}")?;
    for row in rows {
        let (bytes, plain) = (Bytes(row.bytes), Bytes(row.data_parallel_bytes));
        writeln!(f, "{:<26}{:>18}{:>24}", row.role, bytes.to_string(), plain.to_string())?;
    }
    Ok(())
}

/// The proportional set size of this process, where the system tells.
pub(crate) fn proportional_set_bytes() -> Option<usize> {
    pss(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)
}

fn pss(rollup: &str) -> Option<usize> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned_and_leaves_out_what_nobody_has() {
        let held = RoleBytes { model: Bytes(1 << 20), ..RoleBytes::default() };
        let plain = RoleBytes { model: Bytes(2 << 20), masters: Bytes(8), ..RoleBytes::default() };
        let rows = role_rows(held, plain);
        let names: Vec<_> = rows.iter().map(|row| row.role).collect();
        assert_eq!(names, ["model weights", "master weights", "total"]);
        let sum = |of: fn(&RoleRow) -> usize| {
            let (total, roles) = rows.split_last().unwrap();
            assert_eq!(of(total), roles.iter().map(of).sum::<usize>());
        };
        sum(|row| row.bytes);
        sum(|row| row.data_parallel_bytes);
        struct Table(Vec<RoleRow>);
        impl fmt::Display for Table {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_roles(f, "bytes a rank", ["ZeRO stage 1", "data-parallel"], &self.0)
            }
        }
        let table = Table(rows).to_string();
        let ends: Vec<_> = table.lines().map(str::len).collect();
        assert_eq!(ends, [68; 4], "{table}");
    }

    #[test]
    fn the_systems_answer_is_read_as_bytes() {
        assert_eq!(pss("Rss:  9 kB\nPss:           1234 kB\nPss_Anon: 3 kB\n"), Some(1234 << 10));
        assert_eq!(pss("nothing"), None);
    }
}
