//! TOML in, or one error that names the field.

use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;
use toml::{Table, Value};

use super::Config;
use crate::{ConfigError, DType, Precision};

pub(super) fn from_toml(text: &str) -> Result<Config, ConfigError> {
    let table: Table = text.parse().map_err(|error| syntax(text, &error))?;
    let known = serde_json::to_value(Config::default()).expect("a configuration is plain data");
    refuse_unknown(&table, &known, "", &known)?;
    let value = Value::Table(table.clone());
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let value = value_at(&table, &field);
        ConfigError::Value { field, value, allowed: allowed(error.inner().message()) }
    })
}

/// Reads the precision; what is absent follows the model's dtype.
pub(super) fn precision<'de, D: Deserializer<'de>>(from: D) -> Result<Precision, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Given {
        model: Option<DType>,
        reduce: Option<DType>,
        accumulate: Option<DType>,
        master: Option<DType>,
    }
    let given = Given::deserialize(from)?;
    let model = given.model.unwrap_or(Config::default().precision.model);
    let default = Precision::of_model(model);
    Ok(Precision {
        model,
        reduce: given.reduce.unwrap_or(default.reduce),
        accumulate: given.accumulate.unwrap_or(default.accumulate),
        master: given.master.unwrap_or(default.master),
    })
}

/// One line: what the parser says, and where.
fn syntax(text: &str, error: &toml::de::Error) -> ConfigError {
    let place = error.span().map(|span| {
        let before = &text[..span.start.min(text.len())];
        format!("line {}: ", before.matches('\n').count() + 1)
    });
    let why = error.message().replace('\n', ", ");
    ConfigError::Syntax { why: place.unwrap_or_default() + &why }
}

/// Refuses the first name of `table` that `known` lacks. An optional field's default is null, so
/// the names of `known` are all there are.
fn refuse_unknown(table: &Table, known: &Json, path: &str, root: &Json) -> Result<(), ConfigError> {
    let Some(names) = known.as_object() else { return Ok(()) };
    for (name, value) in table {
        let field = format!("{path}{name}");
        let Some(inner) = names.get(name) else {
            let nearest = nearest(&field, root);
            return Err(ConfigError::UnknownField { field, nearest });
        };
        if let Some(section) = value.as_table() {
            refuse_unknown(section, inner, &format!("{field}."), root)?;
        }
    }
    Ok(())
}

/// The full path most like `field`: the same name elsewhere, or a similar one.
fn nearest(field: &str, root: &Json) -> Option<String> {
    const SIMILAR: f64 = 0.8;
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let likeness = |path: &str| {
        let whole = strsim::jaro_winkler(path, field);
        let name = strsim::jaro_winkler(&last(path), &last(field));
        (name, whole)
    };
    let mut paths = Vec::new();
    collect_paths(root, "", &mut paths);
    let scored = paths.into_iter().map(|path| (likeness(&path), path));
    let best = scored.max_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    best.filter(|((name, _), _)| *name >= SIMILAR).map(|(_, path)| path)
}

fn collect_paths(known: &Json, path: &str, into: &mut Vec<String>) {
    for (name, inner) in known.as_object().into_iter().flatten() {
        let field = format!("{path}{name}");
        collect_paths(inner, &format!("{field}."), into);
        into.push(field);
    }
}

/// The value that was given for `field`, as TOML writes it.
fn value_at(table: &Table, field: &str) -> String {
    let mut parts = field.split('.');
    let first = parts.next().and_then(|name| table.get(name));
    // An element of an array has a path such as `betas[1]`; the array is shown as a whole.
    let value = parts.try_fold(first, |value, name| match value {
        Some(Value::Table(inner)) => Some(inner.get(name.split('[').next().unwrap_or(name))),
        _ => None,
    });
    value.flatten().map(ToString::to_string).unwrap_or_default()
}

/// What serde's message says was expected, in the words of a configuration.
fn allowed(message: &str) -> String {
    let expected = ["allowed: ", "expected one of ", "expected "]
        .iter()
        .find_map(|mark| message.split_once(mark))
        .map_or(message, |(_, expected)| expected);
    match expected.trim() {
        "usize" | "u64" => "a whole number, 0 or more".into(),
        "u8" => "0, 1, 2, 3".into(), // a stage is the only one
        "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        expected if expected.starts_with("struct ") => "a section of fields".into(),
        expected => expected.replace('`', "").replace('\n', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let error = Config::from_toml(text).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_nearest() {
        let said = refusal("[model]\nhiden_size = 64");
        assert_eq!(said, "unknown field `model.hiden_size`; did you mean `model.hidden_size`?");
        let said = refusal("lr = 1.0");
        assert_eq!(said, "unknown field `lr`; did you mean `optimizer.lr`?");
        let said = refusal("[optimiser]\nlr = 1.0");
        assert_eq!(said, "unknown field `optimiser`; did you mean `optimizer`?");
        let said = refusal("[zero]\nbucket_bytes = 1");
        assert_eq!(
            said,
            "unknown field `zero.bucket_bytes`; did you mean `zero.bucket_bytes_max`?"
        );
        assert_eq!(refusal("xyzzy = 1"), "unknown field `xyzzy`");
    }

    #[test]
    fn a_wrong_type_names_field_value_and_what_is_allowed() {
        let cases = [
            ("[train]\nsteps = 'many'", "`train.steps = \"many\"`", "a whole number, 0 or more"),
            ("[train]\nsteps = -1", "`train.steps = -1`", "a whole number, 0 or more"),
            ("[train]\nsteps = 1.5", "`train.steps = 1.5`", "a whole number, 0 or more"),
            ("optimizer.lr = 'fast'", "`optimizer.lr = \"fast\"`", "a number"),
            ("optimizer.betas = [0.9]", "`optimizer.betas", "an array of length 2"),
            ("optimizer.betas = [0.9, 'x']", "`optimizer.betas[1] = [0.9, \"x\"]`", "a number"),
            ("optimizer.kind = 'lion'", "`optimizer.kind = \"lion\"`", "adamw, adam, sgd"),
            ("model.tied = 1", "`model.tied = 1`", "true or false"),
            ("model = 3", "`model = 3`", "a section of fields"),
            ("precision.model = 'f64'", "`precision.model = \"f64\"`", "f32, bf16, f16"),
            ("zero.stage = 4", "`zero.stage = 4`", "allowed: 0, 1, 2, 3"),
            ("zero.stage = 'two'", "`zero.stage = \"two\"`", "allowed: 0, 1, 2, 3"),
        ];
        for (text, given, allowed) in cases {
            let said = refusal(text);
            assert!(said.contains(given) && said.ends_with(allowed), "{text}: {said}");
        }
    }

    #[test]
    fn text_that_is_no_toml_is_one_line_with_a_place() {
        let said = refusal("[model]\nlayers = = 3");
        assert!(said.contains("line 2"), "{said}");
    }
}
