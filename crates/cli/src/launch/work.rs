//! What ranks are started for.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use oxizero_comm::Communicator;
use oxizero_comm::shm::Replicas;
use oxizero_core::config::RunConfig;

use crate::bench::{self, BenchJob};
use crate::job::Job;
use crate::rank::{self, RankError};
use crate::run_folder;

/// The same for every rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    /// `oxizero train`.
    Train(Box<Job>),
    /// `oxizero bench`.
    Bench(BenchJob),
}

const TRAIN: u8 = b't';
const BENCH: u8 = b'b';

impl Work {
    /// The ranks.
    pub(super) fn run(&self) -> &RunConfig {
        match self {
            Self::Train(job) => &job.config.run,
            Self::Bench(job) => &job.run,
        }
    }

    /// Whose memory replicas are to lie in, where the ranks are processes.
    pub(super) fn replicas(&self) -> Replicas {
        match self {
            Self::Train(_) => Replicas::Shared,
            Self::Bench(job) => job.replicas(),
        }
    }

    /// Whether its ranks end by themselves once they are asked to.
    pub(super) fn hears(&self) -> bool {
        matches!(self, Self::Train(_))
    }

    /// Whether there is something by now for which ranks are to end by themselves.
    pub(super) fn may_go_on(&self) -> impl Fn() -> bool + use<> {
        let folder = match self {
            Self::Train(job) => Some(job.folder.clone()),
            Self::Bench(_) => None,
        };
        move || folder.as_deref().is_some_and(run_folder::has_trained)
    }

    /// Does it as one rank of `comm`; `asked` becomes true when it is to end by itself.
    pub(super) fn perform(
        &self,
        comm: Box<dyn Communicator>,
        asked: &Arc<AtomicBool>,
    ) -> Result<(), RankError> {
        match self {
            Self::Train(job) => rank::run(job, comm, asked),
            Self::Bench(job) => bench::run(job, comm),
        }
    }

    /// Writes it for [`receive`](Self::receive).
    pub(super) fn send(&self, to: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Train(job) => {
                to.write_all(&[TRAIN])?;
                job.send(to)
            }
            Self::Bench(job) => {
                to.write_all(&[BENCH])?;
                Ok(serde_json::to_writer(to, job)?)
            }
        }
    }

    /// Reads what [`send`](Self::send) wrote, to the end.
    pub(super) fn receive(from: &mut dyn Read) -> io::Result<Self> {
        let mut kind = [0];
        from.read_exact(&mut kind)?;
        match kind {
            [TRAIN] => Ok(Self::Train(Box::new(Job::receive(from)?))),
            [BENCH] => Ok(Self::Bench(serde_json::from_reader(from)?)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command};

    #[test]
    fn a_bench_arrives_as_it_was_sent_or_not_at_all() {
        let words = "oxizero bench gradients --ranks 3 --dtype bf16 --stage 1 --rounds 9 --json";
        let command = Arguments::try_parse_from(words.split_whitespace()).unwrap().command;
        let Command::Bench(arguments) = command else { panic!("{words}") };
        let work = Work::Bench(arguments.jobs().unwrap().remove(0));
        let mut sent = Vec::new();
        work.send(&mut sent).unwrap();
        assert_eq!(Work::receive(&mut sent.as_slice()).unwrap(), work);
        for end in 0..sent.len() {
            Work::receive(&mut &sent[..end]).unwrap_err();
        }
        Work::receive(&mut &b"?"[..]).unwrap_err();
    }
}
