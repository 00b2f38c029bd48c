//! The whole of a tensor that the ranks of a mesh hold in parts.

use std::ops::Range;

use crate::mesh::along;
use crate::{Along, Mesh, ParamSpec, Rank};

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

    /// Where the elements of the part with place `part`, in a group over
    /// [`Sharing::parts`](crate::Sharing::parts), lie in the whole tensor: runs of the part's
    /// elements, in order, and the element of the whole that each starts at.
    pub fn runs(&self, spec: &ParamSpec, part: Rank) -> Vec<(Range<usize>, usize)> {
        let whole = self.whole_shape(spec);
        let stacked = whole.len() - spec.shape.len();
        let start = self.start(spec, part);
        // Dimensions after the last one that is split are contiguous in both.
        let cut = (0..spec.shape.len()).rev().find(|dim| whole[stacked + dim] != spec.shape[*dim]);
        let outer = cut.unwrap_or(0);
        let run: usize = spec.shape[outer..].iter().product();
        let strides: Vec<usize> =
            (0..whole.len()).map(|dim| whole[dim + 1..].iter().product()).collect();
        let base: usize = start.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
        let count: usize = spec.shape[..outer].iter().product();
        let run_at = |index: usize| {
            let (mut rest, mut at) = (index, base);
            for dim in (0..outer).rev() {
                at += rest % spec.shape[dim] * strides[stacked + dim];
                rest /= spec.shape[dim];
            }
            (index * run..(index + 1) * run, at)
        };
        if run == 0 { Vec::new() } else { (0..count).map(run_at).collect() }
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
