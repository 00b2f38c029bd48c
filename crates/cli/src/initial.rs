//! The weights that a run starts from, where it is given some, and the model that they are of.

use std::path::{Path, PathBuf};

use oxizero_checkpoint::{CheckpointError, Dtype, WeightFiles};
use oxizero_core::config::ModelConfig;
use oxizero_core::{Config, ParamSpec};
use serde_json::Value;

use crate::args::read_text;
use crate::error::CliError;
use crate::setup;

const CONFIG: &str = "config.json";

/// What a run says of its own, whatever the files tell.
const OF_THE_RUN: [&str; 3] = ["context", "dropout", "compute"];

/// What old files hold beside the weights: angles and masks, which are calculated here.
const CALCULATED: [&str; 3] = ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];

/// What names of GPT-2's weights begin with, unless they were written without a head.
const GPT2_PREFIX: &str = "transformer.";

/// A model as the `config.json` beside its weights tells it.
#[derive(Debug)]
pub(crate) struct Told {
    path: PathBuf,
    model: ModelConfig,
}

/// What `config.json` of the folder tells, if it is a folder that has one.
pub(crate) fn told(folder: &Path) -> Result<Option<Told>, CliError> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Ok(None);
    }
    let model = ModelConfig::from_hub(&read_text(&path)?);
    let model = model.map_err(|why| CliError::ConfigFile { path: path.clone(), why })?;
    Ok(Some(Told { path, model }))
}

impl Told {
    /// Makes the model this one, but for what is the run's own. Fields that the configuration has
    /// `stated` must agree.
    pub(crate) fn put_in(self, model: &mut ModelConfig, stated: &[String]) -> Result<(), CliError> {
        let json = |model: &ModelConfig| {
            serde_json::to_value(model).expect("a configuration is plain data")
        };
        let (given, told) = (json(model), json(&self.model));
        let differs = |name: &&String| {
            !OF_THE_RUN.contains(&name.as_str()) && differ(&given[name], &told[name])
        };
        if let Some(name) = stated.iter().find(differs) {
            return Err(CliError::Data(format!(
                "model.{name} is {} in the configuration, and {} by `{}`; leave it out there",
                given[name],
                told[name],
                self.path.display()
            )));
        }
        let ModelConfig { context, dropout, compute, .. } = *model;
        let positions = self.model.context;
        let is_stated = stated.iter().any(|name| name == "context");
        if is_stated && context > positions {
            return Err(CliError::Data(format!(
                "model.context is {context} in the configuration, and the model has {positions} \
                 positions by `{}`",
                self.path.display()
            )));
        }
        let context = context.min(positions);
        *model = ModelConfig { context, dropout, compute, ..self.model };
        Ok(())
    }
}

/// Whether two fields differ; numbers are compared by value.
fn differ(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a != b,
        _ => a != b,
    }
}

/// Refuses files whose tensors are not those of the configured model, by name and shape.
pub(crate) fn check(path: &Path, config: &Config) -> Result<(), CliError> {
    let files = WeightFiles::open(path)?;
    let model = setup::model(config).map_err(|error| CliError::Start(error.to_string()))?;
    let mut problems: Vec<_> =
        model.specs.iter().filter_map(|spec| problem(&files, spec)).collect();
    let is_known = |name: &&str| {
        CALCULATED.iter().any(|end| name.ends_with(end))
            || model.specs.iter().any(|spec| names(spec).any(|known| known == *name))
    };
    let unknown = files.names().filter(|name| !is_known(name));
    problems.extend(unknown.map(|name| format!("`{name}` is none of the model's")));
    let Some(first) = problems.first() else { return Ok(()) };
    let others = match problems.len() - 1 {
        0 => String::new(),
        others => format!(" (and {others} more)"),
    };
    let why = match path.join(CONFIG).is_file() {
        true => "its config.json tells another model",
        false => "the section [model] of the configuration is to describe the model of the file",
    };
    Err(CliError::Data(format!("`{}`: {first}{others}; {why}", path.display())))
}

fn problem(files: &WeightFiles, spec: &ParamSpec) -> Option<String> {
    let name = &spec.name;
    let Some((dtype, shape)) = names(spec).find_map(|name| files.find(name)) else {
        return Some(format!("it has no `{name}`"));
    };
    if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
        return Some(format!("`{name}` has elements of {dtype}, not F32, BF16 or F16"));
    }
    let expected = &spec.shape;
    (shape != expected).then(|| format!("`{name}` has the shape {shape:?}, not {expected:?}"))
}

/// The names that a parameter may have in files.
fn names(spec: &ParamSpec) -> impl Iterator<Item = &str> {
    spec.names().chain(spec.names().filter_map(|name| name.strip_prefix(GPT2_PREFIX)))
}

/// Reads a parameter's weights, under the first of its names that the files have.
pub(crate) fn read(
    files: &WeightFiles,
    spec: &ParamSpec,
    values: &mut [f32],
) -> Result<(), CheckpointError> {
    let name = names(spec).find(|name| files.find(name).is_some()).unwrap_or(&spec.name);
    files.read(name, values)
}
