//! Ranks as processes of one Linux machine, over shared memory.
//!
//! Rank 0 makes a memfd and passes it to the others over a unix socket. The memory holds control
//! pages, where ranks post their operations and wait on futexes, and a section for each rank's
//! allocations. A collective reads the others' buffers where they lie. Nothing has a name in the
//! file system, and the memory goes with the last process, however it ends.
//!
//! A process that ends is noticed at once by the others' watchers, through its pidfd and the
//! rendezvous' sockets.

mod control;
mod free_list;
mod meet;
#[expect(unsafe_code, reason = "the mapping of the shared memory, behind a safe face")]
mod memory;
mod rendezvous;
#[expect(unsafe_code, reason = "regions of the shared memory, behind a safe face")]
mod section;
mod signal;
mod socket;
mod watch;
mod word;

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use oxizero_core::{ProcessGroup, Rank, WorldSize};

use self::control::{Control, RANKS_MAX};
use self::meet::ShmTransport;
use self::memory::Mapping;
use self::rendezvous::Peer;
use self::section::Section;
use self::watch::Watcher;
use crate::group::Group;
use crate::{CommError, Communicator, DEFAULT_DEADLINE};

/// How a process finds the others.
#[derive(Clone, Debug)]
pub struct Options {
    /// This process's rank.
    pub rank: Rank,
    /// Processes in the world; at most 64.
    pub world_size: WorldSize,
    /// The name under which rank 0 listens until all have joined: at most 107 bytes, which no
    /// other world uses at the time. It is no path but a name in Linux's abstract namespace.
    /// Processes of other users are refused; one that can guess the name can take it first.
    pub socket: OsString,
    /// How long a rank waits for another, from here on and in every operation.
    pub deadline: Duration,
    /// Whose memory replicas lie in, in all groups of the world; the same on every rank.
    pub replicas: Replicas,
    /// Asked about ten times a second while this rank waits for another, on the thread that waits:
    /// whether it is to give up, as after Ctrl-C. Then the world is aborted. Not asked on a thread
    /// of [`overlapped`](crate::overlapped()), which asks by itself.
    pub interrupted: fn() -> bool,
}

/// Whose memory [`Communicator::alloc_replica`] gives a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replicas {
    /// All ranks': the machine holds a replica once.
    #[default]
    Shared,
    /// Its own, of which it may write all at any time.
    Private,
}

impl Options {
    /// The options of `rank`, with the default deadline, shared replicas and no interruptions.
    pub fn new(rank: Rank, world_size: WorldSize, socket: impl Into<OsString>) -> Self {
        Self {
            rank,
            world_size,
            socket: socket.into(),
            deadline: DEFAULT_DEADLINE,
            replicas: Replicas::default(),
            interrupted: || false,
        }
    }
}

/// Joins the world; returns when every rank has joined.
///
/// # Errors
///
/// [`CommError::Rendezvous`] where the ranks do not find each other, which says what to do and,
/// if ranks are missing, which; [`CommError::System`] where the system refuses memory.
pub fn connect(options: Options) -> Result<Box<dyn Communicator>, CommError> {
    let Options { rank, world_size, deadline, .. } = options;
    let refuse = |why| Err(CommError::Rendezvous { rank, why });
    if world_size.get() > RANKS_MAX {
        return refuse(format!(
            "a world of {world_size} processes; at most {RANKS_MAX} are possible"
        ));
    }
    if rank.0 >= world_size.get() {
        return refuse(format!("a world of {world_size} has no rank {rank}"));
    }
    let (file, peers) = rendezvous::join(&options)?;
    let mapping = Arc::new(Mapping::new(file, world_size)?);
    let process = Arc::new(Process::new(mapping, &options, peers)?);
    Ok(Box::new(Group::new(ShmTransport::world(
        process,
        ProcessGroup::world(world_size),
        deadline,
    ))))
}

/// What all groups of this process share. Dropping it says that this rank leaves.
struct Process {
    rank: Rank,
    mapping: Arc<Mapping>,
    section: Arc<Section>,
    replicas: Replicas,
    /// Turns that a wait spins: none where ranks must take turns on the processors.
    spins: u32,
    watcher: Option<Watcher>,
    interrupted: fn() -> bool,
}

/// About a tenth of a millisecond: longer than ranks that run are apart, and short where others
/// want the processor (20 times as many made barriers on a loaded machine 10 times slower).
const SPINS: u32 = 2_000;

impl Process {
    fn new(mapping: Arc<Mapping>, options: &Options, peers: Vec<Peer>) -> Result<Self, CommError> {
        let Options { rank, replicas, interrupted, .. } = *options;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if options.world_size.get() <= processors { SPINS } else { 0 };
        let section = Section::new(Arc::clone(&mapping), rank);
        let watcher = Some(Watcher::start(Arc::clone(&mapping), rank, peers)?);
        Ok(Self { rank, mapping, section, replicas, spins, watcher, interrupted })
    }

    fn control(&self) -> &Control {
        self.mapping.control()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Only then may the sockets close, which the watcher holds.
        self.control().depart(self.rank);
        self.watcher.take();
    }
}
