//! Checkpoints on the command line: where a run's are, what is in one, and their way out.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use oxizero_checkpoint::{Checkpoint, Dtype, ExportOptions, Manifest, RunFolder, Tensor};
use oxizero_core::{Bytes, counted};
use oxizero_optim::LrSchedule;

use crate::data::Corpus;
use crate::error::CliError;

/// The folder of a run's checkpoints, in the run's folder.
const CHECKPOINTS: &str = "checkpoints";
const MANIFEST: &str = "manifest.json";

/// `oxizero inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A run's folder, a folder of checkpoints, or a checkpoint.
    run: PathBuf,
    /// Read all of it, and compare it with its checksums.
    #[arg(long)]
    verify: bool,
}

/// `oxizero convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArguments {
    /// A run's folder, a folder of checkpoints, or a checkpoint.
    run: PathBuf,
    /// What is written.
    #[arg(long, value_enum, required_unless_present = "source")]
    to: Option<Format>,
    /// Whose checkpoint it is, if another's; the Python package reads those.
    #[arg(long = "from", value_enum, conflicts_with = "to")]
    source: Option<Source>,
    /// Where; a new or an empty folder.
    out: PathBuf,
    /// What weights are rounded to; each to the dtype that the model had it in, if absent.
    #[arg(long, value_name = "f32|bf16|f16", value_parser = dtype)]
    dtype: Option<Dtype>,
    /// The most bytes of a file, such as 500MB or 5GB.
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = size)]
    shard_size: usize,
}

/// What others read.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// The Hugging Face layout.
    Safetensors,
}

/// Who else writes checkpoints.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Source {
    /// DeepSpeed, ZeRO stages 1, 2 and 3.
    Deepspeed,
}

/// The checkpoints of the run in `folder`.
pub(crate) fn of_run(folder: &Path) -> RunFolder {
    RunFolder::new(folder.join(CHECKPOINTS))
}

/// The checkpoint that a user means by a folder: its own, or the latest of those in it.
fn open(folder: &Path) -> Result<Checkpoint, CliError> {
    Ok(if folder.join(MANIFEST).is_file() {
        Checkpoint::open(folder)?
    } else if folder.join(CHECKPOINTS).is_dir() {
        of_run(folder).open(None)?
    } else {
        RunFolder::new(folder).open(None)?
    })
}

/// Refuses to go on from a checkpoint with tokens that another tokenizer makes.
pub(crate) fn refuse_other(checkpoint: &Checkpoint, corpus: &Corpus) -> Result<(), CliError> {
    let before = &checkpoint.manifest().caller["tokenizer"];
    let before = before["sha256"].as_str().map(|hash| (before["path"].as_str(), hash));
    let now = corpus.tokenized.as_ref().map(|tokenized| &tokenized.tokenizer);
    if before.map(|(_, hash)| hash) == now.map(|file| file.sha256.as_str()) {
        return Ok(());
    }
    let words = |file: Option<(&str, &str)>| match file {
        None => "bytes".to_owned(),
        Some((path, hash)) => format!("tokens of `{path}` (sha256 {hash})"),
    };
    Err(CliError::Data(format!(
        "the checkpoint `{}` was trained on {}, and the run is to read {}: give the same tokenizer",
        checkpoint.folder().display(),
        words(before.map(|(path, hash)| (path.unwrap_or("?"), hash))),
        words(now.map(|file| (file.path.as_str(), file.sha256.as_str()))),
    )))
}

/// Shows what is in a checkpoint.
pub(crate) fn inspect(arguments: &InspectArguments) -> Result<(), CliError> {
    let mut checkpoint = open(&arguments.run)?;
    let manifest = checkpoint.manifest();
    let training = &manifest.training;
    let mut text = format!(
        "{}\n{} applied steps, {}, written by {}\noptimizer {}, {}\n",
        checkpoint.folder().display(),
        training.applied_steps,
        counted(manifest.tensors.len(), "tensor"),
        counted(manifest.ranks.len(), "rank"),
        training.rule,
        schedule(manifest),
    );
    for (index, group) in training.groups.iter().enumerate() {
        let (lr, weight_decay) = (group.lr, group.weight_decay);
        text.push_str(&format!("group {index}: lr {lr}, weight decay {weight_decay}\n"));
    }
    if let Some(scaler) = &training.loss_scaler {
        text.push_str(&format!("loss scale {}\n", scaler.scale));
    }
    text.push('\n');
    for tensor in &manifest.tensors {
        text.push_str(&line(tensor));
    }
    let total = manifest.tensors.iter().map(bytes).sum::<Bytes>();
    text.push_str(&format!("{total} in all\n"));
    say(&text)?;
    if arguments.verify {
        let count = checkpoint.manifest().tensors.len();
        (0..count).try_for_each(|tensor| checkpoint.verify(tensor))?;
        say(&format!("all {} are as they were written\n", counted(count, "tensor")))?;
    }
    Ok(())
}

/// Writes a checkpoint's weights.
pub(crate) fn convert(arguments: &ConvertArguments) -> Result<(), CliError> {
    let ConvertArguments { run, to, source, out, dtype, shard_size } = arguments;
    if let Some(Source::Deepspeed) = source {
        return Err(CliError::Data(format!(
            "checkpoints of DeepSpeed are read by the Python package, not by this command: where \
             it is installed, run `python -m oxizero.convert_deepspeed {} {}`",
            run.display(),
            out.display()
        )));
    }
    let Some(Format::Safetensors) = to else { unreachable!("clap wants --to or --from") };
    let options = ExportOptions { dtype: *dtype, shard_bytes: *shard_size };
    let names = open(run)?.export(out, options)?;
    let list: String = names.iter().map(|name| format!("{}\n", out.join(name).display())).collect();
    say(&list)
}

fn line(tensor: &Tensor) -> String {
    let shape: Vec<_> = tensor.shape.iter().map(usize::to_string).collect();
    let (shape, bytes) = (shape.join(" x "), bytes(tensor).to_string());
    let pieces = counted(tensor.pieces.len(), "piece");
    format!("{:<6} {shape:<16} {bytes:>10} {pieces:>10}  {tensor}\n", tensor.dtype.to_string())
}

fn bytes(tensor: &Tensor) -> Bytes {
    Bytes(tensor.numel().0 * tensor.element_bytes())
}

/// The schedule that training had. The engine's is constant where a front-end sets learning rates
/// itself; a run of this command says in its configuration what it has.
fn schedule(manifest: &Manifest) -> &str {
    let schedule = &manifest.training.schedule;
    let is_run = manifest.caller.get("config").is_some();
    match !is_run && *schedule == LrSchedule::constant(0).to_string() {
        true => "learning rates set by the front-end",
        false => schedule,
    }
}

fn say(text: &str) -> Result<(), CliError> {
    io::stdout().lock().write_all(text.as_bytes()).map_err(CliError::output("standard output"))
}

fn dtype(text: &str) -> Result<Dtype, String> {
    match text {
        "f32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::BF16),
        "f16" => Ok(Dtype::F16),
        _ => Err("allowed: f32, bf16, f16".into()),
    }
}

/// Reads a number of bytes, for clap: `5GB`, `500 MB`, `4096`.
fn size(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let times = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        _ => return Err("allowed: a number of bytes, KB, MB, GB, KiB, MiB or GiB".into()),
    };
    let bytes = number.parse().ok().and_then(|number: usize| number.checked_mul(times));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "allowed: a number of bytes above 0".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_that_the_engine_has_not_is_the_front_ends() {
        let of = |schedule: &str, caller: &str| {
            let text = format!(
                r#"{{"block_bytes": 1, "params": [], "tensors": [], "ranks": [],
                    "caller": {caller}, "training": {{"applied_steps": 0, "loss_scaler": null,
                    "rule": "", "schedule": "{schedule}", "groups": []}}}}"#
            );
            let manifest: Manifest = serde_json::from_str(&text).unwrap();
            super::schedule(&manifest).to_owned()
        };
        let none = LrSchedule::constant(0).to_string();
        assert_eq!(of(&none, "{}"), "learning rates set by the front-end");
        assert_eq!(of(&none, r#"{"config": ""}"#), none);
        assert_eq!(of("linear", "{}"), "linear");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("2 MiB"), Ok(2 << 20));
        assert_eq!(size("17"), Ok(17));
        for wrong in ["", "0", "GB", "-1", "1.5GB", "5 apples", "99999999999999999999GB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
