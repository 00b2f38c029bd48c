//! What a configuration can be refused for.

/// A configuration that the engine does not run. Every variant names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value outside what the field allows.
    #[error("`{field} = {value}` is not possible; allowed: {allowed}")]
    Value {
        /// The field's full path, such as `optimizer.lr`.
        field: String,
        /// What was given.
        value: String,
        /// What may be given.
        allowed: String,
    },
    /// A field that does not exist.
    #[error("unknown field `{field}`{}", suggestion(nearest))]
    UnknownField {
        /// The field's full path.
        field: String,
        /// The existing field with the most similar name, if one is similar.
        nearest: Option<String>,
    },
    /// A field that exists elsewhere, or a value of it, that does not work here.
    #[error("`{field} = {value}` is refused: {reason}; {instead}")]
    Refused {
        /// The field's full path.
        field: String,
        /// What was given.
        value: String,
        /// Why it does not work.
        reason: String,
        /// The nearest that works.
        instead: String,
    },
    /// Two fields that do not work together.
    #[error("`{first}` and `{second}` do not work together: {advice}")]
    Conflict {
        /// One field and its value.
        first: String,
        /// The other field and its value.
        second: String,
        /// Why, and the nearest that works.
        advice: String,
    },
    /// The text is not what the format asks for.
    #[error("the configuration cannot be read: {why}")]
    Syntax {
        /// Where and why.
        why: String,
    },
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}
