//! How shards of several places lie in one all-gather.
//!
//! A rank's shards, place after place, are its stream. Streams travel side by side, a piece of all
//! of them at a time; what lies in a piece past the end of a shorter stream is nobody's.

use std::ops::Range;

use oxizero_core::{Numel, Rank};

/// Every rank's shards, and where they lie in what is gathered: place after place, and for each
/// place rank after rank.
#[derive(Debug)]
pub(super) struct Streams {
    /// By rank, and by place.
    shards: Vec<Vec<Range<usize>>>,
}

/// The elements of one shard that lie in a piece of its rank's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// The shard's place.
    pub(super) place: usize,
    pub(super) in_shard: Range<usize>,
    pub(super) in_piece: Range<usize>,
    /// Where they lie in what is gathered.
    pub(super) in_full: Range<usize>,
}

impl Streams {
    /// Shards of so many elements, by rank and by place; every rank has equally many places.
    pub(super) fn new(lengths: &[Vec<usize>]) -> Self {
        let places = lengths.first().map_or(0, Vec::len);
        let (mut shards, mut end) = (vec![Vec::with_capacity(places); lengths.len()], 0);
        for place in 0..places {
            for (shards, lengths) in shards.iter_mut().zip(lengths) {
                shards.push(end..end + lengths[place]);
                end += lengths[place];
            }
        }
        Self { shards }
    }

    /// The elements of a rank's stream.
    pub(super) fn numel(&self, rank: Rank) -> Numel {
        Numel(self.shards[rank.0].iter().map(Range::len).sum())
    }

    /// The elements of the longest stream.
    pub(super) fn longest(&self) -> usize {
        (0..self.shards.len()).map(|rank| self.numel(Rank(rank)).0).max().unwrap_or(0)
    }

    /// The elements of all streams together.
    pub(super) fn full(&self) -> Numel {
        (0..self.shards.len()).map(|rank| self.numel(Rank(rank))).sum()
    }

    /// Whether the streams, one after the other, are what is gathered, and equally long.
    pub(super) fn are_even(&self) -> bool {
        let first = self.numel(Rank(0));
        self.shards.iter().all(|shards| shards.len() == 1)
            && (0..self.shards.len()).all(|rank| self.numel(Rank(rank)) == first)
    }

    /// What a rank has in `piece`, a range of the streams, place after place.
    pub(super) fn stretches(
        &self,
        rank: Rank,
        piece: Range<usize>,
    ) -> impl Iterator<Item = Stretch> + '_ {
        let mut end = 0;
        self.shards[rank.0].iter().enumerate().filter_map(move |(place, shard)| {
            let first = end;
            end += shard.len();
            let (from, to) = (piece.start.max(first), piece.end.min(end));
            (from < to).then(|| Stretch {
                place,
                in_shard: from - first..to - first,
                in_piece: from - piece.start..to - piece.start,
                in_full: shard.start + from - first..shard.start + to - first,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three places on two ranks, numbered through as they are gathered: `00 222 1 3444`.
    fn streams() -> Streams {
        Streams::new(&[vec![2, 1, 0], vec![3, 1, 3]])
    }

    #[test]
    fn streams_are_gathered_place_after_place() {
        let streams = streams();
        assert_eq!((streams.numel(Rank(0)), streams.numel(Rank(1))), (Numel(3), Numel(7)));
        assert_eq!((streams.longest(), streams.full()), (7, Numel(10)));
        let full = |rank| streams.stretches(rank, 0..7).map(|stretch| stretch.in_full);
        assert_eq!(full(Rank(0)).collect::<Vec<_>>(), [0..2, 5..6]);
        assert_eq!(full(Rank(1)).collect::<Vec<_>>(), [2..5, 6..7, 7..10]);
    }

    #[test]
    fn pieces_of_any_length_tile_every_stream() {
        let streams = streams();
        for len in 1..=8 {
            let mut seen = [0; 10];
            for (rank, start) in [0, 1].iter().flat_map(|rank| (0..7).map(|at| (Rank(*rank), at))) {
                if start % len > 0 {
                    continue;
                }
                let mut in_piece = 0;
                for stretch in streams.stretches(rank, start..7.min(start + len)) {
                    assert_eq!(stretch.in_piece.start, in_piece);
                    in_piece = stretch.in_piece.end;
                    assert_eq!(stretch.in_shard.len(), stretch.in_piece.len());
                    assert_eq!(stretch.in_full.len(), stretch.in_piece.len());
                    stretch.in_full.for_each(|element| seen[element] += 1);
                }
            }
            assert_eq!(seen, [1; 10], "pieces of {len}");
        }
    }

    #[test]
    fn one_place_of_equal_shards_is_even() {
        let are_even = |lengths: &[Vec<usize>]| Streams::new(lengths).are_even();
        assert!(are_even(&[vec![4], vec![4]]) && are_even(&[vec![0], vec![0]]));
        assert!(!are_even(&[vec![4], vec![3]]) && !are_even(&[vec![2, 2], vec![2, 2]]));
        assert!(!are_even(&[vec![], vec![]]));
    }
}
