//! A model's `config.json`, as it lies beside its weights on the Hugging Face hub.

use serde_json::{Map, Value};

use super::{Config, ModelConfig, ModelKind};
use crate::ConfigError;

/// What changes nothing of the model: notes, training, generation, heads that are not taken.
/// Dropouts are among them, as they are the training's that made the weights.
const NO_MATTER: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "n_ctx",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// What only says which positions there are.
const DEFAULT_ROPE: &str = "default";

impl ModelConfig {
    /// The model that a `config.json` tells, where it is a `LlamaForCausalLM` or a
    /// `GPT2LMHeadModel`. Its context is as long as its positions; what is no part of the model
    /// (dropouts among it) is as by default. Values are not judged further: call
    /// [`validate`](Self::validate).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] by the name that `config.json` uses, for what is not there, has a value that
    /// this model does not do, or is not known.
    pub fn from_hub(text: &str) -> Result<Self, ConfigError> {
        let syntax = |why: String| ConfigError::Syntax { why };
        let value: Value = serde_json::from_str(text).map_err(|why| syntax(why.to_string()))?;
        let Value::Object(fields) = value else {
            return Err(syntax("it is no JSON object".into()));
        };
        let mut told = Told { fields, taken: NO_MATTER.to_vec() };
        let kind = match told.fields.get("model_type").and_then(Value::as_str) {
            Some("llama") => ModelKind::Llama,
            Some("gpt2") => ModelKind::Gpt2,
            _ => return Err(told.refusal("model_type", "\"llama\", \"gpt2\"")),
        };
        let config = match kind {
            ModelKind::Llama => llama(&mut told)?,
            ModelKind::Gpt2 => gpt2(&mut told)?,
        };
        told.refuse_rest()?;
        Ok(config)
    }
}

impl Config {
    /// The names in the section `[model]` of a text that [`from_toml`](Self::from_toml) reads.
    pub fn stated_in_model(text: &str) -> Vec<String> {
        let table: Option<toml::Table> = text.parse().ok();
        let model = table.as_ref().and_then(|table| table.get("model")?.as_table());
        model.into_iter().flat_map(toml::Table::keys).cloned().collect()
    }
}

fn llama(told: &mut Told) -> Result<ModelConfig, ConfigError> {
    told.architecture("LlamaForCausalLM")?;
    told.only("hidden_act", &["silu".into(), "swish".into()])?;
    told.only("attention_bias", &[false.into()])?;
    told.only("mlp_bias", &[false.into()])?;
    let (hidden_size, heads) = (told.size("hidden_size")?, told.size("num_attention_heads")?);
    if let Some(head) = told.optional_size("head_dim")?
        && head.checked_mul(heads) != Some(hidden_size)
    {
        let allowed = format!("hidden_size / num_attention_heads, of {hidden_size} / {heads}");
        return Err(told.refusal("head_dim", &allowed));
    }
    Ok(ModelConfig {
        kind: ModelKind::Llama,
        vocab_size: told.size("vocab_size")?,
        hidden_size,
        intermediate_size: told.size("intermediate_size")?,
        layers: told.size("num_hidden_layers")?,
        heads,
        kv_heads: told.optional_size("num_key_value_heads")?.unwrap_or(heads),
        context: told.size("max_position_embeddings")?,
        rope_theta: rope_theta(told)?,
        norm_eps: told.number("rms_norm_eps", 1e-6)?,
        tied: told.switch("tie_word_embeddings", false)?,
        ..ModelConfig::default()
    })
}

/// The base of the angles, which older files have at the top, and newer ones in a section of the
/// whole scheme. Schemes that stretch the angles are refused.
fn rope_theta(told: &mut Told) -> Result<f64, ConfigError> {
    let mut theta = told.number("rope_theta", 10_000.0)?;
    for section in ["rope_parameters", "rope_scaling"] {
        let Some(fields) = told.take(section).cloned() else { continue };
        let Value::Object(fields) = fields else {
            return Err(told.refusal(section, "a section, or null"));
        };
        let mut scheme = Told { fields, taken: Vec::new() };
        let plain = || vec![Value::from(DEFAULT_ROPE)];
        let inner = scheme
            .only("rope_type", &plain())
            .and_then(|()| scheme.only("type", &plain()))
            .and_then(|()| scheme.only("partial_rotary_factor", &[1.0.into(), 1.into()]))
            .and_then(|()| scheme.number("rope_theta", theta))
            .and_then(|inner| scheme.refuse_rest().map(|()| inner));
        theta = inner.map_err(|error| within(section, error))?;
    }
    Ok(theta)
}

fn gpt2(told: &mut Told) -> Result<ModelConfig, ConfigError> {
    told.architecture("GPT2LMHeadModel")?;
    told.only("activation_function", &["gelu_new".into(), "gelu_pytorch_tanh".into()])?;
    told.only("scale_attn_weights", &[true.into()])?;
    told.only("scale_attn_by_inverse_layer_idx", &[false.into()])?;
    told.only("reorder_and_upcast_attn", &[false.into()])?;
    told.only("add_cross_attention", &[false.into()])?;
    let (hidden_size, heads) = (told.size("n_embd")?, told.size("n_head")?);
    let positions = told.size("n_positions")?;
    Ok(ModelConfig {
        kind: ModelKind::Gpt2,
        vocab_size: told.size("vocab_size")?,
        hidden_size,
        intermediate_size: told.optional_size("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
        layers: told.size("n_layer")?,
        heads,
        kv_heads: heads,
        context: positions,
        positions: Some(positions),
        norm_eps: told.number("layer_norm_epsilon", 1e-5)?,
        tied: told.switch("tie_word_embeddings", true)?,
        ..ModelConfig::default()
    })
}

/// The fields of a section, and those that were understood. A null is as no field.
struct Told {
    fields: Map<String, Value>,
    taken: Vec<&'static str>,
}

impl Told {
    fn take(&mut self, name: &'static str) -> Option<&Value> {
        self.taken.push(name);
        self.fields.get(name).filter(|value| !value.is_null())
    }

    fn refusal(&self, name: &str, allowed: &str) -> ConfigError {
        let value = self.fields.get(name).unwrap_or(&Value::Null).to_string();
        ConfigError::Value { field: name.into(), value, allowed: allowed.into() }
    }

    fn optional_size(&mut self, name: &'static str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) if size > 0 => Ok(Some(size)),
            _ => Err(self.refusal(name, "a whole number above 0")),
        }
    }

    fn size(&mut self, name: &'static str) -> Result<usize, ConfigError> {
        let size = self.optional_size(name)?;
        size.ok_or_else(|| self.refusal(name, "a whole number above 0"))
    }

    fn number(&mut self, name: &'static str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.take(name) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.refusal(name, "a number"))
    }

    fn switch(&mut self, name: &'static str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.take(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.refusal(name, "true or false"))
    }

    /// Refuses values but those of this model, of which absence is one.
    fn only(&mut self, name: &'static str, values: &[Value]) -> Result<(), ConfigError> {
        let possible = self.take(name).is_none_or(|value| values.contains(value));
        let list: Vec<_> = values.iter().map(Value::to_string).collect();
        if possible { Ok(()) } else { Err(self.refusal(name, &list.join(", "))) }
    }

    fn architecture(&self, name: &str) -> Result<(), ConfigError> {
        let architectures = self.fields.get("architectures").filter(|value| !value.is_null());
        let possible = architectures.is_none_or(|value| *value == serde_json::json!([name]));
        let allowed = format!("[\"{name}\"]");
        if possible { Ok(()) } else { Err(self.refusal("architectures", &allowed)) }
    }

    /// Refuses what nobody asked for, unless it asks for nothing.
    fn refuse_rest(&self) -> Result<(), ConfigError> {
        let asks = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        let unknown =
            |(name, value): &(&String, &Value)| asks(value) && !self.taken.contains(&name.as_str());
        match self.fields.iter().find(unknown) {
            None => Ok(()),
            Some((field, _)) => {
                Err(ConfigError::UnknownField { field: field.clone(), nearest: None })
            }
        }
    }
}

/// The error of a field in a section.
fn within(section: &str, error: ConfigError) -> ConfigError {
    match error {
        ConfigError::Value { field, value, allowed } => {
            ConfigError::Value { field: format!("{section}.{field}"), value, allowed }
        }
        ConfigError::UnknownField { field, nearest } => {
            ConfigError::UnknownField { field: format!("{section}.{field}"), nearest }
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn small_llama() -> Value {
        json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300,
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 640,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true,
            "hidden_act": "silu", "attention_dropout": 0.1, "torch_dtype": "bfloat16",
        })
    }

    fn small_gpt2() -> Value {
        json!({
            "model_type": "gpt2", "vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 6,
            "n_positions": 64, "layer_norm_epsilon": 1e-6, "attn_pdrop": 0.1, "n_inner": null,
        })
    }

    fn with(mut json: Value, name: &str, value: Value) -> String {
        json[name] = value;
        json.to_string()
    }

    #[test]
    fn a_llama_is_what_its_file_tells() {
        let config = ModelConfig::from_hub(&small_llama().to_string()).unwrap();
        let expected = ModelConfig {
            vocab_size: 300,
            hidden_size: 48,
            intermediate_size: 80,
            layers: 3,
            heads: 6,
            kv_heads: 2,
            context: 640,
            rope_theta: 500_000.0,
            norm_eps: 1e-5,
            tied: true,
            ..ModelConfig::default()
        };
        assert_eq!(config, expected);
        let new_rope = json!({"rope_type": "default", "rope_theta": 7.0});
        let config = ModelConfig::from_hub(&with(small_llama(), "rope_parameters", new_rope));
        assert_eq!(config.unwrap().rope_theta, 7.0);
    }

    #[test]
    fn what_transformers_supplies_where_nothing_is_told() {
        let mut json = small_llama();
        for name in ["num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"] {
            json.as_object_mut().unwrap().remove(name);
        }
        let config = ModelConfig::from_hub(&json.to_string()).unwrap();
        assert_eq!((config.kv_heads, config.norm_eps, config.tied), (6, 1e-6, false));
        assert_eq!(config.rope_theta, 10_000.0);
    }

    #[test]
    fn a_gpt2_is_what_its_file_tells() {
        let config = ModelConfig::from_hub(&small_gpt2().to_string()).unwrap();
        let expected = ModelConfig {
            kind: ModelKind::Gpt2,
            vocab_size: 300,
            hidden_size: 48,
            intermediate_size: 192,
            layers: 3,
            heads: 6,
            kv_heads: 6,
            context: 64,
            positions: Some(64),
            norm_eps: 1e-6,
            tied: true,
            ..ModelConfig::default()
        };
        assert_eq!(config, expected);
        let config = ModelConfig::from_hub(&with(small_gpt2(), "n_inner", json!(100))).unwrap();
        assert_eq!(config.intermediate_size, 100);
    }

    #[test]
    fn what_the_model_does_not_do_is_refused_by_name() {
        let scaled = json!({"rope_type": "llama3", "factor": 8.0});
        let llama = [
            ("model_type", json!("mistral")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("head_dim", json!(16)),
            ("hidden_size", json!(null)),
            ("vocab_size", json!("many")),
            ("num_hidden_layers", json!(0)),
            ("rope_scaling", scaled),
            ("rope_parameters", json!({"rope_theta": 5.0, "beta_fast": 32})),
            ("rope_theta", json!("large")),
            ("tie_word_embeddings", json!(1)),
            ("quantization_config", json!({"bits": 4})),
            ("architectures", json!(["LlamaForSequenceClassification"])),
        ];
        let gpt2 = [
            ("activation_function", json!("relu")),
            ("scale_attn_weights", json!(false)),
            ("scale_attn_by_inverse_layer_idx", json!(true)),
            ("reorder_and_upcast_attn", json!(true)),
            ("add_cross_attention", json!(true)),
            ("n_positions", json!(null)),
            ("sliding_window", json!(8)),
        ];
        let llama = llama.map(|(name, value)| (name, with(small_llama(), name, value)));
        let gpt2 = gpt2.map(|(name, value)| (name, with(small_gpt2(), name, value)));
        for (name, text) in llama.into_iter().chain(gpt2) {
            let error = ModelConfig::from_hub(&text).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}")), "{name}: {error}");
        }
        for text in ["", "[]", "{}", "{\"model_type\": 3}"] {
            ModelConfig::from_hub(text).unwrap_err();
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not_refused() {
        for value in [json!(null), json!(false)] {
            ModelConfig::from_hub(&with(small_llama(), "new_in_2030", value)).unwrap();
        }
        ModelConfig::from_hub(&with(small_llama(), "head_dim", json!(8))).unwrap();
    }

    #[test]
    fn stated_fields_are_those_of_the_text() {
        let stated = Config::stated_in_model("[model]\nlayers = 3\ntied = true\n[run]\nranks = 2");
        assert_eq!(stated, ["layers", "tied"]);
        assert!(Config::stated_in_model("run.ranks = 2").is_empty());
    }
}
