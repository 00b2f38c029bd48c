//! The communicators of the mesh's process groups.

use std::collections::BTreeSet;

use oxizero_comm::{CommError, Communicator, Traffic, issue};
use oxizero_core::{Axes, Mesh, Overlap, ParamSpec, Rank, Sharing};

use crate::observer::{Observed, Span};

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

    /// Every rank's `bytes`, equally many on each, in rank order, for what `label` says.
    pub(crate) fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let (label, bytes) = (label.to_owned(), bytes.to_vec());
        let seen = self.observed.of(Span::Exchange);
        issue(self.world(), move |comm| seen.during(|| comm.exchange(&label, &bytes))).wait()
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
