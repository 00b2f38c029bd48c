//! Which rank holds what, by plain counting.

use super::{Axis, Holds};

/// A tensor that is trained apart from the others, of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The parameter.
    pub param: usize,
    /// Where its holders are along each axis; 0 along those where they are everywhere.
    pub place: Vec<usize>,
    /// The ranks that hold it.
    pub holders: Vec<usize>,
    /// Those whose gradients add up: of ranks with the same gradient the first.
    pub adds: Vec<usize>,
}

/// The tensors that a parameter is, in the order of their first holders.
pub fn instances(axes: &[Axis], param: usize, holds: &[Holds]) -> Vec<Instance> {
    let mut all: Vec<Instance> = Vec::new();
    for rank in 0..axes.iter().map(|axis| axis.ranks).product() {
        let mut place = coordinates(axes, rank);
        let mut is_first_copy = true;
        for (at, holds) in place.iter_mut().zip(holds) {
            match holds {
                Holds::Copy => is_first_copy &= std::mem::take(at) == 0,
                Holds::Sum => *at = 0,
                Holds::Part(_) | Holds::Own => {}
            }
        }
        let index = all.iter().position(|instance| instance.place == place).unwrap_or(all.len());
        if index == all.len() {
            all.push(Instance { param, place, holders: Vec::new(), adds: Vec::new() });
        }
        all[index].holders.push(rank);
        if is_first_copy {
            all[index].adds.push(rank);
        }
    }
    all
}

/// The rank that is at 0 along the axes that `is_zeroed`, and elsewhere where `rank` is.
pub fn first_along(axes: &[Axis], rank: usize, is_zeroed: impl Fn(usize) -> bool) -> usize {
    let along = coordinates(axes, rank).into_iter().zip(axes).enumerate();
    along.fold(0, |first, (index, (at, axis))| {
        first * axis.ranks + if is_zeroed(index) { 0 } else { at }
    })
}

/// Where a rank is along each axis.
fn coordinates(axes: &[Axis], rank: usize) -> Vec<usize> {
    let faster = |index: usize| axes[index + 1..].iter().map(|axis| axis.ranks).product::<usize>();
    (0..axes.len()).map(|index| rank / faster(index) % axes[index].ranks).collect()
}

/// The whole of what the ranks hold of a parameter, row-major: tensors of their own in dimensions
/// of their own, before the others; parts beside each other. By instance its place and elements.
pub fn whole(
    axes: &[Axis],
    (holds, shape): (&[Holds], &[usize]),
    parts: &[(&[usize], &[f32])],
) -> Vec<f32> {
    let mut all = vec![f32::NAN; parts.iter().map(|(_, values)| values.len()).sum()];
    for (place, values) in parts {
        for (element, value) in values.iter().enumerate() {
            let mut at = 0;
            for (axis, _) in holds.iter().enumerate().filter(|(_, holds)| **holds == Holds::Own) {
                at = at * axes[axis].ranks + place[axis];
            }
            for (dim, size) in shape.iter().enumerate() {
                let (mut part, mut count) = (0, 1);
                for (axis, _) in holds.iter().enumerate().filter(|(_, h)| **h == Holds::Part(dim)) {
                    part = part * axes[axis].ranks + place[axis];
                    count *= axes[axis].ranks;
                }
                let inner: usize = shape[dim + 1..].iter().product();
                at = at * size * count + part * size + element / inner % size;
            }
            all[at] = *value;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(sizes: &[usize]) -> Vec<Axis> {
        sizes.iter().map(|ranks| Axis { ranks: *ranks, same_batches: false }).collect()
    }

    #[test]
    fn each_rank_holds_one_instance_and_copies_count_once() {
        use Holds::{Copy, Own, Sum};
        let all = instances(&axes(&[2, 3, 2]), 7, &[Sum, Own, Copy]);
        let held: Vec<_> = all.iter().map(|one| one.holders.clone()).collect();
        assert_eq!(held, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]);
        let adds: Vec<_> = all.iter().map(|one| one.adds.clone()).collect();
        assert_eq!(adds, [[0, 6], [2, 8], [4, 10]]);
        assert_eq!((&all[1].place, all[1].param), (&vec![0, 1, 0], 7));
        assert_eq!(first_along(&axes(&[2, 3, 2]), 11, |axis| axis == 1), 7);
    }

    #[test]
    fn parts_lie_beside_each_other_and_own_tensors_one_after_the_other() {
        let two = axes(&[2]);
        let parts: [(&[usize], &[f32]); 2] = [(&[0], &[1., 2., 3., 4.]), (&[1], &[5., 6., 7., 8.])];
        let of = |holds| whole(&two, (&[holds], &[2, 2]), &parts);
        assert_eq!(of(Holds::Part(1)), [1., 2., 5., 6., 3., 4., 7., 8.]);
        assert_eq!(of(Holds::Part(0)), [1., 2., 3., 4., 5., 6., 7., 8.]);
        assert_eq!(of(Holds::Own), [1., 2., 3., 4., 5., 6., 7., 8.]);
    }
}
