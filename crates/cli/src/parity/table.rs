//! A line for each stage and precision.

use oxizero_core::Precision;
use oxizero_sim::Differences;

use super::trials::Row;

/// The names of the columns.
pub(super) fn head() -> String {
    let dtypes = ["stage", "weights", "wire", "sums", "trials"].map(str::to_owned);
    line(&dtypes, &["gradients", "norms", "weights", "states"].map(str::to_owned))
}

/// What a row's trials came to.
pub(super) fn row(row: &Row, differences: Differences) -> String {
    let Precision { model, reduce, accumulate, .. } = row.precision;
    let what = [
        u8::from(row.stage).to_string(),
        model.to_string(),
        reduce.to_string(),
        accumulate.to_string(),
        row.trials.len().to_string(),
    ];
    let Differences { grads, norms, weights, states } = differences;
    line(&what, &[grads, norms, weights, states].map(number))
}

/// Zero is exact, and looks so.
fn number(difference: f64) -> String {
    if difference == 0.0 { "0".into() } else { format!("{difference:.1e}") }
}

fn line(what: &[String; 5], differences: &[String; 4]) -> String {
    let [stage, model, reduce, accumulate, trials] = what;
    let [grads, norms, weights, states] = differences;
    format!(
        "{stage:<7}{model:<9}{reduce:<6}{accumulate:<6}{trials:>6}\
         {grads:>12}{norms:>10}{weights:>10}{states:>10}"
    )
}

#[cfg(test)]
mod tests {
    use oxizero_core::{DType, Stage};

    use super::*;

    #[test]
    fn the_table_is_aligned() {
        let precision = Precision::of_model(DType::Bf16);
        let of = Row { stage: Stage::Zero2, precision, trials: Vec::new() };
        let differences =
            Differences { weights: f64::INFINITY, norms: 1e-16, ..Default::default() };
        let shown = row(&of, differences);
        assert_eq!(shown.len(), head().len());
        assert!(shown.ends_with("0   1.0e-16       inf         0"), "{shown}");
    }
}
