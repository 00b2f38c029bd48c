//! The dtype of a gradient at each place on its way, by process group: what was asked for, and what
//! the engine stores and sends.

use std::collections::BTreeMap;
use std::fmt;

use crate::{BucketSpec, DType, Mesh, Numel, Placement, PlanInput, WorldSize, counted};

/// The way of the gradients of one group of parameters: those that reduce over the same ranks and
/// have one dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientPath {
    /// The axes of the mesh that they are reduced over.
    pub group: String,
    /// Ranks in it.
    pub ranks: WorldSize,
    /// The dtype of the parameters.
    pub dtype: DType,
    /// Micro-batches of the windows that this describes; each of one backward pass. Sums over
    /// several passes, such as those of passes without reduction, travel in the accumulation dtype.
    pub micro_batches: usize,
    /// Elements of all of them, before they are sharded.
    pub numel: Numel,
    /// The places where the gradient is stored or sent, in order, and after them those of what it
    /// updates.
    pub hops: Vec<Hop>,
}

/// A place on a gradient's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// What happens there.
    pub place: &'static str,
    /// The dtype there.
    pub dtype: DType,
    /// The dtype that the configuration asks for.
    pub asked: DType,
    /// Why the two differ, if they do.
    pub why: Option<&'static str>,
}

impl Hop {
    fn as_asked(place: &'static str, dtype: DType) -> Self {
        Self { place, dtype, asked: dtype, why: None }
    }

    fn new(place: &'static str, dtype: DType, asked: DType, why: &'static str) -> Self {
        Self { place, dtype, asked, why: (dtype != asked).then_some(why) }
    }
}

/// The ways of all gradients of a plan, by group and dtype; frozen parameters have none.
pub fn gradient_paths(input: &PlanInput<'_>, mesh: &Mesh) -> Vec<GradientPath> {
    let mut groups: BTreeMap<_, Vec<&BucketSpec>> = BTreeMap::new();
    for bucket in input.buckets.iter().filter(|bucket| bucket.trainable) {
        groups.entry((bucket.sharing.reduced, bucket.dtype)).or_default().push(bucket);
    }
    let path = |((reduced, dtype), buckets): (_, Vec<&BucketSpec>)| GradientPath {
        group: mesh.names(reduced),
        ranks: mesh.size_over(reduced),
        dtype,
        micro_batches: input.accumulation,
        numel: buckets.iter().map(|bucket| numel(bucket)).sum(),
        hops: hops(input, dtype, &buckets),
    };
    groups.into_iter().map(path).collect()
}

const OWN_DTYPE: &str = "these parameters have a dtype of their own, and keep it";
const SEVERAL: &str = "what a parameter gives several times in a pass adds up before it is sent";
const LOCAL_SUM: &str = "a sum over micro-batches is not narrowed before it travels";

fn hops(input: &PlanInput<'_>, dtype: DType, buckets: &[&BucketSpec]) -> Vec<Hop> {
    let (asked, own) = (input.precision, input.precision.for_param(dtype));
    let adds_locally = input.stage.grads() == Placement::Partial;
    let mut hops = Vec::new();
    if adds_locally {
        hops.push(Hop::new(
            "added up on a rank",
            own.collected(false),
            asked.accumulate,
            OWN_DTYPE,
        ));
    } else {
        let (once, several) = (own.collected(true), own.collected(false));
        let gives = |one: bool| buckets.iter().any(|bucket| (bucket.contributions == 1) == one);
        if gives(true) {
            hops.push(Hop::new("collected", once, asked.reduce, OWN_DTYPE));
        }
        if gives(false) {
            let why = if several == once { OWN_DTYPE } else { SEVERAL };
            hops.push(Hop::new("collected, of several", several, asked.reduce, why));
        }
    }
    let passes = if adds_locally { input.accumulation } else { 1 };
    let why = if own.wire(passes) == own.reduce { OWN_DTYPE } else { LOCAL_SUM };
    hops.push(Hop::new("sent to other ranks", own.wire(passes), asked.reduce, why));
    hops.push(Hop::as_asked("added up over ranks", DType::F32));
    // The accumulator is what the optimizer and whole-model reads read.
    hops.push(Hop::new("accumulated and read", own.accumulate, asked.accumulate, OWN_DTYPE));
    hops.push(Hop::as_asked("optimizer states", DType::F32));
    hops.push(Hop::as_asked("master weights", own.master));
    hops.push(Hop::new("model weights", own.model, asked.model, OWN_DTYPE));
    hops
}

fn numel(bucket: &BucketSpec) -> Numel {
    let slots = 0..bucket.layout.slot_count();
    Numel(slots.map(|slot| bucket.layout.slot(slot).len()).sum())
}

impl fmt::Display for GradientPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, ranks, dtype, numel, micro_batches, .. } = self;
        write!(
            f,
            "gradients of {numel} {dtype} elements over {group} ({}), ",
            counted(ranks.get(), "rank")
        )?;
        match micro_batches {
            1 => write!(f, "a micro-batch a window")?,
            _ => write!(f, "{micro_batches} micro-batches a window")?,
        }
        for Hop { place, dtype, asked, why } in &self.hops {
            write!(f, "\n  {place:<24}{dtype}")?;
            if let Some(why) = why {
                write!(f, " ({asked} was asked for: {why})")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Along, Batches, Bucketing, Bytes, MeshAxis, Overlap, ParamSpec, Precision, Stage, UnitId,
        assign_buckets,
    };

    /// A bf16 model with an f32 norm, a tied matrix, an expert, and a parameter that is frozen.
    fn paths(stage: Stage, precision: Precision, accumulation: usize) -> Vec<GradientPath> {
        let spec = |name, dtype| ParamSpec::new(name, &[4, 4], dtype, UnitId(0));
        let specs = [
            spec("matrix", DType::Bf16),
            ParamSpec { contributions: 2, ..spec("tied", DType::Bf16) },
            spec("norm", DType::F32),
            ParamSpec {
                along: vec![Along::Distinct, Along::Replicated],
                ..spec("expert", DType::Bf16)
            },
            ParamSpec { trainable: false, ..spec("frozen", DType::F16) },
        ];
        let axis = |name, batches| MeshAxis::new(name, WorldSize::new(2).unwrap(), batches);
        let axes = vec![axis("data", Batches::Different), axis("tensor", Batches::Same)];
        let mesh = Mesh::new(axes).unwrap();
        let buckets = assign_buckets(&specs, &mesh, Bucketing::Bytes(Bytes(32)), Bytes(4));
        let input = PlanInput {
            stage,
            precision,
            accumulation,
            state_count: 2,
            shares_replicas: false,
            scratch: Bytes(0),
            overlap: Overlap::Off,
            buckets: &buckets,
            order: &[UnitId(0)],
        };
        gradient_paths(&input, &mesh)
    }

    fn at<'a>(path: &'a GradientPath, place: &str) -> &'a Hop {
        path.hops.iter().find(|hop| hop.place == place).unwrap()
    }

    #[test]
    fn each_group_and_dtype_has_its_way() {
        let paths = paths(Stage::Zero2, Precision::of_model(DType::Bf16), 4);
        let head = |path: &GradientPath| (path.group.clone(), path.ranks.get(), path.numel.0);
        let heads: Vec<_> = paths.iter().map(head).collect();
        let of_data = |numel| ("data".into(), 2, numel);
        assert_eq!(heads, [("alone".into(), 1, 16), of_data(16), of_data(32)]);
        assert_eq!(paths[1].dtype, DType::F32);
        let bf16 = &paths[2];
        assert_eq!(at(bf16, "collected").dtype, DType::Bf16);
        assert_eq!(at(bf16, "collected, of several").why, Some(SEVERAL));
        assert_eq!(at(bf16, "sent to other ranks").dtype, DType::Bf16);
        assert_eq!(at(bf16, "accumulated and read").dtype, DType::F32);
    }

    #[test]
    fn what_is_widened_beyond_what_was_asked_is_told() {
        let default = Precision::of_model(DType::Bf16);
        let summed = paths(Stage::Zero1, default, 4);
        let sent = at(&summed[2], "sent to other ranks");
        assert_eq!((sent.dtype, sent.asked, sent.why), (DType::F32, DType::Bf16, Some(LOCAL_SUM)));
        assert_eq!(at(&paths(Stage::Zero1, default, 1)[2], "sent to other ranks").why, None);
        let narrow = Precision { accumulate: DType::Bf16, ..default };
        let norm = &paths(Stage::Zero2, narrow, 1)[1];
        assert_eq!(at(norm, "accumulated and read").why, Some(OWN_DTYPE));
        assert!(norm.to_string().contains("bf16 was asked for: these parameters"), "{norm}");
    }

    #[test]
    fn nothing_is_told_where_all_is_as_asked() {
        let precision = Precision { reduce: DType::F32, ..Precision::of_model(DType::Bf16) };
        for stage in Stage::ALL {
            for path in paths(stage, precision, 3).iter().filter(|path| path.dtype == DType::Bf16) {
                assert!(path.hops.iter().all(|hop| hop.why.is_none()), "{path}");
            }
        }
    }
}
