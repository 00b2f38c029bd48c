//! The weights that a run starts from, where it is given some.

use std::path::Path;

use oxizero_checkpoint::{CheckpointError, Dtype, WeightFiles};
use oxizero_core::{Config, ParamSpec};

use crate::error::CliError;
use crate::setup;

/// What old files of Llama models hold beside the weights: angles, which are calculated here.
const CALCULATED: &str = "rotary_emb.inv_freq";

/// Refuses files whose tensors are not those of the configured model, by name and shape.
pub(crate) fn check(path: &Path, config: &Config) -> Result<(), CliError> {
    let files = WeightFiles::open(path)?;
    let model = setup::model(config).map_err(|error| CliError::Start(error.to_string()))?;
    let mut problems: Vec<_> =
        model.specs.iter().filter_map(|spec| problem(&files, spec)).collect();
    let is_known = |name: &&str| {
        name.ends_with(CALCULATED)
            || model.specs.iter().any(|spec| spec.names().any(|known| known == *name))
    };
    let unknown = files.names().filter(|name| !is_known(name));
    problems.extend(unknown.map(|name| format!("`{name}` is none of the model's")));
    let Some(first) = problems.first() else { return Ok(()) };
    let others = match problems.len() - 1 {
        0 => String::new(),
        others => format!(" (and {others} more)"),
    };
    let why = "the section [model] of the configuration is to describe the model of the file";
    Err(CliError::Data(format!("`{}`: {first}{others}; {why}", path.display())))
}

fn problem(files: &WeightFiles, spec: &ParamSpec) -> Option<String> {
    let name = &spec.name;
    let Some((dtype, shape)) = spec.names().find_map(|name| files.find(name)) else {
        return Some(format!("it has no `{name}`"));
    };
    if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
        return Some(format!("`{name}` has elements of {dtype}, not F32, BF16 or F16"));
    }
    let expected = &spec.shape;
    (shape != expected).then(|| format!("`{name}` has the shape {shape:?}, not {expected:?}"))
}

/// Reads a parameter's weights, under the first of its names that the files have.
pub(crate) fn read(
    files: &WeightFiles,
    spec: &ParamSpec,
    values: &mut [f32],
) -> Result<(), CheckpointError> {
    let name = spec.names().find(|name| files.find(name).is_some()).unwrap_or(&spec.name);
    files.read(name, values)
}
