//! One object of the file, from which fields are taken until none is left.

use serde_json::{Map, Value};

use crate::ConfigError;

/// The largest count: numbers in JSON are exact up to it.
const COUNT_MAX: f64 = (1_u64 << 53) as f64;

/// Of the value "auto".
const FILLED_IN_ELSEWHERE: &str = "nobody fills it in here: elsewhere transformers' Trainer and \
                                   accelerate do, and oxizero does not plug into them";

/// Names this alike are likely the same, mistyped.
const SIMILAR: f64 = 0.8;

/// What [`Section::numbers`] takes.
pub(super) const NUMBERS: &str = "a number, 0 or more, or a list of one for each optimizer group";

/// One number for all optimizer groups, or one for each.
pub(super) enum Numbers {
    One(f64),
    Each(Vec<f64>),
}

/// The fields of an object that have not been taken yet.
pub(super) struct Section {
    /// What stands before a field's name: `zero_optimization.`, or nothing.
    prefix: String,
    left: Map<String, Value>,
    /// The names that were asked for.
    known: Vec<&'static str>,
}

impl Section {
    pub(super) fn new(prefix: &str, fields: Map<String, Value>) -> Self {
        Self { prefix: prefix.into(), left: fields, known: Vec::new() }
    }

    /// The full name of a field.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field's value; `None` if it is absent or null.
    fn take(&mut self, name: &'static str, allowed: &str) -> Result<Option<Value>, ConfigError> {
        self.known.push(name);
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(auto)) if auto == "auto" => Err(ConfigError::Refused {
                field: self.path(name),
                value: "\"auto\"".into(),
                reason: FILLED_IN_ELSEWHERE.into(),
                instead: format!("write {allowed}, or leave the field out"),
            }),
            given => Ok(given),
        }
    }

    pub(super) fn value_error<T>(
        &self,
        name: &str,
        value: &Value,
        allowed: &str,
    ) -> Result<T, ConfigError> {
        let (field, allowed) = (self.path(name), allowed.to_owned());
        Err(ConfigError::Value { field, value: shown(value), allowed })
    }

    pub(super) fn switch(&mut self, name: &'static str) -> Result<Option<bool>, ConfigError> {
        const ALLOWED: &str = "true or false";
        match self.take(name, ALLOWED)? {
            None => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(on)),
            Some(other) => self.value_error(name, &other, ALLOWED),
        }
    }

    /// A number of 0 or more that float32 can hold.
    pub(super) fn number(&mut self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        self.number_that(name, "a number, 0 or more, and at most 3.4e38", |_| true)
    }

    /// The same, but nothing between 0 and the smallest normal float32.
    pub(super) fn normal(&mut self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        let allowed = "a number, 0 or more, that is normal as float32 (1.2e-38 to 3.4e38)";
        self.number_that(name, allowed, |number| number == 0.0 || is_normal(number))
    }

    /// A number above 0 that is normal in float32.
    pub(super) fn positive(&mut self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        let allowed = "a number above 0 that is normal as float32 (1.2e-38 to 3.4e38)";
        self.number_that(name, allowed, is_normal)
    }

    /// A number of 0 or more, and below 1.
    pub(super) fn below_one(&mut self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        self.number_that(name, "a number, 0 or more, and below 1", |number| number < 1.0)
    }

    fn number_that(
        &mut self,
        name: &'static str,
        allowed: &str,
        is_allowed: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.take(name, allowed)? else { return Ok(None) };
        match not_negative(&value).filter(|number| is_allowed(*number)) {
            None => self.value_error(name, &value, allowed),
            number => Ok(number),
        }
    }

    /// A finite number of either sign.
    pub(super) fn signed(&mut self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        const ALLOWED: &str = "a number";
        let Some(value) = self.take(name, ALLOWED)? else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            None => self.value_error(name, &value, ALLOWED),
            number => Ok(number),
        }
    }

    /// A number of 0 or more that float32 can hold, or a list of them.
    pub(super) fn numbers(&mut self, name: &'static str) -> Result<Option<Numbers>, ConfigError> {
        let Some(value) = self.take(name, NUMBERS)? else { return Ok(None) };
        let numbers = match &value {
            Value::Array(given) => {
                given.iter().map(not_negative).collect::<Option<_>>().map(Numbers::Each)
            }
            given => not_negative(given).map(Numbers::One),
        };
        match numbers {
            None => self.value_error(name, &value, NUMBERS),
            numbers => Ok(numbers),
        }
    }

    /// A whole number of `min` or more; it may be written as 5e8.
    pub(super) fn count(
        &mut self,
        name: &'static str,
        min: usize,
    ) -> Result<Option<usize>, ConfigError> {
        Ok(self.integer(name, min as i64)?.map(|count| count as usize))
    }

    /// A whole number of `min` or more, which may be negative.
    pub(super) fn integer(
        &mut self,
        name: &'static str,
        min: i64,
    ) -> Result<Option<i64>, ConfigError> {
        let allowed = format!("a whole number, {min} or more");
        let Some(value) = self.take(name, &allowed)? else { return Ok(None) };
        match value.as_f64() {
            Some(count) if count.fract() == 0.0 && (min as f64..=COUNT_MAX).contains(&count) => {
                Ok(Some(count as i64))
            }
            _ => self.value_error(name, &value, &allowed),
        }
    }

    /// One of these names, in any case.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        name: &'static str,
        names: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let allowed = quoted(names);
        let Some(value) = self.take(name, &allowed)? else { return Ok(None) };
        let given = value.as_str().unwrap_or_default();
        match names.iter().find(|(known, _)| known.eq_ignore_ascii_case(given)) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => self.value_error(name, &value, &allowed),
        }
    }

    /// One of these names, which the file must give.
    pub(super) fn required_one_of<T: Copy>(
        &mut self,
        name: &'static str,
        names: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        match self.one_of(name, names)? {
            Some(meaning) => Ok(meaning),
            None => self.value_error(name, &Value::Null, &quoted(names)),
        }
    }

    /// Refuses names that others know, each with the reason and what works.
    pub(super) fn refuse_names(
        &self,
        name: &str,
        refused: &[(&[&str], &str, &str)],
    ) -> Result<(), ConfigError> {
        let given = self.left.get(name).and_then(Value::as_str).unwrap_or_default();
        let is_given = |known: &&str| known.eq_ignore_ascii_case(given);
        match refused.iter().find(|(names, ..)| names.iter().any(is_given)) {
            None => Ok(()),
            Some((_, reason, instead)) => Err(ConfigError::Refused {
                field: self.path(name),
                value: format!("{given:?}"),
                reason: (*reason).into(),
                instead: (*instead).into(),
            }),
        }
    }

    /// Two numbers of 0 or more, and below 1.
    pub(super) fn betas(&mut self, name: &'static str) -> Result<Option<[f64; 2]>, ConfigError> {
        const ALLOWED: &str = "two numbers, 0 or more and below 1, such as [0.9, 0.999]";
        let Some(value) = self.take(name, ALLOWED)? else { return Ok(None) };
        let beta = |value: &Value| not_negative(value).filter(|beta| *beta < 1.0);
        let numbers: Option<Vec<f64>> =
            value.as_array().and_then(|pair| pair.iter().map(beta).collect());
        match numbers.as_deref() {
            Some([first, second]) => Ok(Some([*first, *second])),
            _ => self.value_error(name, &value, ALLOWED),
        }
    }

    /// Text that is not empty, such as a path.
    pub(super) fn text(&mut self, name: &'static str) -> Result<Option<String>, ConfigError> {
        const ALLOWED: &str = "text in quotes";
        match self.take(name, ALLOWED)? {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(other) => self.value_error(name, &other, ALLOWED),
        }
    }

    /// A list of names; empty if it is absent.
    pub(super) fn strings(&mut self, name: &'static str) -> Result<Vec<String>, ConfigError> {
        const ALLOWED: &str = "a list of names";
        let Some(value) = self.take(name, ALLOWED)? else { return Ok(Vec::new()) };
        let names = value.as_array().and_then(|names| {
            names.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        names.map_or_else(|| self.value_error(name, &value, ALLOWED), Ok)
    }

    /// The fields of an inner object; none if it is absent.
    pub(super) fn section(&mut self, name: &'static str) -> Result<Option<Self>, ConfigError> {
        const ALLOWED: &str = "an object of fields";
        match self.take(name, ALLOWED)? {
            None => Ok(None),
            Some(Value::Object(fields)) => {
                Ok(Some(Self::new(&format!("{}.", self.path(name)), fields)))
            }
            Some(other) => self.value_error(name, &other, ALLOWED),
        }
    }

    /// The fields of an inner object, which may be absent.
    pub(super) fn inner(&mut self, name: &'static str) -> Result<Self, ConfigError> {
        let empty = Self::new(&format!("{}.", self.path(name)), Map::new());
        Ok(self.section(name)?.unwrap_or(empty))
    }

    /// A switch with one position that works.
    pub(super) fn only(
        &mut self,
        name: &'static str,
        works: bool,
        reason: &str,
    ) -> Result<(), ConfigError> {
        match self.switch(name)? {
            Some(on) if on != works => Err(ConfigError::Refused {
                field: self.path(name),
                value: on.to_string(),
                reason: reason.into(),
                instead: format!("write {works}, or leave the field out"),
            }),
            _ => Ok(()),
        }
    }

    /// Features that may only be off, each with the reason: false, zero, null, or an object that is
    /// empty, or whose `enabled` is false or whose `device` is none.
    pub(super) fn off(&mut self, features: &[(&'static str, &str)]) -> Result<(), ConfigError> {
        for (name, reason) in features {
            self.known.push(name);
            let Some(value) = self.left.remove(*name) else { continue };
            let switch = value.get("enabled").unwrap_or(&value);
            let nowhere = value.get("device").is_some_and(|device| device == "none");
            let is_empty = value.as_object().is_some_and(Map::is_empty);
            let is_off = switch.is_null() || *switch == Value::Bool(false) || nowhere || is_empty;
            if !is_off && switch.as_f64() != Some(0.0) {
                return Err(ConfigError::Refused {
                    field: self.path(name),
                    value: shown(&value),
                    reason: (*reason).into(),
                    instead: "leave the field out".into(),
                });
            }
        }
        Ok(())
    }

    /// Refuses what is left: nobody knows it.
    pub(super) fn end(self) -> Result<(), ConfigError> {
        let Some(name) = self.left.keys().next() else { return Ok(()) };
        let likeness = |known: &&str| strsim::jaro_winkler(known, name);
        let nearest = self.known.iter().copied().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        let nearest = nearest.filter(|known| likeness(known) >= SIMILAR);
        let nearest = nearest.map(|known| self.path(known));
        Err(ConfigError::UnknownField { field: self.path(name), nearest })
    }
}

/// A number of 0 or more that float32, in which tensors are updated, can hold.
fn not_negative(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| *number >= 0.0 && (*number as f32).is_finite())
}

fn is_normal(number: f64) -> bool {
    number > 0.0 && (number as f32).is_normal()
}

fn quoted<T>(names: &[(&str, T)]) -> String {
    names.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// A value on one line that is not long.
pub(super) fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
