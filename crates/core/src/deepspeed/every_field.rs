//! Every field that DeepSpeed documents: at its default, at another value, and to be filled in.

use serde_json::{Map, Value, json};

use super::*;

/// What becomes of the other value.
#[derive(Clone, Copy)]
enum Other {
    Honoured,
    /// It is accepted, and what is done is the same, for this reason.
    NoEffect(&'static str),
    /// With this reason.
    Refused(&'static str),
}

use Other::{Honoured, NoEffect, Refused};

/// Fields, their defaults in DeepSpeed 0.19 (null where there is none), another value, and what
/// becomes of that.
const FIELDS: &[(&str, &str, &str, Other)] = &[
    ("train_batch_size", "null", "8", Honoured),
    ("train_micro_batch_size_per_gpu", "null", "4", Honoured),
    ("gradient_accumulation_steps", "null", "2", Honoured),
    ("managed_gradient_accumulation", "true", "false", Refused("set_gradient_accumulation_bound")),
    ("steps_per_print", "null", "10", Honoured),
    ("dump_state", "false", "true", Refused("tool of its own")),
    ("disable_python_gc", "false", "true", Refused("gc.disable()")),
    ("disable_allgather", "false", "true", Refused("gathered after each step")),
    ("communication_data_type", "null", "\"fp32\"", Honoured),
    (
        "seq_parallel_communication_data_type",
        "\"fp32\"",
        "\"bf16\"",
        NoEffect("only DeepSpeed's own sequence-parallel groups use it"),
    ),
    ("prescale_gradients", "false", "true", Refused("sums over ranks")),
    ("gradient_predivide_factor", "1.0", "2.0", Refused("sums over ranks")),
    ("gradient_allreduce_op", "\"mean\"", "\"sum\"", Refused("multiply the loss")),
    ("gradient_clipping", "1.0", "0.0", Honoured),
    ("sparse_gradients", "false", "true", Refused("sparse=False")),
    (
        "zero_allow_untested_optimizer",
        "false",
        "true",
        NoEffect("every optimizer is checked by itself"),
    ),
    ("zero_force_ds_cpu_optimizer", "true", "false", NoEffect("each rule is the engine's own")),
    ("wall_clock_breakdown", "false", "true", Refused("tool of its own")),
    ("memory_breakdown", "false", "true", Refused("tool of its own")),
    ("dataloader_drop_last", "false", "true", Honoured),
    ("log_level", "null", "\"warning\"", Honoured),
    (
        "vocabulary_size",
        "null",
        "50257",
        NoEffect("DeepSpeed only warns of sizes that suit a GPU badly"),
    ),
    ("use_data_before_expert_parallelism", "false", "true", Refused("no such feature")),
    ("amp", "{\"enabled\": false}", "{\"enabled\": true}", Refused("bf16 or fp16")),
    ("torch_autocast", "{\"enabled\": false}", "{\"enabled\": true}", Refused("torch.autocast")),
    ("flops_profiler", "{\"enabled\": false}", "{\"enabled\": true}", Refused("tool of its own")),
    ("comms_logger", "{\"enabled\": false}", "{\"enabled\": true}", Refused("tool of its own")),
    ("tensorboard", "{\"enabled\": false}", "{\"enabled\": true}", Refused("get_global_grad_norm")),
    ("wandb", "{\"enabled\": false}", "{\"enabled\": true}", Refused("get_global_grad_norm")),
    ("csv_monitor", "{\"enabled\": false}", "{\"enabled\": true}", Refused("get_global_grad_norm")),
    ("comet", "{\"enabled\": false}", "{\"enabled\": true}", Refused("get_global_grad_norm")),
    ("autotuning", "{\"enabled\": false}", "{\"enabled\": true}", Refused("tool of its own")),
    ("elasticity", "{\"enabled\": false}", "{\"enabled\": true}", Refused("a fixed size")),
    ("hybrid_engine", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such feature")),
    ("nebula", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such feature")),
    ("data_efficiency", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such feature")),
    ("curriculum_learning", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such")),
    ("progressive_layer_drop", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such")),
    ("eigenvalue", "{\"enabled\": false}", "{\"enabled\": true}", Refused("no such feature")),
    ("quantize_training", "{\"enabled\": false}", "{\"enabled\": true}", Refused("unquantized")),
    ("compression_training", "{}", "{\"weight_quantization\": {}}", Refused("no such feature")),
    ("weight_quantization", "{}", "{\"post_init_quant\": {}}", Refused("unquantized")),
    ("sparse_attention", "null", "{\"mode\": \"fixed\"}", Refused("no such feature")),
    ("datastates_ckpt", "null", "{\"host_cache_size\": 16}", Refused("no such feature")),
    ("pipeline", "{}", "{\"stages\": 2}", Refused("pipeline parallelism")),
    ("tensor_parallel", "{}", "{\"autotp_size\": 2}", Refused("no such feature")),
    ("expert_parallel", "{}", "{\"size\": 2}", Refused("no such feature")),
    ("compile", "{}", "{\"deepcompile\": true}", Refused("torch.compile")),
    ("timers.throughput.enabled", "false", "true", Refused("does not time")),
    ("timers.throughput.synchronized", "true", "false", NoEffect("nothing is timed")),
    ("bf16.enabled", "false", "true", Honoured),
    ("bf16.check_grad_overflow", "true", "false", Honoured),
    (
        "bf16.immediate_grad_update",
        "false",
        "true",
        NoEffect("gradients are always taken as they come"),
    ),
    ("bf16.bf16_master_weights_and_grads", "false", "true", Refused("master weights are f32")),
    ("bf16.bf16_optimizer_states", "false", "true", Refused("optimizer states are f32")),
    ("fp16.enabled", "false", "true", Honoured),
    ("fp16.auto_cast", "false", "true", Refused("cast them in the model")),
    ("fp16.loss_scale", "0", "128", Honoured),
    ("fp16.initial_scale_power", "16", "8", Honoured),
    ("fp16.loss_scale_window", "1000", "10", Honoured),
    ("fp16.hysteresis", "2", "1", Honoured),
    ("fp16.consecutive_hysteresis", "false", "true", Honoured),
    ("fp16.min_loss_scale", "1", "2", Honoured),
    ("fp16.fp16_master_weights_and_grads", "false", "true", Refused("master weights are f32")),
    ("data_types.grad_accum_dtype", "null", "\"fp32\"", Honoured),
    ("data_types.param_dtype", "null", "\"fp32\"", Honoured),
    ("data_types.buffer_dtype", "null", "\"bf16\"", Refused("buffers keep their dtype")),
    ("data_types.keep_in_fp32_modules", "null", "[\"rotary\"]", Refused("buffers keep")),
    (
        "activation_checkpointing.partition_activations",
        "false",
        "true",
        NoEffect("the engine starts no model-parallel ranks to partition them over"),
    ),
    (
        "activation_checkpointing.number_checkpoints",
        "null",
        "4",
        NoEffect("it sizes contiguous memory for activations, which there is not"),
    ),
    (
        "activation_checkpointing.contiguous_memory_optimization",
        "false",
        "true",
        Refused("where torch puts them"),
    ),
    ("activation_checkpointing.cpu_checkpointing", "false", "true", Refused("model's device")),
    (
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "false",
        "true",
        Refused("beside"),
    ),
    ("activation_checkpointing.profile", "false", "true", Refused("torch.profiler")),
    ("zero_optimization.stage", "0", "2", Honoured),
    ("zero_optimization.contiguous_gradients", "true", "false", Refused("contiguous")),
    ("zero_optimization.reduce_scatter", "true", "false", Refused("reduced to shards")),
    ("zero_optimization.reduce_bucket_size", "5e8", "1e6", Honoured),
    ("zero_optimization.use_multi_rank_bucket_allreduce", "true", "false", Refused("all ranks")),
    ("zero_optimization.allgather_partitions", "true", "false", Refused("not broadcast")),
    ("zero_optimization.allgather_bucket_size", "5e8", "1e6", Honoured),
    ("zero_optimization.overlap_comm", "null", "true", Honoured),
    ("zero_optimization.compute_grad_norm", "true", "false", Refused("norm")),
    ("zero_optimization.load_from_fp32_weights", "true", "false", Refused("no such feature")),
    ("zero_optimization.elastic_checkpoint", "false", "true", Refused("no such feature")),
    ("zero_optimization.zenflow", "null", "{\"topk_ratio\": 0.1}", Refused("no such feature")),
    ("zero_optimization.ignore_unused_parameters", "true", "false", Refused("zeros")),
    ("zero_optimization.legacy_stage1", "false", "true", Refused("one stage 1")),
    ("zero_optimization.round_robin_gradients", "false", "true", Refused("from last to first")),
    ("zero_optimization.parameter_alignment", "false", "true", Refused("padded")),
    ("zero_optimization.stage3_prefetch_bucket_size", "5e7", "0", Honoured),
    (
        "zero_optimization.stage3_param_persistence_threshold",
        "1e5",
        "0",
        NoEffect("no weights stay whole: a module's are freed when it has run"),
    ),
    (
        "zero_optimization.stage3_model_persistence_threshold",
        "9007199254740992",
        "1e9",
        NoEffect("no weights stay whole, so that there is no sum of them to bound"),
    ),
    ("zero_optimization.stage3_max_live_parameters", "1e9", "0", Honoured),
    (
        "zero_optimization.stage3_max_reuse_distance",
        "1e9",
        "0",
        NoEffect("weights are freed when their module has run, however soon they are used again"),
    ),
    (
        "zero_optimization.sub_group_size",
        "1e9",
        "1e8",
        NoEffect("each bucket is updated by itself; `reduce_bucket_size` says how large one is"),
    ),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", "false", "true", Honoured),
    (
        "zero_optimization.memory_efficient_linear",
        "true",
        "false",
        NoEffect("linear layers are torch's own"),
    ),
    (
        "zero_optimization.allgather_sequential",
        "false",
        "true",
        NoEffect("a bucket is gathered by one collective"),
    ),
    (
        "zero_optimization.stage3_module_granularity_threshold",
        "0",
        "8",
        Refused("leaf_module.classes"),
    ),
    (
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "false",
        "true",
        Refused("gathered"),
    ),
    ("zero_optimization.leaf_module.classes", "[]", "[\"Experts\"]", Honoured),
    ("zero_optimization.leaf_module.names", "[]", "[\"a.b\"]", Honoured),
    ("zero_optimization.leaf_module.name_suffixes", "[]", "[\"b\"]", Honoured),
    ("zero_optimization.zero_hpz_partition_size", "1", "2", Refused("one group")),
    ("zero_optimization.zero_quantized_weights", "false", "true", Refused("unquantized")),
    ("zero_optimization.zero_quantized_gradients", "false", "true", Refused("unquantized")),
    ("zero_optimization.pipeline_loading_checkpoint", "false", "true", Refused("no such feature")),
    ("zero_optimization.override_module_apply", "true", "false", Refused("no such feature")),
    ("zero_optimization.log_trace_cache_warnings", "false", "true", Refused("no such feature")),
    ("zero_optimization.enable_sanity_checks", "false", "true", Refused("always")),
    (
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        "false",
        "true",
        Refused("no such feature"),
    ),
];

/// Sections of which fields say something only beside another field, such as `enabled`.
const BESIDE_ANOTHER: &[&str] = &["bf16.", "fp16.", "data_types."];

fn read(path: &str, value: Value) -> Result<DeepSpeedConfig, ConfigError> {
    let nest = |inner: Value, name: &str| Value::Object(Map::from_iter([(name.into(), inner)]));
    let text = path.rsplit('.').fold(value, nest).to_string();
    DeepSpeedConfig::from_json(&text, WorldSize::new(2).unwrap())
}

#[test]
fn a_default_that_is_spelled_out_is_what_is_done() {
    for (path, default, ..) in FIELDS {
        let read = read(path, serde_json::from_str(default).unwrap());
        assert!(read.is_ok(), "{path} = {default}: {}", read.unwrap_err());
    }
}

#[test]
fn another_value_is_honoured_or_refused_with_the_reason() {
    for (path, _, value, other) in FIELDS {
        let default = read("steps_per_print", Value::Null).unwrap();
        match (read(path, serde_json::from_str(value).unwrap()), other) {
            (Ok(read), Honoured) => {
                let beside = BESIDE_ANOTHER.iter().any(|section| path.starts_with(section));
                assert!(read != default || beside, "{path} = {value} has no effect");
            }
            (Ok(read), NoEffect(_)) => assert_eq!(read, default, "{path} has an effect"),
            (Err(error), Refused(reason)) => {
                let said = error.to_string();
                assert!(said.contains(path) && said.contains(reason), "{path}: {said}");
            }
            (read, _) => panic!("{path} = {value}: {read:?}"),
        }
    }
}

#[test]
fn users_are_told_which_fields_have_no_effect_and_why() {
    let page = include_str!("../../../../docs/pytorch.md");
    let (_, table) = page.split_once("| Accepted, without effect | Why |\n|---|---|\n").unwrap();
    let told: Vec<_> = table.lines().take_while(|line| line.starts_with('|')).collect();
    let row = |(path, _, _, other): &(&str, &str, &str, Other)| match other {
        NoEffect(reason) => Some(format!("| `{path}` | {reason} |")),
        Honoured | Refused(_) => None,
    };
    let fields: Vec<_> = FIELDS.iter().filter_map(row).collect();
    assert_eq!(told, fields);
}

/// Every parameter of optimizers and schedules, with a type that has it.
const PARAMS: &[(&str, &str, &[&str])] = &[
    ("optimizer", "AdamW", &["lr", "weight_decay", "betas", "eps", "bias_correction", "amsgrad"]),
    ("optimizer", "Adam", &["adam_w_mode", "torch_adam", "fused", "fp32_optimizer_states"]),
    ("optimizer", "SGD", &["momentum", "nesterov", "dampening", "maximize", "max_grad_norm"]),
    ("optimizer", "Lion", &["betas", "set_grad_none"]),
    ("optimizer", "Adagrad", &["lr_decay", "initial_accumulator_value", "eps"]),
    ("scheduler", "WarmupLR", &["warmup_min_lr", "warmup_num_steps", "warmup_type"]),
    ("scheduler", "WarmupDecayLR", &["total_num_steps"]),
    ("scheduler", "WarmupCosineLR", &["total_num_steps"]),
    ("scheduler", "OneCycle", &["cycle_min_lr"]),
    ("scheduler", "LRRangeTest", &["lr_range_test_step_rate", "lr_range_test_staircase"]),
];

#[test]
fn nothing_is_filled_in() {
    let sections = [
        "optimizer",
        "optimizer.type",
        "scheduler",
        "scheduler.type",
        "zero_optimization",
        "bf16",
        "fp16",
        "data_types",
        "timers",
        "activation_checkpointing",
    ];
    for path in FIELDS.iter().map(|(path, ..)| *path).chain(sections) {
        assert_not_filled_in(path, read(path, "auto".into()));
    }
    for (section, kind, params) in PARAMS {
        let with = |params: Value| read(section, json!({ "type": kind, "params": params }));
        assert_not_filled_in(&format!("{section}.params"), with("auto".into()));
        for param in *params {
            let path = format!("{section}.params.{param}");
            assert_not_filled_in(&path, with(json!({ *param: "auto" })));
        }
    }
}

fn assert_not_filled_in(path: &str, read: Result<DeepSpeedConfig, ConfigError>) {
    let said = read.unwrap_err().to_string();
    let advised = said.contains("write ") || said.ends_with("leave the field out");
    assert!(said.contains(&format!("`{path} = \"auto\"` is refused")) && advised, "{said}");
}
