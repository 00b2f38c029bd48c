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
    let value = comparable(Value::Table(table.clone()), &known);
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

/// Refuses the first name of `table` that `known` lacks, and the first section that is none. An
/// optional field's default is null, so the names of `known` are all there are.
fn refuse_unknown(table: &Table, known: &Json, path: &str, root: &Json) -> Result<(), ConfigError> {
    let Some(names) = known.as_object() else { return Ok(()) };
    for (name, value) in table {
        let field = format!("{path}{}", key(name));
        let Some(inner) = names.get(name) else {
            let nearest = nearest(&field, root);
            return Err(ConfigError::UnknownField { field, nearest });
        };
        match value.as_table() {
            Some(section) => refuse_unknown(section, inner, &format!("{field}."), root)?,
            None if inner.is_object() => {
                let allowed = format!("a section of fields, [{field}]");
                return Err(ConfigError::Value { field, value: shown(value), allowed });
            }
            None => {}
        }
    }
    Ok(())
}

/// What serde would accept though it is of another type, or refuse in words that do not help,
/// becomes what it refuses with the list of what is allowed. Names of values may be written in any
/// case, as papers (`AdamW`) and frameworks (`BF16`) do.
fn comparable(value: Value, known: &Json) -> Value {
    match value {
        // A field whose default is a string is one of several names; a path has no default.
        Value::String(name) if known.is_string() => Value::String(name.to_ascii_lowercase()),
        _ if known.is_string() => Value::String(String::new()),
        Value::Table(table) => {
            let inner = |(name, value): (String, Value)| {
                let value = comparable(value, known.get(&name).unwrap_or(&Json::Null));
                (name, value)
            };
            Value::Table(table.into_iter().map(inner).collect())
        }
        Value::Datetime(_) => Value::Array(Vec::new()), // it would be taken as a string
        value => value,
    }
}

/// The full path most like `field`: the same name elsewhere, or a similar one.
fn nearest(field: &str, root: &Json) -> Option<String> {
    const SIMILAR: f64 = 0.8;
    let field = &field.replace('"', "");
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

/// A key as TOML writes it: quoted, unless it is of letters, digits and dashes.
fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !name.is_empty() && name.chars().all(is_bare) {
        true => name.to_owned(),
        false => format!("{name:?}"),
    }
}

/// The value that was given for `field`, such as `optimizer.betas[1]`.
fn value_at<'a>(table: &'a Table, field: &str) -> String {
    let mut parts = field.split(['.', '[']);
    let first = parts.next().and_then(|name| table.get(name));
    let inner = |value: &'a Value, part: &str| match value {
        Value::Table(inner) => inner.get(part),
        Value::Array(elements) => elements.get(part.strip_suffix(']')?.parse::<usize>().ok()?),
        _ => None,
    };
    first.and_then(|first| parts.try_fold(first, inner)).map(shown).unwrap_or_default()
}

/// A value as TOML could write it, on one line that is not long.
fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = match value {
        Value::String(text) => format!("{text:?}"),
        Value::Float(number) => format!("{number:?}"),
        Value::Array(elements) => {
            format!("[{}]", elements.iter().map(shown).collect::<Vec<_>>().join(", "))
        }
        Value::Table(table) => {
            let field = |(name, value): (&String, _)| format!("{} = {}", key(name), shown(value));
            format!("{{{}}}", table.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        value => value.to_string(),
    };
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
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
        "fewer elements in array" => "an array of length 2".into(), // the betas are the only one
        expected => expected.replace('`', "").replace('\n', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: &str = "adamw, adam, lion, adagrad, sgd";

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
        assert_eq!(refusal("\"\" = 1"), "unknown field `\"\"`");
        assert_eq!(refusal("\"a\\nb\" = 1"), "unknown field `\"a\\nb\"`");
        let said = refusal("\"model.layers\" = 3");
        assert_eq!(said, "unknown field `\"model.layers\"`; did you mean `model.layers`?");
    }

    #[test]
    fn a_wrong_type_names_field_value_and_what_is_allowed() {
        let cases = [
            ("[train]\nsteps = 'many'", "`train.steps = \"many\"`", "a whole number, 0 or more"),
            ("[train]\nsteps = -1", "`train.steps = -1`", "a whole number, 0 or more"),
            ("[train]\nsteps = 1.5", "`train.steps = 1.5`", "a whole number, 0 or more"),
            ("optimizer.lr = 'fast'", "`optimizer.lr = \"fast\"`", "a number"),
            ("optimizer.betas = [0.9]", "`optimizer.betas", "an array of length 2"),
            ("optimizer.betas = [0.9, 'x']", "`optimizer.betas[1] = \"x\"`", "a number"),
            ("optimizer.betas = [0.5, 0.5, 0.5]", "[0.5, 0.5, 0.5]`", "an array of length 2"),
            ("optimizer.kind = ['sgd']", "`optimizer.kind = [\"sgd\"]`", KINDS),
            ("optimizer.kind = {}", "`optimizer.kind = {}`", KINDS),
            ("precision.model = 1", "`precision.model = 1`", "f32, bf16, f16"),
            ("data.path = 1979-05-27", "`data.path = 1979-05-27`", "a string"),
            ("run.ranks = 1979-05-27", "`run.ranks = 1979-05-27`", "a whole number, 0 or more"),
            ("train.steps = \"1\\n2\"", "`train.steps = \"1\\n2\"`", "a whole number, 0 or more"),
            ("train.steps = 1e300", "`train.steps = 1e300`", "a whole number, 0 or more"),
            ("optimizer.kind = 'lamb'", "`optimizer.kind = \"lamb\"`", KINDS),
            ("model.tied = 1", "`model.tied = 1`", "true or false"),
            ("model = 3", "`model = 3`", "a section of fields, [model]"),
            ("model = []", "`model = []`", "a section of fields, [model]"),
            ("zero = [3]", "`zero = [3]`", "a section of fields, [zero]"),
            ("[[model]]\nlayers = 1", "`model = [{layers = 1}]`", "a section of fields, [model]"),
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
    fn a_name_is_read_in_any_case_and_refused_as_it_was_written() {
        let names = "optimizer.kind = 'SGD'\nschedule.kind = 'Linear'\nprecision.model = 'F16'\n\
                     run.launch = 'THREADS'\ntrain.recompute = 'Never'\ndata.path = 'My Text'";
        let config = Config::from_toml(names).unwrap();
        let lower = names.to_lowercase().replace("my text", "My Text");
        assert_eq!(config, Config::from_toml(&lower).unwrap());
        assert_eq!(Config::from_toml("optimizer.kind = 'AdamW'").unwrap(), Config::default());
        assert!(refusal("optimizer.kind = 'LAMB'").contains("`optimizer.kind = \"LAMB\"`"));
    }

    #[test]
    fn a_long_value_is_cut_between_characters() {
        let said = refusal(&format!("run.ranks = '{}'", "ä".repeat(1000)));
        assert!(said.contains("ä...`") && said.len() < 250, "{said}");
    }

    #[test]
    fn text_that_is_no_toml_is_one_line_with_a_place() {
        let said = refusal("[model]\nlayers = = 3");
        assert!(said.contains("line 2"), "{said}");
    }
}
