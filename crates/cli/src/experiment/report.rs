//! The results as they stand on the page: tables, the chart, and how to get them again.

use oxizero_core::{Config, Precision, counted};

use super::chart::{Line, Panel, Style, Weight, svg};
use super::results::{Curve, Results, mean_curve};
use super::setting::Setting;
use super::tables::{self, Table};

/// What the results were made from.
pub(super) struct Origin<'a> {
    /// The command line.
    pub(super) command: String,
    /// The text, in words.
    pub(super) text: &'a str,
    /// Of a run, but for its precision and its seed.
    pub(super) config: &'a Config,
}

/// The names of the chart's file, and of that of the numbers.
pub(super) struct Files {
    pub(super) chart: &'static str,
    pub(super) numbers: &'static str,
}

/// The results as Markdown.
pub(super) fn markdown(results: &Results, origin: &Origin<'_>, files: &Files) -> String {
    let Origin { command, text, config } = origin;
    let Files { chart, numbers } = files;
    let (ranks, train) = (config.run.ranks, &config.train);
    let window = counted(train.gradient_accumulation_steps, "micro-batch");
    let (steps, ranks) = (counted(train.steps, "step"), counted(ranks, "rank"));
    let losses = tables::losses(results);
    let errors = tables::errors(results);
    let settings = settings();
    let text = text.replacen(", sha256 ", ",\nsha256 ", 1); // a line that is not too long
    let validation = validation(config);
    let config = config.to_toml();
    format!(
        "Validation loss after {steps} of {window} on each of {ranks}, \
         in bits per byte;\nless is better:\n\n\
         {losses}\n\
         ![Validation loss by step, and its distance from f32]({chart})\n\n\
         Relative error of one step's gradient, against that of the same bf16 weights which \
         travels and\nadds in f32. *Another batch* is how far apart two of the latter are, of \
         different micro-batches:\nthe noise that training has anyway. The mean over the \
         seeds:\n\n\
         {errors}\n\
         ### How to get these numbers\n\n\
         ```sh\n{command}\n```\n\n\
         Every number of the tables and the chart is in [{numbers}]({numbers}).\n\n\
         The text is {text}.\nValidation reads {validation}.\n\n\
         The settings, of which everything else is the same, initial weights and order of data \
         included:\n\n\
         {settings}\n\
         Each run is one of `oxizero train` with this configuration, but for the setting and the \
         seed:\n\n\
         ```toml\n{config}```\n"
    )
}

/// What is shown on a terminal.
pub(super) fn words(results: &Results) -> String {
    let (losses, errors) = (tables::losses(results), tables::errors(results));
    format!("validation loss\n\n{losses}\nrelative error of gradients\n\n{errors}")
}

fn validation(config: &Config) -> String {
    let (batches, context) = (config.train.eval_batches, config.model.context);
    let sequences = batches * config.train.micro_batch_size;
    format!("{sequences} sequences of {context} bytes of it; each seed splits it anew")
}

fn settings() -> Table {
    let head = ["setting", "weights", "wire", "sums", "masters"].map(str::to_owned).to_vec();
    let row = |setting: Setting| {
        let Precision { model, reduce, accumulate, master } = setting.precision();
        let dtypes = [model, reduce, accumulate, master].map(|dtype| dtype.to_string());
        [vec![setting.to_string()], dtypes.to_vec()].concat()
    };
    Table::new([vec![head], Setting::ALL.map(row).to_vec()].concat())
}

/// The loss by step, and below it how far each setting is from f32.
pub(super) fn chart(results: &Results) -> String {
    let curves = Setting::ALL.map(|setting| (setting, results.curves(setting)));
    let gaps = Setting::ALL.map(|setting| (setting, results.gaps(setting, Setting::Oracle)));
    let losses = Panel {
        title: "Validation loss",
        unit: "bits per byte",
        height: 250.0,
        lines: lines(&curves),
    };
    let gaps = Panel {
        title: "Validation loss less that of f32 with the same seed",
        unit: "bits per byte",
        height: 200.0,
        lines: lines(&gaps),
    };
    let legend = Setting::ALL.map(|setting| (style(setting), setting.to_string()));
    let below = "optimizer steps; strong lines are means over the seeds, faint lines single seeds";
    svg(&[losses, gaps], &legend, below)
}

fn lines(curves: &[(Setting, Vec<Curve>)]) -> Vec<Line> {
    let mut lines = Vec::new();
    for (setting, curves) in curves {
        let line = |weight, points| Line { style: style(*setting), weight, points };
        lines.extend(curves.iter().map(|curve| line(Weight::Faint, curve.clone())));
        lines.push(line(Weight::Strong, mean_curve(curves)));
    }
    lines
}

fn style(setting: Setting) -> Style {
    match setting {
        Setting::Oracle => Style::Solid,
        Setting::WideSums => Style::Dashed,
        Setting::NarrowSums => Style::Dotted,
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::sample;
    use super::*;

    #[test]
    fn the_page_names_the_command_and_both_files_and_its_lines_are_short() {
        let config = Config::default();
        let origin = Origin { command: "run this".into(), text: "a text", config: &config };
        let files = Files { chart: "a.svg", numbers: "a.csv" };
        let page = markdown(&sample(), &origin, &files);
        for words in
            ["```sh\nrun this\n```", "(a.svg)", "[a.csv](a.csv)", "text is a text.", "steps = 300"]
        {
            assert!(page.contains(words), "{words}: {page}");
        }
        let is_long = |line: &&str| !line.starts_with('|') && line.chars().count() > 100;
        assert_eq!(page.lines().find(is_long), None);
    }

    #[test]
    fn the_tables_show_each_seed_the_mean_and_the_gap() {
        let losses = tables::losses(&sample()).to_string();
        for row in ["| bits per byte ", "| bf16, bf16 sums ", "| (bf16, bf16 sums) less (f32) "] {
            assert!(losses.contains(row), "{row}: {losses}");
        }
        let cells = |name: &str| {
            let row = losses.lines().find(|line| line.starts_with(name)).unwrap();
            row.split('|').skip(2).map(str::trim).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(cells("| bf16, bf16 sums"), "3.5000 5.5000 4.5000 ");
        assert_eq!(cells("| (bf16, bf16 sums) less (f32)"), "+0.5000 +0.5000 +0.5000 ");
        let errors = tables::errors(&sample()).to_string();
        let row = errors.lines().find(|line| line.starts_with("| trained ")).unwrap();
        let cells: Vec<_> = row.split('|').skip(2).map(str::trim).collect();
        assert_eq!(cells, ["64", "0.100 %", "0.800 %", "30.000 %", ""]);
    }

    #[test]
    fn the_chart_has_a_line_for_each_seed_and_mean_in_both_panels() {
        let chart = chart(&sample());
        assert_eq!(chart.matches("<polyline").count(), 2 * 3 * (2 + 1));
        assert!(chart.contains("bf16, f32 sums") && chart.contains("bits per byte"));
    }
}
