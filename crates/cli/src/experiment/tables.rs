//! The results as Markdown.

use std::fmt;

use super::results::{Cause, Results, Weights, ends, mean};
use super::setting::Setting;

/// A Markdown table, aligned in its text too.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// The first row is the head.
    pub(super) fn new(rows: Vec<Vec<String>>) -> Self {
        Self { rows }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(3)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                match column {
                    0 => write!(f, "| {cell:<width$} ")?,
                    _ => write!(f, "| {cell:>width$} ")?,
                }
            }
            writeln!(f, "|")?;
            if index == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let end = if column == 0 { '-' } else { ':' };
                    write!(f, "|{}{end}", "-".repeat(width + 1))?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

/// Validation loss after training: by setting and seed, and the gaps between settings.
pub(super) fn losses(results: &Results) -> Table {
    let seeds = results.runs.iter().filter(|run| run.setting == Setting::Oracle);
    let seeds = seeds.map(|run| format!("seed {}", run.seed));
    let head = ["bits per byte".to_owned()].into_iter().chain(seeds).chain(["mean".into()]);
    let mut rows = vec![head.collect::<Vec<_>>()];
    for setting in Setting::ALL {
        let ends = ends(&results.curves(setting));
        rows.push(row(setting.to_string(), &ends, |bits| format!("{bits:.4}")));
    }
    let [oracle, wide, narrow] = Setting::ALL;
    for (setting, other) in [(wide, oracle), (narrow, oracle), (narrow, wide)] {
        let ends = ends(&results.gaps(setting, other));
        let name = format!("({setting}) less ({other})");
        rows.push(row(name, &ends, |bits| format!("{bits:+.4}")));
    }
    Table::new(rows)
}

fn row(name: String, numbers: &[f64], shown: impl Fn(f64) -> String) -> Vec<String> {
    let cells = numbers.iter().map(|number| shown(*number));
    [name].into_iter().chain(cells).chain([shown(mean(numbers))]).collect()
}

/// Relative errors of gradients, the mean over the seeds.
pub(super) fn errors(results: &Results) -> Table {
    let head = ["weights", "micro-batches a rank"].into_iter().chain(Cause::ALL.map(Cause::name));
    let mut rows = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for weights in Weights::ALL {
        for window in results.windows() {
            let cell = |cause| {
                let relative = mean(&results.errors(cause, window, weights));
                format!("{:.3} %", 100.0 * relative)
            };
            let key = [weights.name().to_owned(), window.to_string()];
            rows.push(key.into_iter().chain(Cause::ALL.map(cell)).collect());
        }
    }
    Table::new(rows)
}
