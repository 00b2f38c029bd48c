//! `oxizero bench checkpoint`: saving and loading, beside plain files of the same bytes.
//!
//! `write` and `read` are plain: each rank writes as many bytes as it owns, a block after another,
//! to a file of its own, which is then synced, and reads them again. What was just written may
//! still be in memory when it is read, by both. `pause` is how long a save in the background keeps
//! training waiting, and `background` how long it takes until all is on the disk where nobody
//! trains meanwhile.
//!
//! In every round a window is trained, saved, and another one trained, which loading undoes: in the
//! end the weights are those of as many windows as there were rounds.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use oxizero::{EngineError, LoadOptions, RunFolder, SaveOptions};
use oxizero_comm::Communicator;
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, ConfigError, DType, Rank, Stage, WorldSize};
use serde::{Deserialize, Serialize};

use super::clock::{Clock, Lap};
use super::copies::Copies;
use super::rows::Row;
use super::steps::{Setting, Steps};
use super::{Benchmark, model, room};
use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

/// What is saved.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Checkpoints {
    /// Elements of the model, each of which is saved as 12 bytes: master weight and two moments.
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = model::params)]
    params: usize,
    /// ZeRO stage, 0 to 3.
    #[arg(long, value_name = "S", default_value = "2", value_parser = args::stage)]
    stage: Stage,
    /// Where files are written, in a folder that is removed in the end.
    #[arg(long, value_name = "DIR", default_value = ".")]
    folder: PathBuf,
}

/// Bytes of an element that are saved.
const SAVED: usize = 3 * DType::F32.size();
/// On the disk together: a checkpoint, the one that replaces it, and the plain files.
const COPIES: usize = 3;
/// Bytes that are written or read at once.
const BLOCK: usize = 1 << 20;
/// The checkpoint's name.
const NAME: &str = "step";

impl Benchmark for Checkpoints {
    fn title(&self) -> String {
        let (params, stage) = (self.params, u8::from(self.stage));
        format!("a checkpoint of {params} parameters, {}; ZeRO stage {stage}", self.saved())
    }

    fn check_before(&self, world_size: WorldSize, launch: Launch) -> Result<Bytes, CliError> {
        let needs = self.setting().needs(world_size, launch == Launch::Processes)?;
        let needs = room::check("params", &self.params, needs + self.saved())?;
        self.check_disk()?;
        Ok(needs)
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let setting = self.setting();
        let folder = Folder::create(&self.folder, comm)?;
        let owned = self.saved().0.div_ceil(comm.world_size().get());
        let mut round = Round {
            steps: Steps::new(&setting, comm)?,
            run: RunFolder::new(folder.path.join("run")),
            plain: folder.path.join(format!("plain-{}", comm.rank())),
            owned: Bytes(owned),
            copies: Copies::new(Bytes(2 * owned)),
            clock: Clock::default(),
        };
        for _ in 0..rounds {
            round.time(comm)?;
        }
        let hash = round.steps.hash()?;
        comm.barrier()?; // nobody needs the folder any more
        let mut rows = round.clock.rows(comm.world_size().get());
        for row in rows.iter_mut().filter(|row| row.name == "load") {
            row.hash = Some(hash.clone());
        }
        Ok(rows)
    }
}

impl Checkpoints {
    fn saved(&self) -> Bytes {
        Bytes(self.params * SAVED)
    }

    fn setting(&self) -> Setting {
        let (dtype, stage) = (DType::Bf16, self.stage);
        let specs = model::specs(self.params, super::step::TENSORS, dtype);
        Setting { name: "step".into(), specs, dtype, stage }
    }

    fn check_disk(&self) -> Result<(), CliError> {
        let free = rustix::fs::statvfs(&self.folder)
            .map_err(|error| CliError::path("use", &self.folder)(error.into()))?;
        let available = Bytes((free.f_bavail * free.f_frsize) as usize);
        let needs = self.saved() * COPIES;
        if needs <= available {
            return Ok(());
        }
        let allowed = format!("what fits: it needs {needs} of disk, and {available} are available");
        let (field, value) = ("params".into(), self.params.to_string());
        Err(ConfigError::Value { field, value, allowed }.into())
    }
}

/// What is done in every round.
struct Round<'a> {
    steps: Steps<'a>,
    run: RunFolder,
    /// This rank's plain file.
    plain: PathBuf,
    /// What this rank writes of a checkpoint.
    owned: Bytes,
    copies: Copies,
    clock: Clock,
}

impl Round<'_> {
    fn time(&mut self, comm: &dyn Communicator) -> Result<(), RankError> {
        self.steps.time(&mut Clock::default())?;

        let lap = Lap::start(comm)?;
        write(&self.plain, self.owned)?;
        self.clock.stop(lap, "write", "write", comm)?;
        let options = SaveOptions { name: Some(NAME.into()), ..SaveOptions::default() };
        let lap = Lap::start(comm)?;
        self.steps.engine.save(&self.run, &options)?;
        self.clock.stop(lap, "save", "write", comm)?;

        self.copies.time(self.owned * 2, "memcpy", &mut self.clock, comm)?;
        let lap = Lap::start(comm)?;
        self.steps.engine.save_in_background(&self.run, &options)?;
        let pause = self.clock.stop(lap, "pause", "memcpy", comm)?;
        let lap = Lap::start(comm)?;
        self.steps.engine.finish_save()?;
        let background = pause + lap.stop(comm)?;
        self.clock.keep("background", "write", background);

        self.steps.time(&mut Clock::default())?;
        let lap = Lap::start(comm)?;
        read(&self.plain)?;
        self.clock.stop(lap, "read", "read", comm)?;
        let lap = Lap::start(comm)?;
        self.steps.engine.load(&self.run, Some(NAME), LoadOptions::default())?;
        self.clock.stop(lap, "load", "read", comm)?;
        Ok(())
    }
}

/// A plain file of so many bytes, which are on the disk when this returns.
fn write(path: &Path, bytes: Bytes) -> Result<(), RankError> {
    let block: Vec<u8> = (0..BLOCK).map(|byte| (byte % 251) as u8).collect();
    let mut file = File::create(path)?;
    let mut left = bytes.0;
    while left > 0 {
        let len = left.min(BLOCK);
        file.write_all(&block[..len])?;
        left -= len;
    }
    Ok(file.sync_all()?)
}

fn read(path: &Path) -> Result<(), RankError> {
    let (mut file, mut block) = (File::open(path)?, vec![0; BLOCK]);
    while file.read(&mut block)? > 0 {
        std::hint::black_box(&mut block);
    }
    Ok(())
}

/// The folder that the bench writes to. Rank 0 makes it, and removes it in the end.
struct Folder {
    path: PathBuf,
    is_first: bool,
}

impl Folder {
    fn create(parent: &Path, comm: &dyn Communicator) -> Result<Self, RankError> {
        let told = comm.exchange("the folder", &std::process::id().to_le_bytes())?;
        let number = told[0].as_slice().try_into().map(u32::from_le_bytes);
        let number = number.expect("every rank exchanges four bytes");
        let path = parent.join(format!("oxizero-bench-{number}"));
        let folder = Self { path, is_first: comm.rank() == Rank(0) };
        let made = if folder.is_first { fs::create_dir(&folder.path) } else { Ok(()) };
        let told = comm.exchange("a folder", &[u8::from(made.is_ok())])?;
        made?;
        match told[0][0] {
            1 => Ok(folder),
            _ => Err(EngineError::PeerRefused { rank: Rank(0) }.into()),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_first {
            let _stays = fs::remove_dir_all(&self.path);
        }
    }
}
