//! From process groups that parameters are marked with, one parameter at a time, to a mesh.
//!
//! Users of a front-end without axes say over which ranks a parameter is split, or which ranks have
//! experts of their own. Each rank knows the groups that it is in; that these are the groups of one
//! mesh, whose axes are the same on all ranks, is found here, or that they are not.

use crate::mesh::Along;
use crate::{Batches, ConfigError, Mesh, MeshAxis, Rank, WorldSize};

/// A process group that a parameter is marked with, as one of its ranks knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The parameter's name; `None` for what all parameters without a mark do along the group.
    pub param: Option<String>,
    /// The group's ranks, in the order of their parts.
    pub ranks: Vec<Rank>,
    /// What each of them holds.
    pub holds: Holds,
}

/// What each rank of a group holds of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// The same weights and the same gradient: the ranks work on the same micro-batches.
    Same,
    /// Consecutive equal parts along a dimension: tensor parallelism, on the same micro-batches.
    Part {
        /// The dimension, counted from 0.
        dim: usize,
    },
    /// An expert of its own, which is stacked with the others' in the whole tensor; the ranks work
    /// on different micro-batches.
    Expert,
    /// Several experts, which lie in a row with the others' along a dimension.
    Experts {
        /// The dimension, counted from 0.
        dim: usize,
    },
}

/// How the ranks are arranged, and what each parameter does along each axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrangement {
    mesh: Mesh,
    /// By mark of more than one rank: the parameter, the axis, and what it does there.
    along: Vec<(Option<String>, usize, Along)>,
}

/// The marks of one group, as an axis: every `stride`-th rank, so many of them.
struct Span<'a> {
    stride: usize,
    size: usize,
    batches: Batches,
    /// One of the marks, for messages.
    mark: &'a Mark,
}

impl Holds {
    fn batches(self) -> Batches {
        match self {
            Self::Same | Self::Part { .. } => Batches::Same,
            Self::Expert | Self::Experts { .. } => Batches::Different,
        }
    }

    fn along(self) -> Along {
        match self {
            Self::Same => Along::Replicated,
            Self::Part { dim } | Self::Experts { dim } => Along::Split { dim },
            Self::Expert => Along::Distinct,
        }
    }
}

impl Mark {
    /// The mark in messages.
    fn field(&self) -> String {
        let kind = match self.holds {
            Holds::Same => "group",
            Holds::Part { .. } => "split",
            Holds::Expert | Holds::Experts { .. } => "expert",
        };
        match &self.param {
            Some(param) => format!("{kind} of `{param}`"),
            None => kind.into(),
        }
    }

    fn ranks(&self) -> String {
        let ranks: Vec<_> = self.ranks.iter().map(|rank| rank.0).collect();
        format!("ranks {ranks:?}")
    }

    fn refuse<T>(&self, allowed: impl Into<String>) -> Result<T, ConfigError> {
        Err(ConfigError::Value {
            field: self.field(),
            value: self.ranks(),
            allowed: allowed.into(),
        })
    }

    fn conflict<T>(&self, other: &Self, advice: &str) -> Result<T, ConfigError> {
        let text = |mark: &Self| format!("{} = {}", mark.field(), mark.ranks());
        let (first, second) = (text(other), text(self));
        Err(ConfigError::Conflict { first, second, advice: advice.into() })
    }

    /// Refuses ranks that do not exist, and a group that is another rank's.
    fn check(&self, world_size: WorldSize, rank: Rank) -> Result<(), ConfigError> {
        if !self.ranks.contains(&rank) {
            return self.refuse(format!("a group with rank {rank}, which marks it, in it"));
        }
        if let Some(last) = self.ranks.iter().max().filter(|last| last.0 >= world_size.get()) {
            return self.refuse(format!("ranks below {world_size}; there is no rank {last}"));
        }
        Ok(())
    }

    /// The group as an axis.
    fn span(&self) -> Result<Span<'_>, ConfigError> {
        let strides = self.ranks.windows(2).map(|pair| pair[1].0.checked_sub(pair[0].0));
        let strides: Vec<_> = strides.collect();
        let stride = match strides.first() {
            None => 1,
            Some(Some(stride)) if *stride > 0 && strides.iter().all(|s| *s == Some(*stride)) => {
                *stride
            }
            _ => return self.refuse("ascending ranks of equal distance, such as [1, 3, 5]"),
        };
        let (size, batches) = (self.ranks.len(), self.holds.batches());
        Ok(Span { stride, size, batches, mark: self })
    }
}

impl Arrangement {
    /// The mesh of which every mark's group is one along one axis. Ranks that no mark tells apart
    /// are data-parallel.
    ///
    /// # Errors
    ///
    /// Where there is no such mesh: an error that names a parameter and its group, or two of them.
    pub fn new(world_size: WorldSize, rank: Rank, marks: &[Mark]) -> Result<Self, ConfigError> {
        marks.iter().try_for_each(|mark| mark.check(world_size, rank))?;
        let mut spans: Vec<Span<'_>> = Vec::new();
        for mark in marks.iter().filter(|mark| mark.ranks.len() > 1) {
            let span = mark.span()?;
            let known = spans.iter().find(|known| known.is_like(&span));
            match known {
                None => spans.push(span),
                Some(known) if known.batches != span.batches => {
                    return mark.conflict(
                        known.mark,
                        "ranks of a split work on the same batches, those of experts on different \
                         ones; mark experts that lie in a row in one tensor as experts too",
                    );
                }
                Some(_) => {}
            }
        }
        spans.sort_by_key(|span| span.stride);
        let mesh = Mesh::new(axes(world_size, &spans)?)?;
        let mut along: Vec<(Option<String>, usize, Along)> = Vec::new();
        for mark in marks.iter().filter(|mark| mark.ranks.len() > 1) {
            let axis = axis_of(&mesh, mark, rank)?;
            let what = mark.holds.along();
            let mut known =
                along.iter().filter(|(param, at, _)| (param, *at) == (&mark.param, axis));
            match known.next() {
                None => along.push((mark.param.clone(), axis, what)),
                // The same, said again.
                Some((.., known)) if *known == what => {}
                Some(_) => return mark.refuse("one mark of a parameter for each group"),
            }
        }
        Ok(Self { mesh, along })
    }

    /// How the ranks are arranged.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// What a parameter's [`ParamSpec::along`](crate::ParamSpec::along) is; empty for one without a
    /// mark.
    pub fn along(&self, param: &str) -> Vec<Along> {
        let of = self.along.iter().filter(|(name, ..)| name.as_deref() == Some(param));
        let mut of = of.peekable();
        if of.peek().is_none() {
            return Vec::new();
        }
        let unmarked = |axis: &MeshAxis| match axis.batches {
            Batches::Different => Along::Reduced,
            Batches::Same => Along::Replicated,
        };
        let mut along: Vec<_> = self.mesh.axes().iter().map(unmarked).collect();
        of.for_each(|(_, axis, what)| along[*axis] = *what);
        along
    }
}

impl Span<'_> {
    fn is_like(&self, other: &Self) -> bool {
        (self.stride, self.size) == (other.stride, other.size)
    }
}

/// The axes, the slowest first: the spans', which come in ascending strides, and data-parallel ones
/// between and around them.
fn axes(world_size: WorldSize, spans: &[Span<'_>]) -> Result<Vec<MeshAxis>, ConfigError> {
    let mut axes: Vec<MeshAxis> = Vec::new();
    let mut push = |kind: &str, size: usize, batches| {
        let same = axes.iter().filter(|axis| axis.name.starts_with(kind)).count();
        let name = if same == 0 { kind.into() } else { format!("{kind}{}", same + 1) };
        let size = WorldSize::new(size).expect("a quotient of a number by one of its divisors");
        axes.push(MeshAxis::new(name, size, batches));
    };
    // How many ranks the axes so far tell apart.
    let mut ranks = 1;
    let mut before: Option<&Mark> = None;
    for Span { stride, size, batches, mark } in spans {
        if let (Some(before), false) = (before, stride.is_multiple_of(ranks)) {
            return mark.conflict(
                before,
                "the groups overlap as those of no mesh do; two groups share one rank, or are one",
            );
        }
        if *stride > ranks {
            push("data", stride / ranks, Batches::Different);
        }
        let kind = if *batches == Batches::Same { "tensor" } else { "expert" };
        push(kind, *size, *batches);
        ranks = stride * size;
        if !world_size.get().is_multiple_of(ranks) {
            let world = world_size.get();
            return mark.refuse(format!("groups of so many ranks so far apart tile the {world}"));
        }
        before = Some(mark);
    }
    if ranks < world_size.get() || spans.is_empty() {
        push("data", world_size.get() / ranks, Batches::Different);
    }
    axes.reverse();
    Ok(axes)
}

/// The axis along which a mark's group lies.
fn axis_of(mesh: &Mesh, mark: &Mark, rank: Rank) -> Result<usize, ConfigError> {
    let groups: Vec<_> = mesh
        .axes()
        .iter()
        .map(|axis| mesh.axis(&axis.name).map(|along| mesh.group(along, rank)))
        .collect();
    let is_it = |group: &Option<crate::ProcessGroup>| {
        group.as_ref().is_some_and(|group| group.ranks() == mark.ranks)
    };
    match groups.iter().position(is_it) {
        Some(axis) => Ok(axis),
        None => mark.refuse("a group that starts at a multiple of its length, as all others do"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(param: &str, ranks: &[usize], holds: Holds) -> Mark {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Mark { param: Some(param.into()), ranks, holds }
    }

    fn arranged(world: usize, rank: usize, marks: &[Mark]) -> Result<Arrangement, ConfigError> {
        Arrangement::new(WorldSize::new(world).unwrap(), Rank(rank), marks)
    }

    fn axes(arrangement: &Arrangement) -> Vec<(String, usize)> {
        let axes = arrangement.mesh().axes().iter();
        axes.map(|axis| (axis.name.clone(), axis.size.get())).collect()
    }

    fn named(expected: &[(&str, usize)]) -> Vec<(String, usize)> {
        expected.iter().map(|(name, size)| ((*name).into(), *size)).collect()
    }

    const SPLIT: Holds = Holds::Part { dim: 1 };

    #[test]
    fn without_marks_all_ranks_are_data_parallel() {
        let alone = arranged(3, 1, &[]).unwrap();
        assert_eq!(
            (alone.mesh(), alone.along("p")),
            (&Mesh::data(alone.mesh().world_size()), vec![])
        );
        // A group of one rank says nothing.
        assert_eq!(arranged(3, 1, &[mark("p", &[1], SPLIT)]).unwrap(), alone);
        for ranks in [[1].as_slice(), &[7]] {
            let told = arranged(3, 0, &[mark("p", ranks, SPLIT)]).unwrap_err().to_string();
            assert!(told.contains("a group with rank 0, which marks it, in it"), "{told}");
        }
        assert_eq!(axes(&arranged(1, 0, &[]).unwrap()), named(&[("data", 1)]));
    }

    #[test]
    fn every_rank_finds_the_same_mesh() {
        for rank in 0..24 {
            let tensor = [rank / 2 * 2, rank / 2 * 2 + 1];
            let expert: Vec<_> = (0..3).map(|at| rank / 12 * 12 + rank % 4 + 4 * at).collect();
            let marks = [mark("e", &expert, Holds::Expert), mark("t", &tensor, SPLIT)];
            let found = arranged(24, rank, &marks).unwrap();
            let expected = [("data2", 2), ("expert", 3), ("data", 2), ("tensor", 2)];
            assert_eq!(axes(&found), named(&expected));
            use Along::{Distinct, Reduced, Replicated, Split};
            assert_eq!(found.along("e"), [Reduced, Distinct, Reduced, Replicated]);
            assert_eq!(found.along("t"), [Reduced, Reduced, Reduced, Split { dim: 1 }]);
            assert_eq!(found.along("other"), []);
        }
    }

    #[test]
    fn a_parameter_is_split_over_two_groups() {
        let marks = [
            mark("p", &[0, 1], Holds::Part { dim: 0 }),
            mark("p", &[0, 2], Holds::Part { dim: 1 }),
        ];
        let along = arranged(4, 0, &marks).unwrap().along("p");
        assert_eq!(along, [Along::Split { dim: 1 }, Along::Split { dim: 0 }]);
    }

    #[test]
    fn a_mark_that_is_repeated_says_nothing_new() {
        for holds in [SPLIT, Holds::Expert] {
            let once = mark("p", &[2, 3], holds);
            let expected = arranged(4, 2, std::slice::from_ref(&once)).unwrap();
            assert_eq!(arranged(4, 2, &[once.clone(), once]).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_mesh_is_refused_by_name() {
        let refused = |world, rank, marks: &[Mark]| arranged(world, rank, marks).unwrap_err();
        let one = |world, rank, ranks: &[usize]| {
            refused(world, rank, &[mark("p", ranks, SPLIT)]).to_string()
        };
        for (told, why) in [
            (one(8, 0, &[0, 1, 3]), "equal distance"),
            (one(4, 0, &[1, 0]), "ascending"),
            (one(4, 0, &[0, 0]), "ascending"),
            (one(4, 2, &[0, 1]), "rank 2"),
            (one(4, 0, &[]), "rank 0"),
            (one(4, 3, &[3, 4]), "no rank 4"),
            (one(6, 0, &[0, 1, 2, 3]), "tile the 6"),
            (one(4, 1, &[1, 2]), "multiple of its length"),
        ] {
            assert!(told.contains(why) && told.contains("split of `p` = ranks ["), "{told}");
        }
        for other in [[0, 1].as_slice(), &[0, 3], &[0, 1, 2, 3]] {
            let marks = [mark("p", &[0, 1], SPLIT), mark("q", other, Holds::Expert)];
            let told = refused(4, 0, &marks).to_string();
            assert!(told.contains("split of `p`") && told.contains("expert of `q`"), "{told}");
        }
        let marks = [mark("p", &[0, 1], SPLIT), mark("p", &[0, 1], Holds::Part { dim: 0 })];
        assert!(refused(2, 0, &marks).to_string().contains("one mark"));
    }
}
