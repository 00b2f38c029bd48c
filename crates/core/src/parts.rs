//! The whole of a tensor that the ranks of a mesh hold in parts.

use std::ops::Range;

use crate::mesh::along;
use crate::{Along, Mesh, Numel, ParamSpec, Rank};

/// A box of a tensor, such as what one rank of a mesh holds of it. Its elements count from 0,
/// row-major in the box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The shape of the whole tensor.
    pub whole: Vec<usize>,
    /// By dimension: where the part starts in the whole.
    pub start: Vec<usize>,
    /// The part's own shape, in as many dimensions.
    pub shape: Vec<usize>,
}

/// Elements that lie in two parts of a tensor, one after the other in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them, as the first part counts.
    pub in_first: usize,
    /// The first of them, as the second part counts.
    pub in_second: usize,
    /// How many they are; at least one.
    pub numel: usize,
}

impl Part {
    /// All of a tensor.
    pub fn all(shape: &[usize]) -> Self {
        Self { whole: shape.to_vec(), start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// The part with this number where a tensor is cut into equal parts of shape `shape`, which are
    /// numbered row-major. `None` if it cannot be cut so, or has fewer.
    pub fn of_equal(whole: &[usize], shape: &[usize], number: usize) -> Option<Self> {
        let counts = part_counts(whole, shape)?;
        let (mut rest, mut start) = (number, vec![0; whole.len()]);
        for (dim, count) in counts.iter().enumerate().rev() {
            start[dim] = rest % count * shape[dim];
            rest /= count;
        }
        (rest == 0).then(|| Self { whole: whole.to_vec(), start, shape: shape.to_vec() })
    }

    /// The number of this part where the tensor is cut into equal ones, as
    /// [`of_equal`](Self::of_equal) counts. `None` if it is none of those.
    pub fn number(&self) -> Option<usize> {
        let counts = part_counts(&self.whole, &self.shape)?;
        let places = self.start.iter().zip(&self.shape).map(|(start, size)| start / size.max(&1));
        Some(places.zip(counts).fold(0, |number, (place, count)| number * count + place))
    }

    /// How many equal parts of this shape the tensor has. `None` if it has none.
    pub fn count(&self) -> Option<usize> {
        part_counts(&self.whole, &self.shape)?.into_iter().try_fold(1, usize::checked_mul)
    }

    /// The elements of the part.
    pub fn numel(&self) -> Numel {
        Numel::of_shape(&self.shape)
    }

    /// What lies in this part and in another one of the same tensor; in ascending order of both.
    pub fn common(&self, other: &Self) -> impl Iterator<Item = Run> {
        let dims = self.whole.len();
        let from: Vec<_> = self.start.iter().zip(&other.start).map(|(a, b)| *a.max(b)).collect();
        let end = |part: &Self, dim: usize| part.start[dim] + part.shape[dim];
        let both = |dim: usize| end(self, dim).min(end(other, dim)).saturating_sub(from[dim]);
        let sizes: Vec<_> = (0..dims).map(both).collect();
        // Dimensions after the last one that is cut are contiguous in both.
        let is_cut =
            |dim: &usize| sizes[*dim] != self.shape[*dim] || sizes[*dim] != other.shape[*dim];
        let outer = (0..dims).rev().find(is_cut).unwrap_or(0);
        let numel: usize = sizes[outer..].iter().product();
        let count = if numel == 0 { 0 } else { sizes[..outer].iter().product() };
        let strides = [strides(&self.shape), strides(&other.shape)];
        let base = |start: &[usize], strides: &[usize]| -> usize {
            from.iter().zip(start).zip(strides).map(|((at, start), by)| (at - start) * by).sum()
        };
        let bases = [base(&self.start, &strides[0]), base(&other.start, &strides[1])];
        (0..count).map(move |index| {
            let (mut rest, mut at) = (index, bases);
            for dim in (0..outer).rev() {
                let place = rest % sizes[dim];
                rest /= sizes[dim];
                at[0] += place * strides[0][dim];
                at[1] += place * strides[1][dim];
            }
            Run { in_first: at[0], in_second: at[1], numel }
        })
    }
}

/// By dimension: how many parts of shape `shape` the whole is cut into.
fn part_counts(whole: &[usize], shape: &[usize]) -> Option<Vec<usize>> {
    let count = |(whole, size): (&usize, &usize)| match (*whole, *size) {
        (0, 0) => Some(1),
        (_, 0) | (0, _) => None,
        (whole, size) => whole.is_multiple_of(size).then_some(whole / size),
    };
    if whole.len() != shape.len() {
        return None;
    }
    whole.iter().zip(shape).map(count).collect()
}

/// By dimension: how many elements lie between neighbours.
fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect()
}

impl Mesh {
    /// The shape of the tensor whose part a rank holds: first the tensors of their own along each
    /// axis, then the parameter's own dimensions, as long as all parts together.
    pub fn whole_shape(&self, spec: &ParamSpec) -> Vec<usize> {
        let mut shape = spec.shape.clone();
        let mut stacked = Vec::new();
        for (index, axis) in self.axes().iter().enumerate().filter(|(_, axis)| axis.size.get() > 1)
        {
            match along(spec, index, axis) {
                Along::Split { dim } => shape[dim] *= axis.size.get(),
                Along::Distinct => stacked.push(axis.size.get()),
                Along::Reduced | Along::Replicated => {}
            }
        }
        stacked.extend(shape);
        stacked
    }

    /// The part of the tensor with place `part` in a group over
    /// [`Sharing::parts`](crate::Sharing::parts).
    pub fn part(&self, spec: &ParamSpec, part: Rank) -> Part {
        let whole = self.whole_shape(spec);
        let mut shape = vec![1; whole.len() - spec.shape.len()];
        shape.extend(&spec.shape);
        Part { start: self.start(spec, part), whole, shape }
    }

    /// Where the elements of that part lie in the whole tensor: runs of the part's elements, in
    /// order, and the element of the whole that each starts at.
    pub fn runs(&self, spec: &ParamSpec, part: Rank) -> Vec<(Range<usize>, usize)> {
        let part = self.part(spec, part);
        let whole = Part::all(&part.whole);
        let run = |run: Run| (run.in_first..run.in_first + run.numel, run.in_second);
        part.common(&whole).map(run).collect()
    }

    /// By dimension of the whole: the first element of the part with place `part`.
    fn start(&self, spec: &ParamSpec, part: Rank) -> Vec<usize> {
        let sharing = self.sharing(spec);
        let mut rest = part.0;
        let (mut stacked, mut places) = (Vec::new(), vec![0; spec.shape.len()]);
        let mut factors = vec![1; spec.shape.len()];
        for (index, axis) in self.axes().iter().enumerate().rev() {
            if !sharing.parts().has(index) {
                continue;
            }
            let (size, at) = (axis.size.get(), rest % axis.size.get());
            rest /= size;
            match along(spec, index, axis) {
                Along::Split { dim } => {
                    places[dim] += at * factors[dim];
                    factors[dim] *= size;
                }
                _ => stacked.push(at),
            }
        }
        stacked.reverse();
        stacked.extend(places.iter().zip(&spec.shape).map(|(place, size)| place * size));
        stacked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Batches;
    use crate::mesh::tests::{data_expert_tensor, mesh, spec};

    /// Where an element lies in the whole, from the coordinates of its rank and its own.
    type At = fn([usize; 3], [usize; 3]) -> Vec<usize>;

    #[test]
    fn every_element_lies_where_its_coordinates_say() {
        use Along::{Distinct, Reduced, Split};
        let cases: [([Along; 3], &[usize], At); 5] = [
            ([Reduced, Split { dim: 1 }, Split { dim: 0 }], &[6, 9, 2], |rank, at| {
                vec![rank[2] * 3 + at[0], rank[1] * 3 + at[1], at[2]]
            }),
            ([Reduced, Split { dim: 1 }, Split { dim: 1 }], &[3, 18, 2], |rank, at| {
                vec![at[0], (rank[1] * 2 + rank[2]) * 3 + at[1], at[2]]
            }),
            ([Reduced, Distinct, Split { dim: 2 }], &[3, 3, 3, 4], |rank, at| {
                vec![rank[1], at[0], at[1], rank[2] * 2 + at[2]]
            }),
            ([Distinct, Distinct, Distinct], &[2, 3, 2, 3, 3, 2], |rank, at| [rank, at].concat()),
            ([Reduced, Reduced, Split { dim: 1 }], &[3, 6, 2], |rank, at| {
                vec![at[0], rank[2] * 3 + at[1], at[2]]
            }),
        ];
        let mesh = data_expert_tensor();
        for (along, shape, at) in cases {
            let spec = spec(&[3, 3, 2], &along);
            assert_eq!(mesh.whole_shape(&spec), shape);
            for rank in mesh.world_size().ranks() {
                let part = mesh.place(mesh.sharing(&spec).parts(), rank);
                let runs = mesh.runs(&spec, part).into_iter();
                let found: Vec<_> = runs.flat_map(|(run, at)| at..at + run.len()).collect();
                let rank: [usize; 3] = mesh.coordinates(rank).try_into().unwrap();
                let expected = (0..18).map(|element| {
                    let at = at(rank, [element / 6, element / 2 % 3, element % 2]);
                    at.iter().zip(shape).fold(0, |index, (at, size)| index * size + at)
                });
                assert_eq!(found, expected.collect::<Vec<_>>(), "{along:?}");
            }
        }
    }

    #[test]
    fn what_two_parts_have_in_common_is_what_their_coordinates_say() {
        let whole = [4, 6, 2];
        let shapes = [[4, 6, 2], [2, 6, 2], [4, 3, 2], [1, 2, 2], [2, 3, 1], [4, 6, 1]];
        let coordinates = |part: &Part, index: usize| -> Vec<usize> {
            let at = |dim: usize| index / strides(&part.shape)[dim] % part.shape[dim];
            (0..3).map(|dim| part.start[dim] + at(dim)).collect()
        };
        let parts = |shape: &[usize; 3]| {
            let number = |number| Part::of_equal(&whole, shape, number);
            let parts: Vec<_> = (0..).map_while(number).collect();
            assert_eq!(parts[0].count(), Some(parts.len()));
            parts
        };
        for first in shapes.iter().flat_map(parts) {
            assert_eq!(
                Part::of_equal(&whole, &first.shape, first.number().unwrap()).unwrap(),
                first
            );
            for second in shapes.iter().flat_map(parts) {
                let runs: Vec<_> = first.common(&second).collect();
                let pairs = runs.iter().flat_map(|run| {
                    (0..run.numel).map(|at| (run.in_first + at, run.in_second + at))
                });
                let found: Vec<_> = pairs.collect();
                let in_first = |index| coordinates(&first, index);
                let all = (0..first.numel().0).flat_map(|a| {
                    let same =
                        (0..second.numel().0).find(|b| coordinates(&second, *b) == in_first(a));
                    same.map(|b| (a, b))
                });
                assert_eq!(found, all.collect::<Vec<_>>(), "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn parts_that_do_not_fill_the_whole_are_none() {
        assert_eq!(Part::of_equal(&[4], &[3], 0), None);
        assert_eq!(Part::of_equal(&[4], &[2, 2], 0), None);
        assert_eq!(Part::of_equal(&[4], &[2], 2), None);
        assert_eq!(Part::of_equal(&[4], &[0], 0), None);
        assert_eq!(Part::of_equal(&[0, 4], &[0, 2], 1).unwrap().start, [0, 2]);
        assert_eq!(Part::of_equal(&[], &[], 0).unwrap().common(&Part::all(&[])).count(), 1);
    }

    #[test]
    fn columns_of_two_ranks_alternate_in_each_row() {
        let mesh = mesh(&[("tensor", 2, Batches::Same)]);
        let runs = |spec: &ParamSpec, part| mesh.runs(spec, Rank(part));
        let columns = spec(&[2, 3], &[Along::Split { dim: 1 }]);
        assert_eq!(runs(&columns, 1), [(0..3, 3), (3..6, 9)]);
        let rows = spec(&[2, 3], &[Along::Split { dim: 0 }]);
        assert_eq!(runs(&rows, 1), [(0..6, 6)]);
        let experts = spec(&[], &[Along::Distinct]);
        assert_eq!(runs(&experts, 1), [(0..1, 1)]);
        assert_eq!(mesh.whole_shape(&experts), [2]);
        let empty = spec(&[0, 3], &[Along::Split { dim: 1 }]);
        assert_eq!((runs(&empty, 1), mesh.whole_shape(&empty)), (vec![], vec![0, 6]));
    }
}
