//! Configurations that are read, and those that are refused.

use super::*;
use crate::LossScale;

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
        leaf_modules: LeafModules::default(),
        model_save: ModelSave::default(),
        prefetch: Prefetch::default(),
        bucket_numel_max: Numel(200_000_000),
        optimizer: Some(OptimizerSettings {
            lr: 3e-4,
            weight_decay: 0.1,
            rule: RuleSettings::AdamW(adam),
        }),
        scheduler: None,
        notes: vec![],
        log_level: None,
        steps_per_print: Some(10),
        copies: WeightCopies::Ranks,
        last_batch: LastBatch::Kept,
        back_end: None,
        overlap: Some(Overlap::On),
        trace: None,
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
    let [micro, accumulation] =
        ["(train_micro_batch_size_per_gpu)", "(gradient_accumulation_steps)"];
    for (text, said) in [
        (
            r#"{"train_batch_size": 25, "gradient_accumulation_steps": 3}"#,
            format!("no multiple of 3 {accumulation} x 2 ranks = 6; correct"),
        ),
        (
            r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 5}"#,
            format!("no multiple of 5 {micro} x 2 ranks = 10; correct"),
        ),
        (
            r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2}"#,
            format!("not 2 {accumulation} x 4 {micro} x 2 ranks = 16; correct"),
        ),
        (r#"{"train_batch_size": 25}"#, "no multiple of 2 ranks; write a multiple".into()),
    ] {
        let refused = refusal(text);
        assert!(
            refused.starts_with("`train_batch_size = 2") && refused.contains(&said),
            "{refused}"
        );
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
        (r#"{"train_batch_size": "auto"}"#, "`train_batch_size = \"auto\"`", "accelerate"),
        (r#"{"bf16": {"enabled": "auto"}}"#, "`bf16.enabled = \"auto\"`", "true or false"),
        (r#"{"prescale_gradients": true}"#, "`prescale_gradients = true`", "sums over ranks"),
        (r#"{"gradient_predivide_factor": 2.0}"#, "`gradient_predivide_factor = 2`", "the mean"),
        (r#"{"scheduler": {"type": "StepLR"}}"#, "`scheduler.type = \"StepLR\"`", "lr_scheduler"),
        (r#"{"scheduler": {"type": "Warmup"}}"#, "`scheduler.type = \"Warmup\"`", "\"OneCycle\""),
        (r#"{"scheduler": {}}"#, "`scheduler.type = null`", "\"WarmupLR\""),
        (
            r#"{"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}"#,
            "`data_types.param_dtype = fp32`",
            "leave param_dtype out",
        ),
        (r#"{"flops_profiler": {"enabled": true}}"#, "`flops_profiler = {", "leave the field"),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#,
            "`zero_optimization.offload_optimizer = {",
            "not available yet; nearest is `stage` 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#,
            "`zero_optimization.offload_param = {",
            "`oxizero.share_weights = true`",
        ),
        (r#"{"zero_optimization": {"reduce_scatter": false}}"#, "reduce_scatter", "write true"),
        (r#"{"zero_optimization": {"stage": 4}}"#, "`zero_optimization.stage = 4`", "0, 1, 2, 3"),
        (r#"{"gradient_clipping": -1}"#, "`gradient_clipping = -1`", "0 or more"),
        (r#"{"gradient_accumulation_steps": 0}"#, "`gradient_accumulation_steps = 0`", "1 or"),
        (r#"{"communication_data_type": "int8"}"#, "`communication_data_type", "\"bf16\""),
        (r#"{"optimizer": {"type": "lamb"}}"#, "`optimizer.type = \"lamb\"`", "\"AdamW\""),
        (r#"{"optimizer": {"type": "Xyzzy"}}"#, "`optimizer.type = \"Xyzzy\"`", "\"SGD\""),
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
}

#[test]
fn numbers_out_of_range_are_refused_by_their_path() {
    for (path, value) in [
        ("fp16.loss_scale", "1e39"),
        ("fp16.loss_scale", "1e-60"),
        ("fp16.initial_scale_power", "128"),
        ("fp16.initial_scale_power", "-1"),
        ("fp16.min_loss_scale", "0"),
        ("fp16.min_loss_scale", "1e39"),
        ("fp16.hysteresis", "0"),
        ("fp16.loss_scale_window", "0.5"),
        ("gradient_clipping", "1e39"),
        ("gradient_clipping", "1e-60"),
    ] {
        let (section, name) = path.split_once('.').unwrap_or(("", path));
        let field = format!("{{\"{name}\": {value}}}");
        let text = if section.is_empty() { field } else { format!("{{\"{section}\": {field}}}") };
        assert!(refusal(&text).contains(&format!("`{path} = ")), "{text}: {}", refusal(&text));
    }
    let params = [
        ("AdamW", r#"{"lr": 1e39}"#),
        ("AdamW", r#"{"weight_decay": 1e39}"#),
        ("Adam", r#"{"betas": [0.9, 1.0]}"#),
        ("Lion", r#"{"betas": [-0.1, 0.9]}"#),
        ("AdamW", r#"{"eps": 0}"#),
        ("SGD", r#"{"momentum": 1}"#),
        ("Adagrad", r#"{"initial_accumulator_value": 1e-60}"#),
    ];
    for (kind, params) in params {
        let name = params.split('"').nth(1).unwrap();
        let said =
            refusal(&format!(r#"{{"optimizer": {{"type": "{kind}", "params": {params}}}}}"#));
        assert!(said.contains(&format!("`optimizer.params.{name} = ")), "{said}");
    }
    let said = refusal(r#"{"fp16": {"initial_scale_power": 3, "min_loss_scale": 9}}"#);
    assert!(said.contains("`fp16.initial_scale_power = 3`"), "{said}");
    assert!(said.contains("`fp16.min_loss_scale = 9`"), "{said}");
}

fn optimizer(kind: &str, params: &str) -> OptimizerSettings {
    let text = format!(r#"{{"optimizer": {{"type": "{kind}", "params": {params}}}}}"#);
    read(&text).unwrap().optimizer.unwrap()
}

#[test]
fn adam_decouples_weight_decay_unless_told_not_to() {
    for name in ["Adam", "FusedAdam", "DeepSpeedCPUAdam"] {
        assert!(matches!(optimizer(name, "{}").rule, RuleSettings::AdamW(_)));
        let coupled = optimizer(name, r#"{"adam_w_mode": false}"#);
        assert!(matches!(coupled.rule, RuleSettings::Adam(_)));
    }
    assert_eq!(optimizer("AdamW", "{}").weight_decay, 0.0);
    assert_eq!(optimizer("AdamW", r#"{"torch_adam": true, "fused": true}"#).weight_decay, 0.01);
}

#[test]
fn every_rule_has_the_defaults_of_deepspeed() {
    let adagrad =
        RuleSettings::Adagrad { lr_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 };
    let adam = AdamSettings { betas: [0.9, 0.999], eps: 1e-8 };
    for (name, lr, rule) in [
        ("adam", 1e-3, RuleSettings::AdamW(adam)),
        ("SGD", 1e-3, RuleSettings::Sgd { momentum: 0.0, nesterov: false }),
        ("Lion", 1e-3, RuleSettings::Lion { betas: [0.9, 0.999] }),
        ("DeepSpeedCPUAdagrad", 1e-2, adagrad),
    ] {
        assert_eq!(optimizer(name, "{}"), OptimizerSettings { lr, weight_decay: 0.0, rule });
    }
    let settings = r#"{"lr_decay": 0.5, "initial_accumulator_value": 2, "eps": 1e-3}"#;
    let given = RuleSettings::Adagrad { lr_decay: 0.5, initial_accumulator_value: 2.0, eps: 1e-3 };
    assert_eq!(optimizer("Adagrad", settings).rule, given);
}

fn scheduler(kind: &str, params: &str) -> Result<SchedulerSettings, ConfigError> {
    let text = format!(r#"{{"scheduler": {{"type": "{kind}", "params": {params}}}}}"#);
    read(&text).map(|config| config.scheduler.unwrap())
}

#[test]
fn a_schedule_has_the_parameters_that_the_file_gives() {
    use SchedulerValue::{Integer, Name, Number, PerGroup, Switch};
    let warmup = scheduler(
        "warmuplr",
        r#"{"warmup_min_lr": 0, "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 1e2,
            "warmup_type": "linear", "last_batch_iteration": -1}"#,
    );
    let expected = SchedulerSettings {
        kind: SchedulerKind::WarmupLr,
        params: vec![
            ("warmup_min_lr", Number(0.0)),
            ("warmup_max_lr", PerGroup(vec![1e-3, 2e-3])),
            ("warmup_num_steps", Integer(100)),
            ("warmup_type", Name("linear")),
            ("last_batch_iteration", Integer(-1)),
        ],
    };
    assert_eq!(warmup, Ok(expected));
    let cycle = r#"{"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_momentum": false,
                    "decay_mom_rate": -0.5}"#;
    let params = scheduler("OneCycle", cycle).unwrap().params;
    assert_eq!(params[2..], [("cycle_momentum", Switch(false)), ("decay_mom_rate", Number(-0.5))]);
    assert_eq!(scheduler("LRRangeTest", "{}").unwrap().params, []);
}

#[test]
fn a_schedule_is_refused_by_parameter() {
    for (kind, params, said) in [
        ("WarmupDecayLR", "{}", "`scheduler.params.total_num_steps = null`"),
        ("WarmupCosineLR", "{}", "`scheduler.params.total_num_steps = null`"),
        ("OneCycle", r#"{"cycle_min_lr": 1}"#, "`scheduler.params.cycle_max_lr = null`"),
        ("WarmupLR", r#"{"warmup_type": "cubic"}"#, "allowed: \"log\", \"linear\""),
        ("WarmupLR", r#"{"warmup_num_steps": 0}"#, "a whole number, 1 or more"),
        ("WarmupLR", r#"{"warmup_max_lr": [1, "auto"]}"#, "one for each optimizer group"),
        ("WarmupLR", r#"{"warmup_max_lr": "auto"}"#, "one for each optimizer group, or leave"),
        ("WarmupLR", r#"{"last_batch_iteration": -2}"#, "a whole number, -1 or more"),
        ("WarmupCosineLR", r#"{"total_num_steps": 9, "warmup_max_lr": 1}"#, "unknown field"),
        ("OneCycle", r#"{"cycle_min_lr": 1, "cycle_max_lr": 2, "decay_mom_rate": "x"}"#, "number"),
    ] {
        let refused = scheduler(kind, params).unwrap_err().to_string();
        assert!(refused.contains(said), "{kind} {params}: {refused}");
    }
}

#[test]
fn an_accumulator_is_no_narrower_than_what_travels() {
    let text = r#"{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}}"#;
    let narrow = read(text).unwrap().precision(DType::Bf16).unwrap();
    assert_eq!((narrow.reduce, narrow.accumulate), (DType::Bf16, DType::Bf16));
    let said = read(text).unwrap().precision(DType::F32).unwrap_err().to_string();
    assert!(said.contains("grad_accum_dtype = bf16"), "{said}");
}

#[test]
fn one_copy_of_the_weights_is_for_stages_that_have_copies() {
    let read_copies = |stage: usize, share: &str| {
        let text =
            format!("{{\"zero_optimization\": {{\"stage\": {stage}}}, \"oxizero\": {{{share}}}}}");
        read(&text).map(|config| config.copies)
    };
    let share = "\"share_weights\": true";
    assert_eq!(read_copies(2, share).unwrap(), WeightCopies::Machines);
    assert_eq!(read_copies(3, "\"share_weights\": false").unwrap(), WeightCopies::Ranks);
    let conflict = read_copies(3, share).unwrap_err().to_string();
    assert!(conflict.contains("oxizero.share_weights") && conflict.contains("stage = 3"));
    let unknown = read_copies(1, "\"share_weight\": true").unwrap_err().to_string();
    assert!(unknown.contains("oxizero.share_weights"), "{unknown}");
}

#[test]
fn what_is_gathered_ahead_is_bounded_as_asked() {
    let read = |text: &str| read(text).unwrap().prefetch;
    assert_eq!(read(r#"{"zero_optimization": {"stage": 3}}"#), Prefetch::default());
    let asked = read(
        r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 1e6}}"#,
    );
    assert_eq!(asked, Prefetch { numel_max: Numel(0), live_numel_max: Numel(1_000_000) });
}

#[test]
fn overlap_and_the_trace_are_as_asked() {
    let of = |text: &str| {
        let DeepSpeedConfig { overlap, trace, .. } = read(text).unwrap();
        (overlap, trace)
    };
    assert_eq!(of("{}"), (None, None));
    let off = r#"{"zero_optimization": {"stage": 2, "overlap_comm": false}}"#;
    assert_eq!(of(off), (Some(Overlap::Off), None));
    assert_eq!(of(r#"{"oxizero": {"trace": "t.json"}}"#), (None, Some("t.json".into())));
    for wrong in [r#"{"oxizero": {"trace": ""}}"#, r#"{"oxizero": {"trace": true}}"#] {
        let said = refusal(wrong);
        assert!(said.contains("oxizero.trace"), "{said}");
    }
}

#[test]
fn the_back_end_is_the_devices_unless_it_is_asked_for() {
    let back_end = |text: &str| DeepSpeedConfig::from_json(text, WorldSize::ONE);
    assert_eq!(back_end("{}").unwrap().back_end, None);
    for (name, kind) in [("native", BackEnd::Native), ("torch", BackEnd::Torch)] {
        let text = format!(r#"{{"oxizero": {{"backend": "{name}"}}}}"#);
        assert_eq!(back_end(&text).unwrap().back_end, Some(kind));
    }
    let said = |text: &str| back_end(text).unwrap_err().to_string();
    let error = said(r#"{"oxizero": {"backend": "cuda"}}"#);
    assert!(error.contains("`oxizero.backend = \"cuda\"`"), "{error}");
    assert!(said(r#"{"oxizero": {"back_end": "torch"}}"#).contains("`oxizero.backend`"));
}
