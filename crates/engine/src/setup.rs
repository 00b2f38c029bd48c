//! What is checked and made before the first step.

use std::collections::HashSet;

use oxizero_comm::{CommError, Communicator};
use oxizero_core::{
    BucketId, BucketSpec, Bytes, ConfigError, DType, Mesh, ParamId, ParamSpec, Rank, UnitId,
    assign_buckets,
};
use oxizero_device::simd::{LEVEL_VARIABLE, Level};
use oxizero_device::{Buffer, Storage, ViewMut};

use crate::EngineError;
use crate::bucket::{Bucket, Setting};
use crate::engine::{ParamState, Seen};
use crate::gradient::alloc;
use crate::groups::Groups;
use crate::options::{EngineOptions, GroupOptions, OptimizerSetup};

/// More than any model's.
const CONTRIBUTIONS_MAX: usize = 1 << 20;

/// Refuses a level of the CPU's instructions that there is not, before a kernel runs.
pub(crate) fn check_environment() -> Result<(), ConfigError> {
    Level::of_environment().map(drop).map_err(|unknown| ConfigError::Value {
        field: LEVEL_VARIABLE.into(),
        allowed: unknown.allowed(),
        value: unknown.name,
    })
}

/// Refuses parameters and options that cannot be trained.
pub(crate) fn check(
    specs: &[ParamSpec],
    order: &[UnitId],
    options: &EngineOptions,
    optimizer: &OptimizerSetup,
    mesh: &Mesh,
) -> Result<(), EngineError> {
    options.validate()?;
    let mut names = HashSet::new();
    for spec in specs {
        let refuse =
            |problem: String| Err(EngineError::Param { param: spec.name.clone(), problem });
        if let Some(name) = spec.names().find(|name| !names.insert(*name)) {
            return refuse(format!("the name `{name}` is taken already; names must be unique"));
        }
        if spec.group.0 >= optimizer.groups.len() {
            let (group, count) = (spec.group.0, optimizer.groups.len());
            return refuse(format!("it is in optimizer group {group}, and there are {count}"));
        }
        // Of the whole tensor too; an empty one has strides all the same.
        let sizes = spec.shape.iter().map(|size| *size.max(&1));
        if let Some(problem) = mesh.problem(spec) {
            return refuse(problem);
        }
        let bytes = sizes.chain([4, mesh.world_size().get()]).try_fold(1_usize, usize::checked_mul);
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize / 64) {
            return refuse(format!("its shape {:?} is larger than memory can be", spec.shape));
        }
        if spec.unit.0 >= specs.len() + order.len() {
            return refuse(format!("its unit is {}; number units from 0 on", spec.unit));
        }
        if spec.contributions > CONTRIBUTIONS_MAX {
            let contributions = spec.contributions;
            return refuse(format!(
                "it contributes {contributions} gradients a micro-batch; at most \
                 {CONTRIBUTIONS_MAX} are possible"
            ));
        }
        if spec.trainable && spec.contributions == 0 {
            return refuse("it contributes no gradients; freeze it (trainable = false)".into());
        }
        if !order.is_empty() && !order.contains(&spec.unit) {
            return refuse(format!("its unit {} is not in the order of use", spec.unit));
        }
    }
    let unit_max = specs.len() + order.len();
    if let Some(unit) = order.iter().find(|unit| unit.0 >= unit_max) {
        let allowed = format!("units below {unit_max}; number them from 0 on");
        let (field, value) = ("order".into(), unit.to_string());
        return Err(EngineError::Config(ConfigError::Value { field, value, allowed }));
    }
    optimizer.groups.iter().try_for_each(check_group)?;
    Ok(())
}

/// Refuses hyper-parameters that no rule can use.
pub(crate) fn check_group(group: &GroupOptions) -> Result<(), ConfigError> {
    check_number("lr", group.lr)?;
    check_number("weight_decay", group.weight_decay)
}

fn check_number(field: &str, value: f64) -> Result<(), ConfigError> {
    if value >= 0.0 && (value as f32).is_finite() {
        return Ok(());
    }
    let allowed = "a number that is a finite f32, 0 or above".into();
    Err(ConfigError::Value { field: field.into(), value: value.to_string(), allowed })
}

/// Makes the buckets, one after the other, each from the initial weights of the first rank of
/// those that hold the same.
pub(crate) fn buckets(
    specs: &[ParamSpec],
    (options, optimizer): (&EngineOptions, &OptimizerSetup),
    groups: &Groups,
    storage: &Storage,
    initial: &mut dyn FnMut(ParamId, ViewMut<'_>),
) -> Result<Vec<Bucket>, CommError> {
    assign_buckets(specs, groups.mesh(), options.bucketing, options.align)
        .into_iter()
        .map(|spec| {
            let initial = broadcast_initial(&spec, groups.over(spec.sharing.copies()), initial)?;
            let setting = Setting {
                stage: options.stage,
                precision: options.precision,
                rule: &*optimizer.rule,
                comm: groups.over(spec.sharing.reduced),
                storage,
            };
            Bucket::new(spec, &initial, &setting)
        })
        .collect()
}

fn broadcast_initial(
    spec: &BucketSpec,
    comm: &dyn Communicator,
    initial: &mut dyn FnMut(ParamId, ViewMut<'_>),
) -> Result<Buffer, CommError> {
    let mut buffer = alloc(comm, spec.layout.padded_numel(), DType::F32)?;
    if comm.rank() == Rank(0) {
        for (slot, param) in spec.params.iter().enumerate() {
            initial(*param, buffer.range_mut(spec.layout.slot(slot)));
        }
    }
    comm.broadcast(buffer, Rank(0))?.wait()
}

/// The parameters of each unit, in order.
pub(crate) fn units(specs: &[ParamSpec], order: &[UnitId]) -> Vec<Vec<ParamId>> {
    let units = specs.iter().map(|spec| spec.unit).chain(order.iter().copied());
    let count = units.map(|unit| unit.0 + 1).max().unwrap_or(0);
    let mut units = vec![Vec::new(); count];
    for (index, spec) in specs.iter().enumerate() {
        units[spec.unit.0].push(ParamId(index));
    }
    units
}

/// Where each parameter lies.
pub(crate) fn params(specs: &[ParamSpec], buckets: &[Bucket]) -> Vec<ParamState> {
    let unplaced =
        ParamState { bucket: BucketId(0), slot: 0, arrived: 0, seen: Seen::Nothing, updates: 0 };
    let mut params = vec![unplaced; specs.len()];
    for (index, bucket) in buckets.iter().enumerate() {
        for (slot, param) in bucket.spec().params.iter().enumerate() {
            params[param.0].bucket = BucketId(index);
            params[param.0].slot = slot;
        }
    }
    params
}

/// By bucket: the gradients that a micro-batch gives.
pub(crate) fn expected(specs: &[ParamSpec], buckets: &[Bucket]) -> Vec<usize> {
    let of_bucket =
        |bucket: &Bucket| bucket.spec().params.iter().map(|p| specs[p.0].contributions).sum();
    buckets.iter().map(of_bucket).collect()
}

/// The most bytes that a bucket's initial f32 weights take while it is made.
pub(crate) fn initial_bytes(buckets: &[Bucket]) -> Bytes {
    let of = |bucket: &Bucket| bucket.spec().layout.padded_numel().bytes(DType::F32);
    buckets.iter().map(of).max().unwrap_or_default()
}

/// FNV-1a, for comparison and not for security.
pub(crate) fn fingerprint(text: &str) -> u64 {
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    text.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, fnv)
}
