//! Counts that must not be mixed up: elements, bytes, ranks and ranks' numbers.

use std::fmt;
use std::iter::Sum;
use std::num::NonZeroUsize;
use std::ops::{Add, AddAssign, Mul, Sub};

use serde::{Deserialize, Serialize};

use crate::DType;

/// A number of elements.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Numel(pub usize);

impl Numel {
    /// The elements that a tensor of `shape` has; a scalar's empty shape has one.
    pub fn of_shape(shape: &[usize]) -> Self {
        Self(shape.iter().product())
    }

    /// The bytes that these elements take when stored as `dtype`.
    pub fn bytes(self, dtype: DType) -> Bytes {
        Bytes(self.0 * dtype.size())
    }
}

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub usize);

impl Bytes {
    /// As a (fractional) number of MiB.
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1 << 20) as f64
    }

    /// The whole elements of `dtype` that fit.
    pub fn numel(self, dtype: DType) -> Numel {
        Numel(self.0 / dtype.size())
    }
}

impl fmt::Display for Bytes {
    /// Writes a human-readable size: `17 B`, `1.5 KiB`, `640.0 MiB`, `3.25 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: usize = 1 << 10;
        const MIB: usize = 1 << 20;
        const GIB: usize = 1 << 30;
        match self.0 {
            n if n < KIB => write!(f, "{n} B"),
            n if n < MIB => write!(f, "{:.1} KiB", n as f64 / KIB as f64),
            n if n < GIB => write!(f, "{:.1} MiB", n as f64 / MIB as f64),
            n => write!(f, "{:.2} GiB", n as f64 / GIB as f64),
        }
    }
}

macro_rules! count {
    ($name:ident) => {
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl Mul<usize> for $name {
            type Output = Self;
            fn mul(self, times: usize) -> Self {
                Self(self.0 * times)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
                values.fold(Self(0), Add::add)
            }
        }
    };
}
count!(Numel);
count!(Bytes);

impl fmt::Display for Numel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A worker's number in a process group, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The number of workers in a process group; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorldSize(NonZeroUsize);

impl WorldSize {
    /// A group of one.
    pub const ONE: Self = Self(NonZeroUsize::MIN);

    /// `None` for zero workers.
    pub fn new(size: usize) -> Option<Self> {
        NonZeroUsize::new(size).map(Self)
    }

    /// The size as a plain number.
    pub fn get(self) -> usize {
        self.0.get()
    }

    /// Every rank of the group, in order.
    pub fn ranks(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + Clone {
        (0..self.get()).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The ranks (numbered in the world) that communicate with each other, ascending.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessGroup(Vec<Rank>);

impl fmt::Display for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<_> = self.0.iter().map(Rank::to_string).collect();
        write!(f, "of ranks {}", ranks.join(", "))
    }
}

impl ProcessGroup {
    /// The group of every rank.
    pub fn world(size: WorldSize) -> Self {
        Self(size.ranks().collect())
    }

    /// `None` if `ranks` is empty, or not strictly ascending.
    pub fn new(ranks: Vec<Rank>) -> Option<Self> {
        let ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
        (!ranks.is_empty() && ascending).then_some(Self(ranks))
    }

    /// How many ranks the group has.
    pub fn size(&self) -> WorldSize {
        WorldSize::new(self.0.len()).expect("new() refuses an empty group")
    }

    /// The members, by their numbers in the world.
    pub fn ranks(&self) -> &[Rank] {
        &self.0
    }

    /// The place in this group of the rank with number `world_rank`, if it is a member.
    pub fn rank_of(&self, world_rank: Rank) -> Option<Rank> {
        self.0.binary_search(&world_rank).ok().map(Rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let shown = |n| Bytes(n).to_string();
        assert_eq!(shown(17), "17 B");
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(shown(640 << 20), "640.0 MiB");
        assert_eq!(shown(13 << 28), "3.25 GiB");
    }

    #[test]
    fn a_shape_multiplies_out() {
        assert_eq!(Numel::of_shape(&[]), Numel(1));
        assert_eq!(Numel::of_shape(&[0, 8]), Numel(0));
        assert_eq!(Numel::of_shape(&[3, 5]).bytes(DType::Bf16), Bytes(30));
    }

    #[test]
    fn a_group_is_ascending_and_knows_its_members() {
        assert_eq!(ProcessGroup::new(vec![]), None);
        assert_eq!(ProcessGroup::new(vec![Rank(2), Rank(1)]), None);
        assert_eq!(ProcessGroup::new(vec![Rank(1), Rank(1)]), None);
        let group = ProcessGroup::new(vec![Rank(1), Rank(3)]).unwrap();
        assert_eq!(group.rank_of(Rank(3)), Some(Rank(1)));
        assert_eq!(group.rank_of(Rank(2)), None);
        assert_eq!(group.size().get(), 2);
    }
}
