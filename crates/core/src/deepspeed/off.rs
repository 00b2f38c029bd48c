//! Features that a configuration may name only to switch them off, and why.

const OTHER_TOOL: &str = "the engine does not do this; use a tool of its own for it";
pub(super) const NOT_HERE: &str = "the engine has no such feature";
/// Of what writes metrics.
const MONITOR: &str = "oxizero writes to no monitor; log the loss, engine.get_global_grad_norm() \
                       and engine.get_lr() in the script, by this tool's own calls";
/// Of optimizer states and gradients, which rest sharded from stages 1 and 2 on.
const OFFLOAD_OPTIMIZER: &str = "offload is not available yet; nearest is `stage` 3, which shards \
                                 optimizer states, gradients and weights over the ranks";
/// Of weights.
const OFFLOAD_PARAM: &str = "offload is not available yet; nearest is `stage` 3, which shards the \
                             weights over the ranks, or, in stages 0 to 2, \
                             `oxizero.share_weights = true`: one copy of the weights a machine";
const EXACT: &str = "gradients and weights travel unquantized";

/// At the top of the file.
pub(super) const TOP: &[(&str, &str)] = &[
    ("amp", "apex is not used; ask for bf16 or fp16"),
    ("torch_autocast", "call torch.autocast around the model instead, or ask for bf16"),
    ("sparse_gradients", "gradients are dense; build the embedding with sparse=False"),
    ("wall_clock_breakdown", OTHER_TOOL),
    ("memory_breakdown", OTHER_TOOL),
    ("dump_state", OTHER_TOOL),
    ("flops_profiler", OTHER_TOOL),
    ("comms_logger", OTHER_TOOL),
    ("tensorboard", MONITOR),
    ("wandb", MONITOR),
    ("csv_monitor", MONITOR),
    ("comet", MONITOR),
    ("autotuning", OTHER_TOOL),
    ("elasticity", "the world has a fixed size"),
    ("disable_allgather", "weights that rest replicated are gathered after each step"),
    ("sparse_attention", NOT_HERE),
    ("data_efficiency", NOT_HERE),
    ("curriculum_learning", NOT_HERE),
    ("compression_training", NOT_HERE),
    ("quantize_training", EXACT),
    ("weight_quantization", EXACT),
    ("progressive_layer_drop", NOT_HERE),
    ("eigenvalue", NOT_HERE),
    ("pipeline", "pipeline parallelism is not available"),
    ("tensor_parallel", NOT_HERE),
    ("hybrid_engine", NOT_HERE),
    ("nebula", NOT_HERE),
    ("compile", "call torch.compile on parts of the model"),
    ("aio", "nothing is offloaded to disk"),
    ("checkpoint", NOT_HERE),
    ("load_universal_checkpoint", NOT_HERE),
    ("disable_python_gc", "Python's garbage collector is left alone; call gc.disable()"),
    ("datastates_ckpt", NOT_HERE),
    ("expert_parallel", NOT_HERE),
    ("use_data_before_expert_parallelism", NOT_HERE),
];

/// In `zero_optimization`.
pub(super) const ZERO: &[(&str, &str)] = &[
    ("offload_param", OFFLOAD_PARAM),
    ("offload_optimizer", OFFLOAD_OPTIMIZER),
    ("cpu_offload", OFFLOAD_OPTIMIZER),
    ("cpu_offload_param", OFFLOAD_PARAM),
    ("cpu_offload_use_pin_memory", OFFLOAD_OPTIMIZER),
    ("round_robin_gradients", "buckets are reduced from last to first, on all ranks alike"),
    ("legacy_stage1", "there is one stage 1"),
    ("elastic_checkpoint", NOT_HERE),
    ("pipeline_loading_checkpoint", NOT_HERE),
    ("zenflow", NOT_HERE),
    ("parameter_alignment", "shards are padded as collectives need it"),
    ("enable_sanity_checks", "ranks always compare what they are about to do"),
    ("save_muon_momentum_buffer_in_memory", NOT_HERE),
    ("log_trace_cache_warnings", NOT_HERE),
    ("zero_quantized_weights", EXACT),
    ("zero_quantized_nontrainable_weights", EXACT),
    ("zero_quantized_gradients", EXACT),
    ("zeropp_loco_param", EXACT),
    ("mics_shard_size", "all ranks are one group"),
    ("mics_hierarchical_params_gather", "all ranks are one group"),
];

/// In `fp16`.
pub(super) const FP16: &[(&str, &str)] = &[
    ("auto_cast", "inputs keep their dtype; cast them in the model"),
    ("fp16_master_weights_and_grads", "master weights are f32"),
];
