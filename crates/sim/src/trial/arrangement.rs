//! How a trial's ranks are arranged: in the oracle's words, which counts for itself.

use oxizero_core::{Along, Batches};

use super::Trial;
use crate::oracle::{Axis, Holds, Instance, MicroBatch, first_along, instances};

impl Trial {
    /// The axes along which ranks are arranged.
    pub(super) fn axes(&self) -> Vec<Axis> {
        let Some(mesh) = &self.options.mesh else {
            return vec![Axis { ranks: self.ranks, same_batches: false }];
        };
        let axes = mesh.axes().iter();
        axes.map(|axis| Axis {
            ranks: axis.size.get(),
            same_batches: axis.batches == Batches::Same,
        })
        .collect()
    }

    /// What the ranks along each axis hold of a parameter.
    pub(super) fn holds(&self, param: usize) -> Vec<Holds> {
        let along = &self.specs[param].along;
        let held = |(index, axis): (usize, &Axis)| match along.get(index) {
            Some(Along::Reduced) => Holds::Sum,
            Some(Along::Replicated) => Holds::Copy,
            Some(Along::Split { dim }) => Holds::Part(*dim),
            Some(Along::Distinct) => Holds::Own,
            None if axis.same_batches => Holds::Copy,
            None => Holds::Sum,
        };
        self.axes().iter().enumerate().map(held).collect()
    }

    /// The tensors of a parameter that are trained apart.
    pub(super) fn instances(&self, param: usize) -> Vec<Instance> {
        instances(&self.axes(), param, &self.holds(param))
    }

    /// Which of them a rank holds.
    pub(super) fn instance(&self, param: usize, rank: usize) -> usize {
        let found = self.instances(param).iter().position(|one| one.holders.contains(&rank));
        found.expect("every rank holds every parameter")
    }

    /// The initial weights of one of them.
    pub(super) fn initial_of(&self, param: usize, instance: usize) -> Vec<f32> {
        let (all, numel) = (&self.initial[param], self.specs[param].numel().0);
        all.iter().cycle().skip(instance * numel).take(numel).copied().collect()
    }

    /// The first rank of those with the same gradient of a parameter as `rank`.
    pub(super) fn first_alike(&self, param: usize, rank: usize) -> usize {
        let holds = self.holds(param);
        first_along(&self.axes(), rank, |axis| holds[axis] == Holds::Copy)
    }

    /// The micro-batches of a rank's window.
    pub(super) fn micro_batches(&self, step: usize, rank: usize) -> Vec<MicroBatch> {
        let axes = self.axes();
        (self.windows)(self, step, first_along(&axes, rank, |axis| axes[axis].same_batches))
    }
}
