//! How the processes of a world find each other.
//!
//! Rank 0 listens on a unix socket; the others connect and say who they are. When all have come,
//! rank 0 sends each the memory and everybody's process number. Whatever goes wrong is told to
//! everybody who has come, as rank 0 puts it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use oxizero_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::{Options, Replicas, memory, socket};
use crate::CommError;
use crate::queue::INTERRUPTED;
use crate::waits::{LOOK_EVERY, list};

/// Another process of the world.
pub(super) struct Peer {
    pub(super) rank: Rank,
    pub(super) pid: i32,
    /// Rank 0 has one to everybody, the others to rank 0. Nothing is sent on it any more.
    pub(super) socket: Option<OwnedFd>,
}

/// The first word of every message. Changes with the form of messages or of the control pages.
const HELLO: u64 = u64::from_le_bytes(*b"oxizero4");
const WELCOME: u64 = HELLO + 1;
const REFUSAL: u64 = HELLO + 2;

/// How much longer the others wait, so that they hear from rank 0 who is missing.
const GRACE: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(5);

/// The shared memory, and the other processes.
pub(super) fn join(options: &Options) -> Result<(OwnedFd, Vec<Peer>), CommError> {
    if options.world_size == WorldSize::ONE {
        return Ok((memory::create(options.world_size)?, Vec::new()));
    }
    if options.rank == Rank(0) {
        return Host::open(options)?.gather();
    }
    connect(options).map_err(|why| CommError::Rendezvous { rank: options.rank, why })
}

/// Rank 0's side.
struct Host<'a> {
    options: &'a Options,
    listener: OwnedFd,
    /// Connected, and not yet known by rank.
    unknown: Vec<OwnedFd>,
    /// By rank; rank 0 has none.
    joined: Vec<Option<(i32, OwnedFd)>>,
}

impl<'a> Host<'a> {
    fn open(options: &'a Options) -> Result<Self, CommError> {
        let name = &options.socket;
        let listener = socket::listen(name).map_err(|errno| CommError::Rendezvous {
            rank: options.rank,
            why: format!("cannot listen under {}: {}", name.display(), advice(errno)),
        })?;
        let joined = options.world_size.ranks().map(|_| None).collect();
        Ok(Self { options, listener, unknown: Vec::new(), joined })
    }

    fn gather(mut self) -> Result<(OwnedFd, Vec<Peer>), CommError> {
        let until = after(self.options.deadline);
        while !self.missing().is_empty() {
            if let Err(why) = self.admit_next(until) {
                self.refuse(&why);
                return Err(CommError::Rendezvous { rank: self.options.rank, why });
            }
        }
        let file = memory::create(self.options.world_size);
        let sent = file.map_err(|error| error.to_string()).and_then(|file| self.welcome(file));
        sent.map_err(|why| {
            self.refuse(&why);
            CommError::Rendezvous { rank: self.options.rank, why }
        })
    }

    fn missing(&self) -> Vec<Rank> {
        let ranks = self.options.world_size.ranks().skip(1);
        ranks.filter(|rank| self.joined[rank.0].is_none()).collect()
    }

    /// Deals with who comes next, or ends.
    fn admit_next(&mut self, until: Instant) -> Result<(), String> {
        let joined = self.joined.iter().enumerate();
        let joined = joined.filter_map(|(rank, peer)| Some((Rank(rank), &peer.as_ref()?.1)));
        let (ranks, mut sockets): (Vec<Rank>, Vec<&OwnedFd>) = joined.unzip();
        sockets.extend(&self.unknown);
        sockets.push(&self.listener);
        let look = until.min(Instant::now() + LOOK_EVERY);
        let ready = socket::wait(&sockets, look).map_err(|errno| errno.to_string())?;

        let (joined, others) = ready.split_at(ranks.len());
        if let Some(index) = joined.iter().position(|ready| *ready) {
            return Err(format!("rank {} ended before all had joined", ranks[index]));
        }
        if let Some(index) = others.iter().position(|ready| *ready) {
            if index < self.unknown.len() {
                let connection = self.unknown.swap_remove(index);
                return self.introduce(connection);
            }
            return self.accept().map_err(|errno| errno.to_string());
        }
        if (self.options.interrupted)() {
            return Err(INTERRUPTED.to_owned());
        }
        if Instant::now() < until {
            return Ok(());
        }
        Err(format!(
            "{} of {} did not come within {:?}; look at their output",
            list(&self.missing()),
            self.options.world_size,
            self.options.deadline
        ))
    }

    /// Takes a new connection, if there still is one.
    fn accept(&mut self) -> rustix::io::Result<()> {
        match socket::accept(&self.listener) {
            // Another user's process is not answered at all.
            Ok(connection) if !matches!(socket::peer(&connection), Ok((_, true))) => {}
            Ok(connection) => self.unknown.push(connection),
            // Whoever connected has given up.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    /// Takes the first message of a new connection. Any other message than these is not answered.
    fn introduce(&mut self, connection: OwnedFd) -> Result<(), String> {
        let Ok((message, _)) = socket::receive(&connection) else { return Ok(()) };
        let Some([HELLO, rank, world_size, replicas]) = words(&message) else { return Ok(()) };
        let own_replicas = self.options.replicas;
        let expected = self.options.world_size.get();
        let refusal = match self.joined.get(rank as usize) {
            _ if world_size != expected as u64 => Some(format!(
                "rank {rank} was started for a world of {world_size}, and rank 0 for {expected}"
            )),
            _ if replicas != word(own_replicas) => {
                let own = match own_replicas {
                    Replicas::Shared => "one copy of replicated weights a machine",
                    Replicas::Private => "a copy of replicated weights a rank",
                };
                Some(format!("rank 0 was started with {own}, and rank {rank} was not"))
            }
            Some(None) if rank > 0 => None,
            Some(_) => Some(format!("two processes were started as rank {rank}")),
            None => Some(format!("a world of {expected} has no rank {rank}")),
        };
        if let Some(why) = refusal {
            self.unknown.push(connection);
            return Err(why);
        }
        let (pid, _) = socket::peer(&connection).map_err(|errno| errno.to_string())?;
        self.joined[rank as usize] = Some((pid, connection));
        Ok(())
    }

    fn welcome(&mut self, file: OwnedFd) -> Result<(OwnedFd, Vec<Peer>), String> {
        let own = rustix::process::getpid().as_raw_pid();
        let pid = |peer: &Option<(i32, OwnedFd)>| peer.as_ref().map_or(own, |(pid, _)| *pid) as u64;
        let message: Vec<u64> = [WELCOME].into_iter().chain(self.joined.iter().map(pid)).collect();
        for (rank, peer) in self.joined.iter().enumerate() {
            if let Some((_, socket)) = peer {
                socket::send(socket, bytemuck::cast_slice(&message), Some(&file))
                    .map_err(|errno| format!("rank {rank} cannot be answered: {errno}"))?;
            }
        }
        let peers = self.joined.iter_mut().enumerate();
        let peers = peers.filter_map(|(rank, peer)| Some((Rank(rank), peer.take()?)));
        let peers = peers.map(|(rank, (pid, socket))| Peer { rank, pid, socket: Some(socket) });
        Ok((file, peers.collect()))
    }

    /// Tells everybody who has come why there will be no world.
    fn refuse(&self, why: &str) {
        let why = &why[..why.floor_char_boundary(socket::MESSAGE_BYTES_MAX - 8)];
        let message = [&REFUSAL.to_ne_bytes(), why.as_bytes()].concat();
        let joined = self.joined.iter().flatten().map(|(_, socket)| socket);
        for socket in joined.chain(&self.unknown) {
            // Who is gone need not be told.
            let _ = socket::send(socket, &message, None);
        }
    }
}

/// The other ranks' side.
fn connect(options: &Options) -> Result<(OwnedFd, Vec<Peer>), String> {
    let until = after(options.deadline);
    let socket = connect_until(options, until)?;
    if !matches!(socket::peer(&socket), Ok((_, true))) {
        return Err(format!("another user listens under {}", options.socket.display()));
    }
    let (rank, world_size) = (options.rank.0 as u64, options.world_size.get() as u64);
    let hello = [HELLO, rank, world_size, word(options.replicas)];
    socket::send(&socket, bytemuck::cast_slice(&hello), None)
        .map_err(|errno| format!("rank 0 has closed the connection: {errno}"))?;

    await_answer(options, &socket, until + GRACE)?;
    let ended = "rank 0 ended before all had joined; look at its output";
    // The first attempt may find that rank 0 has closed without reading; what it sent comes then.
    let received = socket::receive(&socket).or_else(|_| socket::receive(&socket));
    let (message, file) = received.map_err(|_| ended.to_owned())?;
    match message.first_chunk().map(|word| u64::from_ne_bytes(*word)) {
        Some(WELCOME) => {}
        Some(REFUSAL) => return Err(String::from_utf8_lossy(&message[8..]).into_owned()),
        _ => return Err(ended.to_owned()),
    }
    let file = file.ok_or("rank 0 sent no memory; too many files may be open")?;
    memory::verify(&file, options.world_size)?;
    Ok((file, peers(options.rank, &message[8..], socket)))
}

/// The other ranks, from the process numbers in a welcome.
fn peers(own: Rank, pids: &[u8], socket: OwnedFd) -> Vec<Peer> {
    let mut socket = Some(socket);
    let pids = pids.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    let peers = pids.enumerate().filter(|(rank, _)| *rank != own.0);
    // The first of the others is rank 0.
    peers
        .map(|(rank, pid)| Peer { rank: Rank(rank), pid: pid as i32, socket: socket.take() })
        .collect()
}

fn await_answer(options: &Options, socket: &OwnedFd, until: Instant) -> Result<(), String> {
    loop {
        let look = until.min(Instant::now() + LOOK_EVERY);
        let ready = socket::wait(&[socket], look).map_err(|errno| errno.to_string())?;
        if ready == [true] {
            return Ok(());
        }
        if (options.interrupted)() {
            return Err(INTERRUPTED.to_owned());
        }
        if Instant::now() >= until {
            return Err(format!("rank 0 has not answered within {:?}", options.deadline));
        }
    }
}

fn connect_until(options: &Options, until: Instant) -> Result<OwnedFd, String> {
    let Options { socket: name, deadline, interrupted, .. } = options;
    let mut look = Instant::now() + LOOK_EVERY;
    loop {
        let errno = match socket::connect(name) {
            Ok(socket) => return Ok(socket),
            Err(errno) => errno,
        };
        if !matches!(errno, Errno::CONNREFUSED | Errno::AGAIN) {
            return Err(format!("cannot connect to {}: {}", name.display(), advice(errno)));
        }
        if Instant::now() >= until {
            let name = name.display();
            return Err(format!(
                "rank 0 did not open {name} within {deadline:?}; look at its output"
            ));
        }
        if Instant::now() >= look {
            look += LOOK_EVERY;
            if interrupted() {
                return Err(INTERRUPTED.to_owned());
            }
        }
        std::thread::sleep(RETRY);
    }
}

/// When `deadline` will have passed; one that never ends is a year.
fn after(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(Duration::from_secs(365 * 24 * 60 * 60))
}

fn advice(errno: Errno) -> String {
    match errno {
        Errno::NAMETOOLONG => "the name is longer than 107 bytes; use a shorter one".to_owned(),
        Errno::ADDRINUSE => "another world uses this name; use one of its own".to_owned(),
        _ => errno.to_string(),
    }
}

/// As every process of a world must have it.
fn word(replicas: Replicas) -> u64 {
    match replicas {
        Replicas::Shared => 0,
        Replicas::Private => 1,
    }
}

fn words(message: &[u8]) -> Option<[u64; 4]> {
    let words: [u8; 32] = message.try_into().ok()?;
    Some(bytemuck::cast(words))
}
