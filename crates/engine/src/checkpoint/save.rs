//! Writes a checkpoint: all ranks together, each what it owns.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use oxizero_checkpoint::{
    BLOCK_BYTES, CheckpointError, Dtype, Group, Manifest, Planned, Role, RunFolder, Staging,
    Tensor, Training, Value, step_name,
};
use oxizero_core::Rank;

use super::stored::Stored;
use crate::bucket::Bucket;
use crate::groups::Message;
use crate::window::WindowState;
use crate::{Engine, EngineError};

/// What is saved beside the engine's own, and how.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// The checkpoint's name; [`step_name`] of the applied steps where there is none. The same on
    /// every rank.
    pub name: Option<String>,
    /// How many checkpoints of steps are kept, this one included; all where there is no number.
    pub keep_last: Option<usize>,
    /// What the caller needs to go on, the same on every rank: its configuration, its position in
    /// the data. Rank 0's is stored.
    pub caller: Value,
    /// What each rank needs of its own, such as random states.
    pub own: Value,
    /// What the model has beside its parameters, the same on every rank. Rank 0's are stored.
    pub buffers: Vec<StoredBuffer>,
}

/// A tensor of the model that is no parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBuffer {
    /// Its name, unique among the buffers.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The elements, row-major and little-endian.
    pub bytes: Vec<u8>,
}

/// A checkpoint whose elements are still to be written.
pub(super) struct Begun {
    pub(super) staging: Staging,
    pub(super) manifest: Manifest,
    pub(super) stored: Vec<Stored>,
    /// Of every tensor one piece, in the same order.
    pub(super) planned: Vec<Planned>,
}

/// Completes a checkpoint that so many ranks have written, and removes old ones.
pub(super) fn commit(
    staging: &Staging,
    manifest: Manifest,
    ranks: usize,
    (run, keep_last): (&RunFolder, Option<usize>),
) -> Result<(), CheckpointError> {
    let committed = staging.commit(manifest, ranks);
    committed.inspect_err(|_| staging.discard())?;
    keep_last.map_or(Ok(()), |count| run.keep_last(count))
}

impl Engine {
    /// Writes a checkpoint of the engine to a folder of `run`, and returns that folder; a
    /// collective call, between one window's step and the next window. All ranks see the same
    /// folder. Memory of at most 1 MiB is used beside the engine's.
    ///
    /// The checkpoint is there whole or not at all: until the last moment the latest is the one
    /// before. When this returns, its bytes are on the disk.
    ///
    /// # Errors
    ///
    /// On every rank, if one of them cannot write ([`EngineError::Checkpoint`] there, and
    /// [`EngineError::PeerRefused`] on the others). What was written is removed, unless the error
    /// is [`CheckpointError::Written`](oxizero_checkpoint::CheckpointError::Written). With
    /// [`EngineError::InWindow`] between a backward and its step.
    pub fn save(&mut self, run: &RunFolder, options: &SaveOptions) -> Result<PathBuf, EngineError> {
        let begun = self.begin_save(run, options, "save")?;
        let Begun { staging, manifest, stored, planned } = &begun;
        let rank = self.groups.world().rank().0;
        let fill = &mut |index, range, bytes: &mut [u8]| {
            self.copy_piece(stored, options, (index, range), bytes);
        };
        let written = staging.write(rank, options.own.clone(), manifest, planned, fill);
        self.agree_written(staging, written)?;
        let ranks = self.groups.world().world_size().get();
        let Begun { staging, manifest, .. } = begun;
        let committed =
            self.on_first_rank(|| commit(&staging, manifest, ranks, (run, options.keep_last)));
        self.agree_done("save: commit", committed.unwrap_or(Ok(())))?;
        Ok(staging.target())
    }

    /// What comes before elements are written: refusals, an agreed name, and where they go.
    pub(super) fn begin_save(
        &mut self,
        run: &RunFolder,
        options: &SaveOptions,
        call: &'static str,
    ) -> Result<Begun, EngineError> {
        self.check_alive()?;
        self.finish_save()?;
        let name = options.name.clone().unwrap_or_else(|| step_name(self.applied_steps));
        let ready = self.check_between_windows(call).and_then(|()| check_buffers(options));
        self.agree_call(&format!("{call} `{name}`"), None, ready)?;
        self.settle_weights()?;
        let staging = self.stage(run, &name)?;
        let (mut manifest, stored) = (self.manifest(options)?, self.stored());
        manifest.tensors = stored.iter().map(|stored| stored.tensor.clone()).collect();
        let mut planned = self.own_pieces(&stored);
        self.add_buffers(&mut manifest, &mut planned, &options.buffers);
        Ok(Begun { staging, manifest, stored, planned })
    }

    /// Hears from all ranks whether they have written their pieces.
    pub(super) fn agree_written(
        &mut self,
        staging: &Staging,
        written: Result<(), CheckpointError>,
    ) -> Result<(), EngineError> {
        let agreed = self.agree_done("save: write", written);
        if agreed.is_err() {
            self.on_first_rank(|| staging.discard());
        }
        agreed
    }

    /// Refuses what is done between windows in the middle of one.
    pub(super) fn check_between_windows(&self, call: &'static str) -> Result<(), EngineError> {
        match self.window.state {
            WindowState::Empty | WindowState::Consumed => Ok(()),
            WindowState::Accumulating(_) | WindowState::Reduced(_) => {
                Err(EngineError::InWindow { call })
            }
        }
    }

    /// Waits for weights that are on their way, and takes over what borrowers have written alike.
    fn settle_weights(&mut self) -> Result<(), EngineError> {
        self.settle()?;
        self.compare_written()?;
        self.buckets.iter_mut().for_each(Bucket::take_over_lent);
        Ok(())
    }

    /// Begins on rank 0, and has the others join.
    fn stage(&mut self, run: &RunFolder, name: &str) -> Result<Staging, EngineError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let own = (since.as_nanos() as u64).rotate_left(20) ^ u64::from(std::process::id());
        let told = self.groups.exchange(Message::Name, "save", &own.to_le_bytes());
        let told = told.map_err(|error| self.fail(error))?;
        let nonce = told[0].as_slice().try_into().map(u64::from_le_bytes);
        let nonce = nonce.expect("every rank exchanges eight bytes");
        let begun = self.on_first_rank(|| run.begin(name, nonce));
        let staging = begun.unwrap_or_else(|| run.join(name, nonce));
        self.agree_done("save: begin", staging)
    }

    fn manifest(&mut self, options: &SaveOptions) -> Result<Manifest, EngineError> {
        let groups = self.hyper.groups().map(|(options, rule)| Group {
            lr: options.lr,
            weight_decay: options.weight_decay,
            rule: rule.map(|rule| rule.description()),
        });
        let training = Training {
            applied_steps: self.applied_steps,
            loss_scaler: self.scaler.state(),
            rule: self.hyper.setup.rule.description(),
            schedule: self.hyper.setup.schedule.to_string(),
            groups: groups.collect(),
        };
        Ok(Manifest {
            block_bytes: BLOCK_BYTES,
            params: self.stored_params()?,
            tensors: Vec::new(),
            training,
            caller: options.caller.clone(),
            ranks: Vec::new(),
        })
    }

    /// Lets rank 0 write the model's buffers too.
    fn add_buffers(
        &self,
        manifest: &mut Manifest,
        planned: &mut Vec<Planned>,
        buffers: &[StoredBuffer],
    ) {
        let is_first = self.groups.world().rank() == Rank(0);
        for buffer in buffers {
            let tensor = Tensor {
                name: buffer.name.clone(),
                role: Role::Buffer,
                shape: buffer.shape.clone(),
                part_shape: buffer.shape.clone(),
                dtype: buffer.dtype,
                pieces: Vec::new(),
            };
            let elements = if is_first { 0..tensor.numel().0 } else { 0..0 };
            planned.push(Planned { tensor: manifest.tensors.len(), part: 0, elements });
            manifest.tensors.push(tensor);
        }
    }

    /// Copies elements of a piece that is written; pieces and tensors have the same order.
    pub(super) fn copy_piece(
        &self,
        stored: &[Stored],
        options: &SaveOptions,
        (index, range): (usize, Range<usize>),
        bytes: &mut [u8],
    ) {
        match stored.get(index) {
            Some(stored) => self.copy_kept(stored, range, bytes),
            None => {
                let buffer = &options.buffers[index - stored.len()];
                let size = buffer.dtype.bitsize() / 8;
                bytes.copy_from_slice(&buffer.bytes[range.start * size..range.end * size]);
            }
        }
    }

    /// Compares an outcome across ranks: an error of one is an error of all.
    pub(super) fn agree_done<T>(
        &mut self,
        what: &str,
        outcome: Result<T, CheckpointError>,
    ) -> Result<T, EngineError> {
        self.agree_call(what, None, outcome.map_err(EngineError::from))
    }

    pub(super) fn on_first_rank<T>(&self, deed: impl FnOnce() -> T) -> Option<T> {
        (self.groups.world().rank() == Rank(0)).then(deed)
    }
}

/// Refuses buffers whose bytes are not their shape's.
fn check_buffers(options: &SaveOptions) -> Result<(), EngineError> {
    let is_right = |buffer: &&StoredBuffer| {
        let bits = buffer
            .shape
            .iter()
            .try_fold(buffer.dtype.bitsize(), |bits, size| bits.checked_mul(*size));
        bits == buffer.bytes.len().checked_mul(8)
    };
    match options.buffers.iter().find(|buffer| !is_right(buffer)) {
        Some(StoredBuffer { name, shape, dtype, bytes }) => Err(EngineError::Param {
            param: name.clone(),
            problem: format!("{} bytes are no {shape:?} elements of {dtype}", bytes.len()),
        }),
        None => Ok(()),
    }
}
