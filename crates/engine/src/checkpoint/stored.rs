//! What is stored of a model, and which of it is this rank's.

use std::ops::Range;

use oxizero_checkpoint::{Param, Planned, Role, Tensor, stored_dtype};
use oxizero_core::{DType, ParamId, ParamSpec, Part, Rank};
use oxizero_device::{View, ViewMut, kernels};

use crate::bucket::Kept;
use crate::groups::Message;
use crate::{Engine, EngineError};

/// A tensor of a checkpoint, and what it is in this engine.
pub(super) struct Stored {
    pub(super) tensor: Tensor,
    pub(super) param: ParamId,
    pub(super) kept: Kept,
    /// The type of its elements.
    pub(super) dtype: DType,
}

impl Engine {
    /// The part of a parameter's whole tensor that this rank holds.
    pub(super) fn own_part(&self, param: ParamId) -> Part {
        self.part_of_rank(&self.specs[param.0], self.groups.world().rank())
    }

    fn part_of_rank(&self, spec: &ParamSpec, rank: Rank) -> Part {
        let mesh = self.mesh();
        mesh.part(spec, mesh.place(mesh.sharing(spec).parts(), rank))
    }

    /// Every tensor that is stored, without pieces; the same on every rank.
    pub(super) fn stored(&self) -> Vec<Stored> {
        let of_param = |param: ParamId| {
            let (spec, part) = (&self.specs[param.0], self.own_part(param));
            let kept = self.kept(spec).into_iter();
            kept.map(move |(kept, role, dtype)| {
                let tensor = Tensor {
                    name: spec.name.clone(),
                    role,
                    shape: part.whole.clone(),
                    part_shape: part.shape.clone(),
                    dtype: stored_dtype(dtype),
                    pieces: Vec::new(),
                };
                Stored { tensor, param, kept, dtype }
            })
        };
        (0..self.specs.len()).map(ParamId).flat_map(of_param).collect()
    }

    /// What is kept of a parameter between steps, and cannot be had from something else.
    fn kept(&self, spec: &ParamSpec) -> Vec<(Kept, Role, DType)> {
        if !spec.trainable {
            return vec![(Kept::Weights, Role::Weights, spec.dtype)];
        }
        let names = self.hyper.setup.rule.state_names().iter().enumerate();
        let states = names
            .map(|(index, name)| (Kept::State(index), Role::State((*name).into()), DType::F32));
        std::iter::once((Kept::Master, Role::Master, DType::F32)).chain(states).collect()
    }

    /// The pieces that this rank writes: of each bucket its shard, where it is the first of the
    /// ranks that hold the same.
    pub(super) fn own_pieces(&self, stored: &[Stored]) -> Vec<Planned> {
        let mut own = vec![0..0; self.specs.len()];
        for bucket in &self.buckets {
            let spec = bucket.spec();
            if self.groups.counts(spec.sharing) {
                for piece in spec.layout.pieces(bucket.shard()) {
                    own[spec.params[piece.slot].0] = piece.in_param;
                }
            }
        }
        let planned = |(tensor, stored): (usize, &Stored)| {
            let part = self.own_part(stored.param).number().expect("ranks hold equal parts");
            Planned { tensor, part, elements: own[stored.param.0].clone() }
        };
        stored.iter().enumerate().map(planned).collect()
    }

    /// Elements of a parameter that rest on this rank.
    pub(super) fn kept_values(&self, stored: &Stored, elements: Range<usize>) -> View<'_> {
        let state = &self.params[stored.param.0];
        let bucket = &self.buckets[state.bucket.0];
        let start = bucket.spec().layout.slot(state.slot).start;
        let range = start + elements.start..start + elements.end;
        if range.is_empty() {
            return nothing(stored.dtype);
        }
        bucket.kept(stored.kept, range).expect("what is stored is kept")
    }

    /// Copies elements of a parameter to bytes of a file.
    pub(super) fn copy_kept(&self, stored: &Stored, elements: Range<usize>, bytes: &mut [u8]) {
        let values = self.kept_values(stored, elements);
        kernels::cast(values, ViewMut::of_bytes(bytes, values.dtype()));
    }

    /// What a checkpoint says of the parameters; a collective call where ranks hold tensors of
    /// their own, which only they count the updates of.
    pub(super) fn stored_params(&mut self) -> Result<Vec<Param>, EngineError> {
        let distinct = |spec: &ParamSpec| !self.mesh().sharing(spec).distinct.is_empty();
        let own = || self.params.iter().map(|state| state.updates);
        let told = if self.specs.iter().any(distinct) {
            let bytes: Vec<u8> = own().flat_map(u64::to_le_bytes).collect();
            let told = self.groups.exchange(Message::Updates, "save", &bytes);
            let told = told.map_err(|error| self.fail(error))?;
            told.iter().map(|bytes| numbers(bytes)).collect()
        } else {
            vec![own().collect::<Vec<_>>()]
        };
        let param = |(index, spec): (usize, &ParamSpec)| Param {
            name: spec.name.clone(),
            aliases: spec.aliases.clone(),
            dtype: stored_dtype(spec.dtype),
            trainable: spec.trainable,
            updates: self.updates_by_part(spec, told.iter().map(|of_rank| of_rank[index])),
        };
        Ok(self.specs.iter().enumerate().map(param).collect())
    }

    /// The updates of each part, from those that each rank counted.
    fn updates_by_part(&self, spec: &ParamSpec, counted: impl Iterator<Item = u64>) -> Vec<u64> {
        let is_distinct = !self.mesh().sharing(spec).distinct.is_empty();
        let count = self.part_of_rank(spec, Rank(0)).count().filter(|_| is_distinct);
        let mut updates = vec![0; count.unwrap_or(1)];
        for (count, rank) in counted.zip((0..).map(Rank)) {
            let part = if is_distinct { self.part_of_rank(spec, rank).number() } else { Some(0) };
            updates[part.expect("ranks hold equal parts")] = count;
        }
        updates
    }
}

/// No elements.
fn nothing(dtype: DType) -> View<'static> {
    match dtype {
        DType::F32 => View::F32(&[]),
        DType::Bf16 => View::Bf16(&[]),
        DType::F16 => View::F16(&[]),
    }
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
