//! The communicators of the mesh's process groups.

use std::collections::BTreeSet;

use oxizero_comm::{CommError, Communicator, Traffic};
use oxizero_core::{Axes, Mesh, Rank, Sharing};

/// This rank's communicators, one for each set of axes that parameters need.
pub(crate) struct Groups {
    mesh: Mesh,
    world: Box<dyn Communicator>,
    /// Those of some of the ranks.
    others: Vec<(Axes, Box<dyn Communicator>)>,
    /// By axes: the ranks that are where this one is along them.
    beside: Vec<(Axes, Vec<Rank>)>,
}

impl Groups {
    /// Splits the world as parameters that are shared so ask for; a collective call.
    pub(crate) fn new(
        world: Box<dyn Communicator>,
        mesh: Mesh,
        sharings: impl Iterator<Item = Sharing> + Clone,
    ) -> Result<Self, CommError> {
        let asked = |sharing: Sharing| [sharing.reduced, sharing.copies(), sharing.parts()];
        let axes: BTreeSet<Axes> = sharings.clone().flat_map(asked).collect();
        let rank = world.rank();
        let some = axes.into_iter().filter(|axes| *axes != mesh.all());
        let split = |axes| Ok((axes, world.split(&mesh.group(axes, rank))?));
        let others = some.map(split).collect::<Result<_, CommError>>()?;
        let distinct: BTreeSet<Axes> = sharings.map(|sharing| sharing.distinct).collect();
        let beside = |axes| (axes, mesh.group(mesh.without(axes), rank).ranks().to_vec());
        let beside = distinct.into_iter().map(beside).collect();
        Ok(Self { mesh, world, others, beside })
    }

    /// How the ranks are arranged.
    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// The ranks that differ from this one only along `axes`, which parameters asked for.
    pub(crate) fn over(&self, axes: Axes) -> &dyn Communicator {
        let found = self.others.iter().find(|(others, _)| *others == axes);
        found.map_or(&*self.world, |(_, comm)| &**comm)
    }

    /// The ranks that hold elements of the same tensor as this one.
    pub(crate) fn holders(&self, sharing: Sharing) -> &[Rank] {
        let found = self.beside.iter().find(|(axes, _)| *axes == sharing.distinct);
        &found.expect("new() was given every parameter's sharing").1
    }

    /// Whether this rank counts what all ranks hold that are replicas of each other: one does.
    pub(crate) fn counts(&self, sharing: Sharing) -> bool {
        self.mesh.place(sharing.replicated, self.world.rank()) == Rank(0)
    }

    /// What this rank asked all groups for.
    pub(crate) fn traffic(&self) -> Traffic {
        let others = self.others.iter().map(|(_, comm)| comm.traffic());
        others.fold(self.world.traffic(), std::ops::Add::add)
    }
}
