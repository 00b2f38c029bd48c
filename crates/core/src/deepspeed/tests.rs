//! Configurations that are read, and those that are refused.

use super::*;

fn read(text: &str) -> Result<DeepSpeedConfig, ConfigError> {
    DeepSpeedConfig::from_json(text, WorldSize::new(2).unwrap())
}

fn refusal(text: &str) -> String {
    read(text).unwrap_err().to_string()
}

#[test]
fn a_configuration_as_people_have_it_is_honoured() {
    let config = read(
        r#"{"train_batch_size": 48, "gradient_accumulation_steps": 3, "gradient_clipping": 1.0,
            "steps_per_print": 10, "wall_clock_breakdown": false, "prescale_gradients": false,
            "flops_profiler": {"enabled": false, "profile_step": 1},
            "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0},
            "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": true,
                "allgather_bucket_size": 2e8, "contiguous_gradients": true,
                "reduce_scatter": true, "offload_optimizer": null},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95],
                "eps": 1e-8, "weight_decay": 0.1}}}"#,
    )
    .unwrap();
    let adam = AdamSettings { betas: [0.9, 0.95], eps: 1e-8 };
    let expected = DeepSpeedConfig {
        stage: Stage::Zero2,
        batch: BatchSizes { micro: Some(8), accumulation: 3, train: Some(48) },
        model_dtype: Some(DType::Bf16),
        reduce: Some(DType::F32),
        accumulate: DType::F32,
        loss_scaling: LossScaling::default(),
        check_finite: true,
        clip_norm: Some(1.0),
        bucket_numel_max: Numel(200_000_000),
        optimizer: Some(OptimizerSettings {
            lr: 3e-4,
            weight_decay: 0.1,
            rule: RuleSettings::AdamW(adam),
        }),
        steps_per_print: Some(10),
        last_batch: LastBatch::Kept,
    };
    assert_eq!(config, expected);
}

#[test]
fn two_of_three_batch_sizes_give_the_third() {
    let sizes = |text: &str| {
        let BatchSizes { micro, accumulation, train } = read(text).unwrap().batch;
        (micro, accumulation, train)
    };
    let (micro, train) = ("\"train_micro_batch_size_per_gpu\": 4", "\"train_batch_size\": 24");
    let accumulation = "\"gradient_accumulation_steps\": 3";
    let all = (Some(4), 3, Some(24));
    assert_eq!(sizes(&format!("{{{micro}, {train}}}")), all);
    assert_eq!(sizes(&format!("{{{micro}, {accumulation}}}")), all);
    assert_eq!(sizes(&format!("{{{train}, {accumulation}}}")), all);
    assert_eq!(sizes(&format!("{{{train}, {accumulation}, {micro}}}")), all);
    assert_eq!(sizes(&format!("{{{micro}}}")), (Some(4), 1, Some(8)));
    assert_eq!(sizes(&format!("{{{train}}}")), (Some(12), 1, Some(24)));
    assert_eq!(sizes("{}"), (None, 1, None));
    assert_eq!(sizes(&format!("{{{accumulation}}}")), (None, 3, None));
    for text in [
        r#"{"train_batch_size": 25, "gradient_accumulation_steps": 3}"#,
        r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 5}"#,
        r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2}"#,
        r#"{"train_batch_size": 25}"#,
    ] {
        let said = refusal(text);
        assert!(said.contains("`train_batch_size = 2") && said.contains("2 ranks"), "{said}");
    }
}

#[test]
fn nothing_is_ignored() {
    for (text, said) in [
        (r#"{"zero_optimisation": {}}"#, "did you mean `zero_optimization`?"),
        (r#"{"zero_optimization": {"stge": 2}}"#, "did you mean `zero_optimization.stage`?"),
        (r#"{"optimizer": {"type": "AdamW", "params": {"learning": 1}}}"#, "params.learning"),
        (r#"{"bf16": {"enable": true}}"#, "did you mean `bf16.enabled`?"),
        (r#"{"xyzzy": 1}"#, "unknown field `xyzzy`"),
    ] {
        assert!(refusal(text).contains(said), "{text}: {}", refusal(text));
    }
}

#[test]
fn what_is_refused_says_why_and_what_to_write() {
    for (text, field, why) in [
        (r#"{"train_batch_size": "auto"}"#, "`train_batch_size = \"auto\"`", "a whole number"),
        (r#"{"bf16": {"enabled": "auto"}}"#, "`bf16.enabled = \"auto\"`", "true or false"),
        (r#"{"prescale_gradients": true}"#, "`prescale_gradients = true`", "sums over ranks"),
        (r#"{"gradient_predivide_factor": 2.0}"#, "`gradient_predivide_factor = 2`", "the mean"),
        (r#"{"scheduler": {"type": "WarmupLR"}}"#, "`scheduler = {", "as lr_scheduler"),
        (r#"{"flops_profiler": {"enabled": true}}"#, "`flops_profiler = {", "leave the field"),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#,
            "`zero_optimization.offload_optimizer = {",
            "not available yet",
        ),
        (r#"{"zero_optimization": {"reduce_scatter": false}}"#, "reduce_scatter", "write true"),
        (r#"{"zero_optimization": {"stage": 4}}"#, "`zero_optimization.stage = 4`", "0, 1, 2, 3"),
        (r#"{"gradient_clipping": -1}"#, "`gradient_clipping = -1`", "0 or more"),
        (r#"{"gradient_accumulation_steps": 0}"#, "`gradient_accumulation_steps = 0`", "1 or"),
        (r#"{"communication_data_type": "int8"}"#, "`communication_data_type", "\"bf16\""),
        (r#"{"optimizer": {"type": "Lamb"}}"#, "`optimizer.type = \"Lamb\"`", "\"SGD\""),
        (r#"{"optimizer": {}}"#, "`optimizer.type = null`", "\"AdamW\""),
        (r#"{"bf16": true}"#, "`bf16 = true`", "an object of fields"),
    ] {
        let said = refusal(text);
        assert!(said.contains(field) && said.contains(why), "{text}: {said}");
    }
    assert!(refusal("[]").contains("must be an object"));
    assert!(refusal("{").contains("cannot be read"));
    let both = r#"{"bf16": {"enabled": true}, "fp16": {"enabled": true}}"#;
    assert!(refusal(both).contains("bf16 needs no loss scale"));
}

#[test]
fn losses_of_fp16_models_are_scaled_as_deepspeed_does() {
    let scaling = |text: &str| read(&format!("{{\"fp16\": {text}}}")).unwrap().loss_scaling;
    let LossScaling::Dynamic(dynamic) = scaling(r#"{"enabled": true}"#) else { panic!() };
    assert_eq!((dynamic.initial, dynamic.hysteresis, dynamic.minimum), (65536.0, 2, 1.0));
    let fixed = scaling(r#"{"enabled": true, "loss_scale": 128}"#);
    assert_eq!(fixed, LossScaling::Fixed(LossScale::new(128.0).unwrap()));
    assert_eq!(scaling(r#"{"initial_scale_power": 8}"#), LossScaling::default());
    assert!(read(r#"{"fp16": {"enabled": true, "initial_scale_power": 128}}"#).is_err());
}

#[test]
fn adam_decouples_weight_decay_unless_told_not_to() {
    let rule = |params: &str| {
        let text = format!(r#"{{"optimizer": {{"type": "Adam", "params": {params}}}}}"#);
        read(&text).unwrap().optimizer.unwrap().rule
    };
    assert!(matches!(rule("{}"), RuleSettings::AdamW(_)));
    assert!(matches!(rule(r#"{"adam_w_mode": false}"#), RuleSettings::Adam(_)));
}

#[test]
fn an_accumulator_is_no_narrower_than_what_travels() {
    let text = r#"{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}}"#;
    let narrow = read(text).unwrap().precision(DType::Bf16).unwrap();
    assert_eq!((narrow.reduce, narrow.accumulate), (DType::Bf16, DType::Bf16));
    let said = read(text).unwrap().precision(DType::F32).unwrap_err().to_string();
    assert!(said.contains("grad_accum_dtype = bf16"), "{said}");
}
