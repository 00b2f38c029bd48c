//! What a run says while it goes on: one live line on a terminal, lines elsewhere, JSON on demand.

use std::io::{self, IsTerminal, Write};

use oxizero_core::Bytes;
use serde::Serialize;

use crate::report::Report;

/// Something that happened in a run. As JSON, the object's `event` names the variant.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The run begins.
    Start(Start),
    /// An optimizer step ended.
    Step(Step),
    /// The model was evaluated.
    Evaluation(Evaluation),
    /// The run is complete.
    End(Box<Report>),
}

/// What the run uses.
#[derive(Debug, Serialize)]
pub(crate) struct Start {
    /// Origin, size and hash of the text.
    pub(crate) text: String,
    /// Bytes to train on.
    pub(crate) train_bytes: usize,
    /// Bytes to validate on.
    pub(crate) validation_bytes: usize,
    /// Of the validation bytes, in bits per byte.
    pub(crate) bigram_entropy: f64,
    /// Elements of the model.
    pub(crate) parameters: usize,
    /// Lines of the configuration in words: what, and how much.
    #[serde(skip)]
    pub(crate) words: Vec<(&'static str, String)>,
    /// Where results go.
    pub(crate) folder: String,
}

/// One optimizer step.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    /// Counted from 1.
    pub(crate) step: usize,
    /// Steps of the run.
    pub(crate) of: usize,
    /// Mean cross-entropy over all ranks' micro-batches, in nats per token.
    pub(crate) loss: f64,
    /// The learning rate that was applied.
    pub(crate) lr: f64,
    /// The global norm before clipping; absent where the step was skipped.
    pub(crate) grad_norm: Option<f64>,
    /// Of all ranks together.
    pub(crate) tokens_per_second: f64,
    /// `applied`, or why it was skipped.
    pub(crate) outcome: String,
}

/// One evaluation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Evaluation {
    /// Steps taken before.
    pub(crate) step: usize,
    /// Cross-entropy of the validation text.
    pub(crate) bits_per_byte: f64,
    /// What a bigram table would reach at best.
    pub(crate) bigram_entropy: f64,
}

/// Shows events on standard output.
#[derive(Debug)]
pub(crate) struct Progress {
    mode: Mode,
    /// The live line stands, without an end.
    is_open: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Live,
    Lines,
    Json,
}

impl Progress {
    /// For programs, or for people: then as the standard output allows.
    pub(crate) fn new(json: bool) -> Self {
        let mode = match (json, io::stdout().is_terminal()) {
            (true, _) => Mode::Json,
            (false, true) => Mode::Live,
            (false, false) => Mode::Lines,
        };
        Self { mode, is_open: false }
    }

    /// Shows `event`.
    pub(crate) fn show(&mut self, event: &Event) -> io::Result<()> {
        let mut text = match self.mode {
            Mode::Json => serde_json::to_string(event)?,
            Mode::Live | Mode::Lines => words(event),
        };
        let stays_open = self.mode == Mode::Live && matches!(event, Event::Step(_));
        if self.is_open {
            let close = if stays_open { "\r\x1b[K" } else { "\n" };
            text.insert_str(0, close);
        }
        if !stays_open {
            text.push('\n');
        }
        self.is_open = stays_open;
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }
}

fn words(event: &Event) -> String {
    match event {
        Event::Start(start) => start_words(start),
        Event::Step(step) => step_words(step),
        Event::Evaluation(Evaluation { step, bits_per_byte, bigram_entropy }) => format!(
            "after step {step}: {bits_per_byte:.3} bits per validation byte \
             (bigram entropy {bigram_entropy:.3})"
        ),
        Event::End(report) => format!("\n{report}"),
    }
}

fn start_words(start: &Start) -> String {
    let sizes = format!(
        "{} to train on, {} to validate on, bigram entropy {:.3} bits per byte",
        Bytes(start.train_bytes),
        Bytes(start.validation_bytes),
        start.bigram_entropy
    );
    let text = [("text", start.text.clone()), ("", sizes)];
    let folder = [("results", start.folder.clone())];
    let lines = text.iter().chain(&start.words).chain(&folder);
    lines.map(|(name, words)| format!("{name:<9}{words}\n")).collect()
}

fn step_words(step: &Step) -> String {
    let norm = step.grad_norm.map_or("-".into(), |norm| format!("{norm:.3}"));
    let width = step.of.to_string().len();
    format!(
        "step {:>width$}/{}  loss {:.4} nats  lr {:.2e}  norm {norm}  {:.0} tokens/s  {}",
        step.step, step.of, step.loss, step.lr, step.tokens_per_second, step.outcome
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(grad_norm: Option<f64>, outcome: &str) -> Event {
        Event::Step(Step {
            step: 7,
            of: 300,
            loss: 2.5,
            lr: 1e-3,
            grad_norm,
            tokens_per_second: 12_345.6,
            outcome: outcome.into(),
        })
    }

    #[test]
    fn a_step_is_one_short_line() {
        let line = words(&step(Some(0.75), "applied"));
        let said =
            "step   7/300  loss 2.5000 nats  lr 1.00e-3  norm 0.750  12346 tokens/s  applied";
        assert_eq!(line, said);
    }

    #[test]
    fn a_step_is_an_object_that_names_its_kind() {
        let json = serde_json::to_value(step(None, "skipped")).unwrap();
        assert_eq!(json["event"], "step");
        assert_eq!(json["step"], 7);
        assert!(json["grad_norm"].is_null());
    }
}
