//! A line for each stage and precision, and for each stage and arrangement of ranks.

use oxizero_sim::{Differences, layouts};

use super::trials::Row;

/// The names of the columns.
pub(super) fn head() -> String {
    let what = ["stage", "groups", "weights", "wire", "sums", "trials"].map(str::to_owned);
    line(&what, &["gradients", "norms", "weights", "states"].map(str::to_owned))
}

/// What a row's trials came to.
pub(super) fn row(row: &Row, differences: Differences) -> String {
    let groups = row.mesh.as_ref().map_or_else(|| "data".into(), layouts::name);
    let [model, reduce, accumulate] = match row.precision {
        Some(all) => [all.model, all.reduce, all.accumulate].map(|dtype| dtype.to_string()),
        None => ["each"; 3].map(str::to_owned),
    };
    let stage = u8::from(row.stage).to_string();
    let what = [stage, groups, model, reduce, accumulate, row.trials.len().to_string()];
    let Differences { grads, norms, weights, states } = differences;
    line(&what, &[grads, norms, weights, states].map(number))
}

/// Zero is exact, and looks so.
fn number(difference: f64) -> String {
    if difference == 0.0 { "0".into() } else { format!("{difference:.1e}") }
}

fn line(what: &[String; 6], differences: &[String; 4]) -> String {
    let [stage, groups, model, reduce, accumulate, trials] = what;
    let [grads, norms, weights, states] = differences;
    format!(
        "{stage:<7}{groups:<30}{model:<9}{reduce:<6}{accumulate:<6}{trials:>6}\
         {grads:>12}{norms:>10}{weights:>10}{states:>10}"
    )
}

#[cfg(test)]
mod tests {
    use oxizero_core::{DType, Precision, Stage};

    use super::*;

    #[test]
    fn the_table_is_aligned() {
        let precision = Some(Precision::of_model(DType::Bf16));
        let empty = || Row { stage: Stage::Zero2, mesh: None, precision, trials: Vec::new() };
        let differences =
            Differences { weights: f64::INFINITY, norms: 1e-16, ..Default::default() };
        let shown = row(&empty(), differences);
        assert_eq!(shown.len(), head().len());
        assert!(shown.ends_with("0   1.0e-16       inf         0"), "{shown}");
        for mesh in layouts::meshes() {
            let of = Row { mesh: Some(mesh), precision: None, ..empty() };
            assert_eq!(row(&of, differences).len(), head().len());
        }
    }
}
