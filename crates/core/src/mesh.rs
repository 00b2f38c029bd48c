//! How the ranks of the world are arranged for several kinds of parallelism, and how they share a
//! parameter.
//!
//! A mesh numbers the ranks by coordinates. A process group is the ranks that differ only along
//! some of its axes, so that every rank is in exactly one group for each set of axes, and all ranks
//! can be told the same.

use crate::{ConfigError, ParamSpec, ProcessGroup, Rank, WorldSize};

/// The ranks of the world by coordinates, row-major: the last axis counts fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<MeshAxis>,
}

/// One axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshAxis {
    /// The name in messages, such as `data`, `expert`, `tensor`.
    pub name: String,
    /// Ranks along it.
    pub size: WorldSize,
    /// What the ranks along it work on.
    pub batches: Batches,
}

impl MeshAxis {
    /// An axis of so many ranks.
    pub fn new(name: impl Into<String>, size: WorldSize, batches: Batches) -> Self {
        Self { name: name.into(), size, batches }
    }
}

/// Whether the ranks along an axis work on the same micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batches {
    /// Each on its own, as in data and expert parallelism: all count in a mean over micro-batches.
    Different,
    /// All on the same, as in tensor parallelism: they count once.
    Same,
}

/// What the ranks along one axis of the mesh hold of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// The same weights, and each its own contribution to the gradient; contributions add up.
    /// Data parallelism; ZeRO shards over these axes.
    Reduced,
    /// The same weights and the same gradient, such as a norm's in tensor parallelism: it counts
    /// once in norms, and ZeRO does not shard it here. Only along axes of [`Batches::Same`].
    Replicated,
    /// Consecutive equal parts of one tensor, cut along dimension `dim` of its shape: tensor
    /// parallelism. The parameter's shape is that of the part.
    Split {
        /// The dimension, counted from 0.
        dim: usize,
    },
    /// Tensors of their own, of one shape and one name, such as experts. Each rank says what its
    /// own got: an expert's gradient is the sum over all tokens that were sent to it, each with the
    /// loss of the rank that it comes from, and is divided by the same number as every other.
    /// Several experts a rank are several parameters, or one whose first dimension is
    /// [`Split`](Self::Split), so that the whole tensor is the experts of all ranks in a row.
    Distinct,
}

/// A set of axes of a mesh, without those of a single rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axes(u32);

/// How the ranks share a parameter: every axis is in one of these sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sharing {
    /// Contributions to the gradient add up over these.
    pub reduced: Axes,
    /// The gradient is the same along these.
    pub replicated: Axes,
    /// Each rank along these holds a part of a tensor.
    pub split: Axes,
    /// Each rank along these holds a tensor of its own.
    pub distinct: Axes,
}

/// More axes than anybody has kinds of parallelism.
const AXES_MAX: usize = 16;

impl Axes {
    /// The axes that are in one of the two sets, or in both.
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether there are none: a group over them is one rank.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn has(self, axis: usize) -> bool {
        self.0 >> axis & 1 == 1
    }

    fn insert(&mut self, axis: usize) {
        self.0 |= 1 << axis;
    }
}

impl Sharing {
    /// The axes along which ranks hold the same weights.
    pub fn copies(self) -> Axes {
        self.reduced.union(self.replicated)
    }

    /// The axes along which ranks hold other elements.
    pub fn parts(self) -> Axes {
        self.split.union(self.distinct)
    }
}

impl Mesh {
    /// Every rank of the world on micro-batches of its own: plain data parallelism.
    pub fn data(world_size: WorldSize) -> Self {
        Self { axes: vec![MeshAxis::new("data", world_size, Batches::Different)] }
    }

    /// A mesh of these axes, the slowest first.
    ///
    /// # Errors
    ///
    /// If there are none or more than 16, if two have one name, or if their sizes multiply to
    /// more than a `usize`.
    pub fn new(axes: Vec<MeshAxis>) -> Result<Self, ConfigError> {
        let refuse = |value: String, allowed: String| {
            Err(ConfigError::Value { field: "mesh".into(), value, allowed })
        };
        if axes.is_empty() || axes.len() > AXES_MAX {
            return refuse(format!("{} axes", axes.len()), format!("1 to {AXES_MAX} axes"));
        }
        let same = |(index, axis): &(usize, &MeshAxis)| {
            axes[..*index].iter().any(|other| other.name == axis.name)
        };
        if let Some((_, axis)) = axes.iter().enumerate().find(same) {
            return refuse(format!("two axes `{}`", axis.name), "names that differ".into());
        }
        let sizes = axes.iter().map(|axis| axis.size.get());
        if sizes.clone().try_fold(1_usize, usize::checked_mul).is_none() {
            let sizes: Vec<_> = sizes.collect();
            return refuse(format!("{sizes:?}"), "as many ranks as the world has".into());
        }
        Ok(Self { axes })
    }

    /// The axes, the slowest first.
    pub fn axes(&self) -> &[MeshAxis] {
        &self.axes
    }

    /// All ranks.
    pub fn world_size(&self) -> WorldSize {
        self.size_over(self.all())
    }

    /// The set of the one axis with this name, if there is one.
    pub fn axis(&self, name: &str) -> Option<Axes> {
        let known = self.axes.iter().any(|axis| axis.name == name);
        known.then(|| self.which(|_, axis| axis.name == name))
    }

    /// The set of all axes.
    pub fn all(&self) -> Axes {
        self.which(|_, _| true)
    }

    /// The axes along which ranks work on the same micro-batches.
    pub fn same_batches(&self) -> Axes {
        self.which(|_, axis| axis.batches == Batches::Same)
    }

    /// The axes that are not in `axes`.
    pub fn without(&self, axes: Axes) -> Axes {
        self.which(|index, _| !axes.has(index))
    }

    fn which(&self, is_in: impl Fn(usize, &MeshAxis) -> bool) -> Axes {
        let mut axes = Axes::default();
        for (index, axis) in self.axes.iter().enumerate() {
            if axis.size != WorldSize::ONE && is_in(index, axis) {
                axes.insert(index);
            }
        }
        axes
    }

    /// How many ranks a group over `axes` has.
    pub fn size_over(&self, axes: Axes) -> WorldSize {
        let sizes = self.axes.iter().enumerate().filter(|(index, _)| axes.has(*index));
        let size = sizes.map(|(_, axis)| axis.size.get()).product();
        WorldSize::new(size).expect("a product of sizes, none of which is 0")
    }

    /// The names of `axes`, such as `data x expert`; `alone` of none.
    pub fn names(&self, axes: Axes) -> String {
        let named = self.axes.iter().enumerate().filter(|(index, _)| axes.has(*index));
        let names: Vec<_> = named.map(|(_, axis)| axis.name.as_str()).collect();
        if names.is_empty() { "alone".into() } else { names.join(" x ") }
    }

    /// The place of `rank` along each axis.
    ///
    /// # Panics
    ///
    /// If the mesh has no such rank.
    pub fn coordinates(&self, rank: Rank) -> Vec<usize> {
        assert!(rank.0 < self.world_size().get(), "rank {rank} of {}", self.world_size());
        let mut rest = rank.0;
        let mut coordinates: Vec<_> = self
            .axes
            .iter()
            .rev()
            .map(|axis| {
                let size = axis.size.get();
                let coordinate = rest % size;
                rest /= size;
                coordinate
            })
            .collect();
        coordinates.reverse();
        coordinates
    }

    /// The ranks that differ from `rank` along `axes` only, itself included.
    pub fn group(&self, axes: Axes, rank: Rank) -> ProcessGroup {
        let other = self.without(axes);
        let ranks = self.world_size().ranks();
        let members = ranks.filter(|member| self.place(other, *member) == self.place(other, rank));
        ProcessGroup::new(members.collect()).expect("ascending, with `rank` in it")
    }

    /// Where `rank` is along `axes`: its number in a group over them.
    pub fn place(&self, axes: Axes, rank: Rank) -> Rank {
        let along = self.coordinates(rank).into_iter().zip(&self.axes).enumerate();
        let along = along.filter(|(index, _)| axes.has(*index));
        Rank(along.fold(0, |place, (_, (at, axis))| place * axis.size.get() + at))
    }

    /// How the ranks share a parameter. One that does not say is reduced over the axes whose ranks
    /// work on different micro-batches, and replicated over the others.
    pub fn sharing(&self, spec: &ParamSpec) -> Sharing {
        let mut sharing = Sharing::default();
        for (index, axis) in self.axes.iter().enumerate() {
            if axis.size != WorldSize::ONE {
                match along(spec, index, axis) {
                    Along::Reduced => sharing.reduced.insert(index),
                    Along::Replicated => sharing.replicated.insert(index),
                    Along::Split { .. } => sharing.split.insert(index),
                    Along::Distinct => sharing.distinct.insert(index),
                }
            }
        }
        sharing
    }

    /// Says what is wrong with a parameter's [`ParamSpec::along`], if something is.
    pub fn problem(&self, spec: &ParamSpec) -> Option<String> {
        let (said, axes, dims) = (spec.along.len(), self.axes.len(), spec.shape.len());
        if said != 0 && said != axes {
            return Some(format!(
                "it says what it does along {said} axes of the mesh, which has {axes}"
            ));
        }
        spec.along.iter().zip(&self.axes).find_map(|(along, axis)| match along {
            Along::Split { dim } if *dim >= dims => {
                let (name, shape) = (&axis.name, &spec.shape);
                Some(format!("it is split over `{name}` along dimension {dim} of {shape:?}"))
            }
            Along::Replicated if axis.batches == Batches::Different && axis.size.get() > 1 => {
                Some(format!(
                    "it is Replicated along `{name}`, whose ranks work on Different batches and so \
                     have different gradients; let it be Reduced there",
                    name = axis.name
                ))
            }
            _ => None,
        })
    }
}

/// What the ranks along axis `index` hold of a parameter.
pub(crate) fn along(spec: &ParamSpec, index: usize, axis: &MeshAxis) -> Along {
    spec.along.get(index).copied().unwrap_or(match axis.batches {
        Batches::Different => Along::Reduced,
        Batches::Same => Along::Replicated,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{DType, UnitId};

    pub(crate) fn mesh(axes: &[(&str, usize, Batches)]) -> Mesh {
        let axis = |(name, size, batches): &(&str, usize, Batches)| {
            MeshAxis::new(*name, WorldSize::new(*size).unwrap(), *batches)
        };
        Mesh::new(axes.iter().map(axis).collect()).unwrap()
    }

    pub(crate) fn data_expert_tensor() -> Mesh {
        use Batches::{Different, Same};
        mesh(&[("data", 2, Different), ("expert", 3, Different), ("tensor", 2, Same)])
    }

    pub(crate) fn spec(shape: &[usize], along: &[Along]) -> ParamSpec {
        let along = along.to_vec();
        ParamSpec { along, ..ParamSpec::new("p", shape, DType::F32, UnitId(0)) }
    }

    #[test]
    fn groups_over_any_axes_tile_the_world() {
        let mesh = data_expert_tensor();
        for bits in 0..8 {
            let axes = Axes(bits);
            let mut seen = [0; 12];
            for rank in mesh.world_size().ranks() {
                let group = mesh.group(axes, rank);
                assert_eq!(group.size(), mesh.size_over(axes));
                assert_eq!(group.rank_of(rank), Some(mesh.place(axes, rank)));
                group.ranks().iter().for_each(|member| seen[member.0] += 1);
            }
            assert!(seen.iter().all(|times| *times == mesh.size_over(axes).get()));
        }
    }

    #[test]
    fn the_last_axis_counts_fastest() {
        let mesh = data_expert_tensor();
        assert_eq!(mesh.coordinates(Rank(7)), [1, 0, 1]);
        let tensor = mesh.axis("tensor").unwrap();
        assert_eq!((tensor, mesh.axis("pipeline")), (mesh.same_batches(), None));
        assert_eq!(mesh.group(tensor, Rank(7)).ranks(), [Rank(6), Rank(7)]);
        assert_eq!(mesh.names(mesh.without(tensor)), "data x expert");
        assert_eq!(mesh.names(Axes::default()), "alone");
    }

    #[test]
    fn a_parameter_that_says_nothing_is_data_parallel() {
        let mesh = data_expert_tensor();
        let sharing = mesh.sharing(&spec(&[2], &[]));
        assert_eq!(sharing.replicated, mesh.same_batches());
        assert_eq!(sharing.copies(), mesh.all());
        assert!(sharing.parts().is_empty());
    }

    #[test]
    fn an_axis_of_one_rank_changes_nothing() {
        let mesh = mesh(&[("data", 2, Batches::Different), ("tensor", 1, Batches::Same)]);
        let split = spec(&[2], &[Along::Reduced, Along::Split { dim: 0 }]);
        assert_eq!(mesh.sharing(&split), mesh.sharing(&spec(&[2], &[])));
        assert_eq!(mesh.whole_shape(&split), [2]);
    }

    #[test]
    fn what_does_not_fit_the_mesh_is_said() {
        let mesh = data_expert_tensor();
        assert!(mesh.problem(&spec(&[2], &[Along::Reduced])).unwrap().contains("which has 3"));
        let split = Along::Split { dim: 1 };
        let problem = mesh.problem(&spec(&[2], &[Along::Reduced, Along::Reduced, split]));
        assert!(problem.unwrap().contains("`tensor` along dimension 1"));
        let twice = MeshAxis { ..data_expert_tensor().axes[0].clone() };
        assert!(Mesh::new(vec![twice.clone(), twice]).is_err());
        assert!(Mesh::new(vec![]).is_err());
        let copies = spec(&[2], &[Along::Reduced, Along::Replicated, Along::Replicated]);
        assert!(mesh.problem(&copies).unwrap().contains("Replicated along `expert`"));
    }
}
