//! The communicators of the mesh's process groups.

use std::collections::BTreeSet;

use oxizero_comm::{CommError, Communicator, Traffic, issue};
use oxizero_core::{Axes, Mesh, Overlap, ParamSpec, Rank, Sharing};

use crate::observer::{Observed, Span};

/// What ranks tell each other in an exchange. It travels with the bytes, so that ranks which are
/// about to tell different things learn of it before one reads the other's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Message {
    /// Which call this is.
    Call,
    /// What this rank collected in a window.
    Window,
    /// In which order gradients came.
    Turns,
    /// What this rank says about its reduced gradients.
    Report,
    /// Its part of norms.
    NormParts,
    /// Which gradients it sets.
    Given,
    /// Its counts of updates.
    Updates,
    /// A name, or a number that serves as one.
    Name,
    /// Whether its part of a save has ended.
    SaveEnded,
    /// What tells the weights that were written from others.
    Written,
    /// Checksums of all weights.
    Weights,
}

/// What the messages are, in their order.
const MESSAGES: [&str; 11] = [
    "a call",
    "what a window holds",
    "the order of gradients",
    "what reduced gradients are",
    "parts of norms",
    "which gradients are set",
    "counts of updates",
    "a checkpoint's name",
    "whether a save has ended",
    "what was written",
    "checksums of weights",
];

/// This rank's communicators, one for each set of axes that parameters need.
pub(crate) struct Groups {
    mesh: Mesh,
    observed: Observed,
    world: Box<dyn Communicator>,
    /// Those of some of the ranks.
    others: Vec<(Axes, Box<dyn Communicator>)>,
    /// The axes along which ranks hold the same of every parameter.
    alike: Axes,
    /// By axes: the ranks that are where this one is along them.
    beside: Vec<(Axes, Vec<Rank>)>,
    /// The sets of axes along which ranks compare weights.
    compared: Vec<Axes>,
    /// By axes: for every rank of the world, the first of its group over them.
    firsts: Vec<(Axes, Vec<Rank>)>,
}

impl Groups {
    /// Splits the world as parameters that are shared so ask for; a collective call.
    pub(crate) fn new(
        world: Box<dyn Communicator>,
        observed: Observed,
        mesh: Mesh,
        specs: &[ParamSpec],
    ) -> Result<Self, CommError> {
        let sharings = || specs.iter().map(|spec| mesh.sharing(spec));
        let held = sharings().flat_map(|sharing| [sharing.reduced, sharing.copies()]);
        // Frozen parameters have no gradient to put together.
        let trained = specs.iter().filter(|spec| spec.trainable);
        let parts = trained.map(|spec| mesh.sharing(spec).parts());
        let alike = alike(&mesh, specs);
        let axes: BTreeSet<Axes> = held.chain(parts).chain([alike]).collect();
        let rank = world.rank();
        let some = axes.into_iter().filter(|axes| *axes != mesh.all());
        let split = |axes| Ok((axes, world.split(&mesh.group(axes, rank))?));
        let others = some.map(split).collect::<Result<_, CommError>>()?;
        let distinct: BTreeSet<Axes> = sharings().map(|sharing| sharing.distinct).collect();
        let beside = |axes| (axes, mesh.group(mesh.without(axes), rank).ranks().to_vec());
        let beside = distinct.into_iter().map(beside).collect();
        let same = [mesh.same_batches()].into_iter();
        let replicated = sharings().map(|sharing| sharing.replicated);
        let common = sharings().map(|sharing| mesh.without(sharing.distinct));
        let compared: BTreeSet<Axes> =
            sharings().flat_map(|sharing| [sharing.reduced, sharing.copies()]).collect();
        let compared: Vec<Axes> = compared.into_iter().collect();
        let same = same.chain(replicated).chain(common).chain(compared.iter().copied());
        let same: BTreeSet<Axes> = same.collect();
        let first = |axes, rank| mesh.group(axes, rank).ranks()[0];
        let ranks = || mesh.world_size().ranks();
        let firsts = |axes| (axes, ranks().map(|rank| first(axes, rank)).collect());
        let firsts = same.into_iter().map(firsts).collect();
        Ok(Self { mesh, observed, world, others, alike, beside, compared, firsts })
    }

    /// How the ranks are arranged.
    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// Who is told what is done, if anybody is.
    pub(crate) fn observed(&self) -> &Observed {
        &self.observed
    }

    /// Where operations of all groups run.
    pub(crate) fn overlap(&self) -> Overlap {
        if self.world.queue().is_some() { Overlap::On } else { Overlap::Off }
    }

    /// Every rank's `bytes`, equally many on each, in rank order, for the call that `label` says.
    pub(crate) fn exchange(
        &self,
        message: Message,
        label: &str,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let own_label = label.to_owned();
        let mut bytes = bytes.to_vec();
        bytes.push(message as u8);
        let seen = self.observed.of(Span::Exchange);
        let exchanged = move |comm: &dyn Communicator| comm.exchange(&own_label, &bytes);
        let told = issue(self.world(), move |comm| seen.during(|| exchanged(comm))).wait()?;
        let untagged = |(mut bytes, other): (Vec<u8>, Rank)| match bytes.pop() {
            Some(tag) if tag == message as u8 => Ok(bytes),
            tag => Err(self.mismatch((message, label), other, tag)),
        };
        told.into_iter().zip((0..).map(Rank)).map(untagged).collect()
    }

    /// The error of ranks that are about to tell different things.
    fn mismatch(&self, own: (Message, &str), other: Rank, tag: Option<u8>) -> CommError {
        let (message, label) = own;
        let got = tag.and_then(|tag| MESSAGES.get(usize::from(tag)));
        CommError::Mismatch {
            sequence: self.world.traffic().exchanges as u64,
            rank: self.world.rank(),
            expected: format!("agreement on {} for {label}", MESSAGES[message as usize]),
            other,
            got: format!("agreement on {}", got.unwrap_or(&"something else")),
        }
    }

    /// The ranks that differ from this one only along `axes`, which parameters asked for.
    pub(crate) fn over(&self, axes: Axes) -> &dyn Communicator {
        if axes == self.mesh.all() {
            return &*self.world;
        }
        &**find(&self.others, axes)
    }

    /// The axes along which ranks hold the same of every parameter.
    pub(crate) fn alike(&self) -> Axes {
        self.alike
    }

    /// The ranks that hold elements of the same tensor as this one.
    pub(crate) fn holders(&self, sharing: Sharing) -> &[Rank] {
        find(&self.beside, sharing.distinct).as_slice()
    }

    /// By rank: the first of those that work on the same micro-batches.
    pub(crate) fn same_batches(&self) -> &[Rank] {
        find(&self.firsts, self.mesh.same_batches()).as_slice()
    }

    /// The sets of axes along which ranks compare weights, the same on every rank.
    pub(crate) fn compared(&self) -> &[Axes] {
        &self.compared
    }

    /// By rank: the first of those that differ from it only along `axes`, which are
    /// [compared](Self::compared).
    pub(crate) fn firsts(&self, axes: Axes) -> &[Rank] {
        find(&self.firsts, axes).as_slice()
    }

    /// By rank: the first of those that have the same gradient.
    pub(crate) fn same_gradient(&self, sharing: Sharing) -> &[Rank] {
        find(&self.firsts, sharing.replicated).as_slice()
    }

    /// By rank: the first of those that hold elements of the same tensor.
    pub(crate) fn same_tensor(&self, sharing: Sharing) -> &[Rank] {
        find(&self.firsts, self.mesh.without(sharing.distinct)).as_slice()
    }

    /// Whether this rank counts what all ranks hold that are replicas of each other: one does.
    pub(crate) fn counts(&self, sharing: Sharing) -> bool {
        let rank = self.world.rank();
        self.same_gradient(sharing)[rank.0] == rank
    }

    /// What this rank asked all groups for.
    pub(crate) fn traffic(&self) -> Traffic {
        let others = self.others.iter().map(|(_, comm)| comm.traffic());
        others.fold(self.world.traffic(), std::ops::Add::add)
    }
}

/// A rank that has something and one that has not, of those whose first is the same.
pub(crate) fn differing(firsts: &[Rank], has: impl Fn(Rank) -> bool) -> Option<(Rank, Rank)> {
    let mut pairs = firsts.iter().copied().zip((0..).map(Rank));
    let (one, other) = pairs.find(|(first, rank)| has(*first) != has(*rank))?;
    Some(if has(one) { (one, other) } else { (other, one) })
}

fn alike(mesh: &Mesh, specs: &[ParamSpec]) -> Axes {
    let parts = specs.iter().map(|spec| mesh.sharing(spec).parts());
    mesh.without(parts.fold(Axes::default(), Axes::union))
}

fn find<T>(all: &[(Axes, T)], axes: Axes) -> &T {
    let found = all.iter().find(|(others, _)| *others == axes);
    &found.expect("new() was given every parameter's axes").1
}

#[cfg(test)]
mod tests {
    use oxizero_comm::threads;
    use oxizero_core::WorldSize;

    use super::*;

    #[test]
    fn messages_of_one_length_are_told_apart_before_they_are_read() {
        let told = |comm: Box<dyn Communicator>| {
            let (rank, mesh) = (comm.rank(), Mesh::data(comm.world_size()));
            let groups = Groups::new(comm, Observed::by(None), mesh, &[]).unwrap();
            let alike = groups.exchange(Message::Report, "step", &[rank.0 as u8]).unwrap();
            assert_eq!(alike, [[0], [1]]);
            let (message, label) = match rank {
                Rank(0) => (Message::Report, "step"),
                _ => (Message::Call, "full_param"),
            };
            groups.exchange(message, label, &[7]).unwrap_err().to_string()
        };
        let comms = threads::group(WorldSize::new(2).unwrap());
        let ranks: Vec<_> =
            comms.into_iter().map(|comm| std::thread::spawn(move || told(comm))).collect();
        let told: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(
            told[0].contains("rank 0 asks for agreement on what reduced gradients are for step")
        );
        assert!(
            told[0].ends_with("same order") && told[0].contains("rank 1 for agreement on a call")
        );
        assert!(told[1].contains("agreement on a call for full_param"), "{}", told[1]);
    }
}
