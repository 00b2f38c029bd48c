//! Saves while training goes on: owned elements are copied, and a thread writes the copies.
//!
//! At the end of every window ranks agree whether all have written, and rank 0's thread then
//! commits; so nobody waits for a disk, and an error is one of all ranks in the same step.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use oxizero_checkpoint::{CheckpointError, Manifest, Planned, RunFolder, Staging};
use oxizero_core::Numel;
use oxizero_device::{Buffer, Storage, kernels};

use super::save::{Begun, SaveOptions, commit};
use super::stored::Stored;
use crate::groups::Message;
use crate::{Engine, EngineError};

/// A checkpoint that threads write.
#[derive(Debug)]
pub(crate) struct InFlight {
    run: RunFolder,
    staging: Staging,
    keep_last: Option<usize>,
    phase: Phase,
}

/// What this rank's thread does.
#[derive(Debug)]
enum Phase {
    /// It writes this rank's pieces; the manifest is for the commit.
    Writing(JoinHandle<Outcome>, Box<Manifest>),
    /// Rank 0's commits; the others have none.
    Committing(Option<JoinHandle<Outcome>>),
}

type Outcome = Result<(), CheckpointError>;

impl Phase {
    fn has_ended(&self) -> bool {
        match self {
            Self::Writing(thread, _) => thread.is_finished(),
            Self::Committing(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
        }
    }
}

impl Engine {
    /// As [`save`](Self::save), but returns when what this rank owns is copied: a thread writes the
    /// copy, and the checkpoint is there some windows later. The last [`step`](Self::step) of each
    /// window looks whether it is, and fails on every rank if the checkpoint did: it has done
    /// nothing then, and is to be called again. [`finish_save`](Self::finish_save) waits for it,
    /// and has to be called before the engine is dropped.
    ///
    /// The copy takes as many bytes as what this rank owns of masters and optimizer states, in no
    /// plan, until it is written. At most one save is on its way: another one waits for it first.
    pub fn save_in_background(
        &mut self,
        run: &RunFolder,
        options: &SaveOptions,
    ) -> Result<(), EngineError> {
        let Begun { staging, manifest, stored, planned } =
            self.begin_save(run, options, "save in the background")?;
        let copies = self.copies(&stored, &planned);
        let (rank, own) = (self.groups.world().rank().0, options.own.clone());
        let (to, head, buffers) = (staging.clone(), manifest.clone(), options.buffers.clone());
        let write = move || {
            to.write(rank, own, &head, &planned, &mut |index, range, bytes| {
                let start = planned[index].elements.start;
                let size = head.tensors[index].element_bytes();
                let range = (range.start - start) * size..(range.end - start) * size;
                let from = copies.get(index).map(|copy| copy.region().bytes());
                let from = from.unwrap_or_else(|| &buffers[index - copies.len()].bytes);
                bytes.copy_from_slice(&from[range]);
            })
        };
        let phase = Phase::Writing(thread::spawn(write), Box::new(manifest));
        let (run, keep_last) = (run.clone(), options.keep_last);
        self.in_flight = Some(InFlight { run, staging, keep_last, phase });
        Ok(())
    }

    /// Waits until the checkpoint that is on its way is on the disk, and returns its folder; a
    /// collective call. `None` if there is none.
    pub fn finish_save(&mut self) -> Result<Option<PathBuf>, EngineError> {
        let folder = self.in_flight.as_ref().map(|save| save.staging.target());
        while let Some(save) = self.in_flight.take() {
            self.advance(save)?;
        }
        Ok(folder)
    }

    /// Does what can be done of the checkpoint that is on its way, without waiting for a disk.
    pub(crate) fn look_after_save(&mut self) -> Result<(), EngineError> {
        let Some(save) = self.in_flight.take() else { return Ok(()) };
        let ended = [u8::from(save.phase.has_ended())];
        let told = self
            .beside_the_step(|engine| engine.groups.exchange(Message::SaveEnded, "step", &ended));
        let told = told.map_err(|error| self.fail(error))?;
        if told.iter().any(|ended| ended[0] == 0) {
            self.in_flight = Some(save);
            return Ok(());
        }
        self.beside_the_step(|engine| engine.advance(save))
    }

    /// Goes on to what comes after this phase, which it waits for.
    fn advance(&mut self, save: InFlight) -> Result<(), EngineError> {
        let InFlight { run, staging, keep_last, phase } = save;
        match phase {
            Phase::Writing(thread, manifest) => {
                self.agree_written(&staging, outcome(thread))?;
                let ranks = self.groups.world().world_size().get();
                let (to, of) = (staging.clone(), run.clone());
                let commit = move || commit(&to, *manifest, ranks, (&of, keep_last));
                let phase = Phase::Committing(self.on_first_rank(|| thread::spawn(commit)));
                self.in_flight = Some(InFlight { run, staging, keep_last, phase });
                Ok(())
            }
            Phase::Committing(thread) => {
                self.agree_done("save: commit", thread.map_or(Ok(()), outcome))
            }
        }
    }

    /// Copies of what this rank writes, on the host, by tensor.
    fn copies(&self, stored: &[Stored], planned: &[Planned]) -> Vec<Buffer> {
        let copy = |(stored, planned): (&Stored, &Planned)| {
            let values = self.kept_values(stored, planned.elements.clone());
            let numel = Numel(planned.elements.len());
            let mut copy = Storage::Host.resting(numel, values.dtype());
            kernels::cast(values, copy.view_mut());
            copy
        };
        stored.iter().zip(planned).map(copy).collect()
    }
}

/// What the thread did.
fn outcome(thread: JoinHandle<Outcome>) -> Outcome {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
