//! Errors in the words of the PyTorch front-end: the fields of its configuration, its calls, and
//! torch's dtypes, where the engine speaks of Rust's.

use oxizero::comm::CommError;
use oxizero::optim::OptimError;
use oxizero::{DType, EngineError as Error, Fact};
use oxizero_core::deepspeed::dtype_name;

use crate::config::torch_name;

/// The engine's options, and what the front-end takes them from.
const OPTIONS: &[(&str, &str)] = &[
    ("stage", "`zero_optimization.stage`"),
    ("mesh", "how the ranks share split parameters"),
    ("accumulation", "`gradient_accumulation_steps`"),
    ("clip_norm", "`gradient_clipping`"),
    ("loss_scaling", "the loss scale (`fp16`)"),
    ("check_finite", "`bf16.check_grad_overflow`"),
    ("rule", "the optimizer"),
    ("groups", "what the optimizer's param_groups have"),
    ("precision.model", "the model's dtype"),
    ("precision.reduce", "`communication_data_type`"),
    ("precision.accumulate", "`data_types.grad_accum_dtype`"),
    ("bucketing", "the size of a bucket (`zero_optimization.reduce_bucket_size`)"),
];

/// The engine's calls, and what makes them.
const CALLS: &[(&str, &str)] = &[
    ("Engine::new", "initialize"),
    ("full_grad", "safe_get_full_grad"),
    ("set_full_grad", "safe_set_full_grad"),
    ("local_grad", "safe_get_local_grad"),
    ("set_local_grad", "safe_set_local_grad"),
    ("full_param", "safe_get_full_fp32_param"),
    ("set_full_param", "safe_set_full_fp32_param"),
    ("set_local_param", "safe_set_local_fp32_param"),
    ("full_state", "safe_get_full_optimizer_state"),
    ("set_full_state", "safe_set_full_optimizer_state"),
    ("set_local_state", "safe_set_local_optimizer_state"),
    ("full_grads", "safe_get_full_model_grads"),
    ("clip_grads", "clip_grad_norm_"),
    ("save", "save_checkpoint"),
    ("load", "load_checkpoint"),
];

/// What an error of the engine says.
pub(crate) fn of(error: &Error) -> String {
    match error {
        Error::Comm(error) => of_ranks(error),
        Error::Optim(error) => of_rule(error),
        Error::SetupDiffers { rank, fact, expected, got } => {
            let is_option = matches!(fact, Fact::Option(_));
            let name = if is_option { dtype_name } else { torch_name };
            let fact = of_fact(fact);
            let [expected, got] = [expected, got].map(|value| of_value(value, name));
            format!(
                "{fact} is {expected} on rank 0 and {got} on rank {rank}; give every rank the \
                 same model, optimizer and configuration"
            )
        }
        Error::CallsDiffer { rank, call, other } => {
            let [call, other] = [call, other].map(|call| of_call(call));
            Error::CallsDiffer { rank: *rank, call, other }.to_string()
        }
        Error::InWindow { call } => {
            let call = of_call(call);
            format!("{call} was called between a backward and its step; call it after step()")
        }
        Error::NamesDiffer { .. } => error.to_string().replace(
            "Names::Listed, or weights alone with What::Weights",
            "load_module_strict=False, or weights alone with load_module_only=True",
        ),
        Error::NoBackward => "step() was called, but no backward has ended since the last one; \
                              call loss.backward() or engine.backward(loss) first"
            .into(),
        Error::LossScalesDiffer { first, expected, second, got } => format!(
            "rank {first} has gradients with loss scale {expected}, rank {second} with {got}; \
             let engine.backward(loss) or engine.scale(loss) scale the loss on every rank"
        ),
        Error::BatchesDiffer { first, expected, second, got } => format!(
            "ranks {first} and {second} hold parts of the same parameters and are to work on the \
             same micro-batches, but in this window rank {first} had {expected}, rank {second} \
             {got}; call backward and step alike on both"
        ),
        Error::ReplicasDiffer { param, first, second } => format!(
            "rank {first} has gradients of `{param}` in this window and rank {second} has none, \
             though theirs are to be the same; use it on both, or on neither"
        ),
        Error::WeightsInUse { param } => format!(
            "the weights of `{param}` are still in use, so that they cannot be written; delete \
             what views them first"
        ),
        other => other.to_string(),
    }
}

/// What an error of a rule says.
fn of_rule(error: &OptimError) -> String {
    error.to_string().replace("`beta1 =", "`betas[0] =").replace("`beta2 =", "`betas[1] =")
}

/// What an error between ranks says.
pub(crate) fn of_ranks(error: &CommError) -> String {
    match error {
        CommError::Mismatch { sequence, rank, expected, other, got } => {
            let [expected, got] = [expected, got].map(|operation| of_operation(operation));
            let (sequence, rank, other) = (*sequence, *rank, *other);
            CommError::Mismatch { sequence, rank, expected, other, got }.to_string()
        }
        other => other.to_string(),
    }
}

fn of_fact(fact: &Fact) -> String {
    let Fact::Option(path) = fact else { return fact.to_string() };
    named(OPTIONS, path).map_or_else(|| fact.to_string(), str::to_owned)
}

/// A dtype has the name that people write.
fn of_value(value: &str, name: fn(DType) -> &'static str) -> &str {
    value.parse().map_or(value, name)
}

/// A call begins with its name, which may be followed by what it is about.
fn of_call(call: &str) -> String {
    let end = call.find([' ', ':']).unwrap_or(call.len());
    let (name, rest) = call.split_at(end);
    named(CALLS, name).map_or_else(|| call.to_owned(), |name| format!("{name}{rest}"))
}

/// What ranks exchange, they say for which call.
fn of_operation(operation: &str) -> String {
    match operation.split_once(" for ") {
        Some((what, call)) => format!("{what} for {}", of_call(call)),
        None => operation.to_owned(),
    }
}

fn named(names: &[(&str, &'static str)], wanted: &str) -> Option<&'static str> {
    names.iter().find(|(name, _)| *name == wanted).map(|(_, here)| *here)
}
