//! Which elements of a flat bucket belong to which parameter, and to which rank.
//!
//! Layout arithmetic lives here alone: reduce, gather, access, update, save and load all ask it.
//! Ranges count elements of the unsharded bucket unless a name says otherwise.

use std::ops::Range;

use crate::{Numel, Rank, WorldSize};

/// The element ranges of one bucket. Fixed when the bucket is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: Vec<Range<usize>>,
    padded_numel: usize,
    world_size: WorldSize,
}

/// The part of one parameter that lies in some range of the bucket; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The parameter's index in the bucket.
    pub slot: usize,
    /// Which of the parameter's elements.
    pub in_param: Range<usize>,
    /// Where they lie in the unsharded bucket.
    pub in_bucket: Range<usize>,
}

impl Layout {
    /// Lays parameters of `numels` elements in order, each start and each shard a multiple of
    /// `align` elements.
    ///
    /// # Panics
    ///
    /// If `align` is zero.
    pub fn new(numels: &[Numel], world_size: WorldSize, align: Numel) -> Self {
        assert!(align.0 > 0, "an alignment of zero elements");
        let mut end = 0_usize;
        let slot = |numel: &Numel| {
            let start = end.next_multiple_of(align.0);
            end = start + numel.0;
            start..end
        };
        let slots = numels.iter().map(slot).collect();
        let padded_numel = end.next_multiple_of(world_size.get() * align.0);
        Self { slots, padded_numel, world_size }
    }

    /// Where parameter `slot` lies.
    pub fn slot(&self, slot: usize) -> Range<usize> {
        self.slots[slot].clone()
    }

    /// Parameters in the bucket.
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Which elements `rank` owns.
    ///
    /// # Panics
    ///
    /// If the group has no such rank.
    pub fn shard(&self, rank: Rank) -> Range<usize> {
        assert!(rank.0 < self.world_size.get(), "rank {rank} of {}", self.world_size);
        let numel = self.shard_numel().0;
        rank.0 * numel..(rank.0 + 1) * numel
    }

    /// All elements, padding included.
    pub fn all(&self) -> Range<usize> {
        0..self.padded_numel
    }

    /// Elements in the unsharded bucket, padding included.
    pub fn padded_numel(&self) -> Numel {
        Numel(self.padded_numel)
    }

    /// Elements in one rank's shard, padding included.
    pub fn shard_numel(&self) -> Numel {
        Numel(self.padded_numel / self.world_size.get())
    }

    /// The ranks that share the bucket.
    pub fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// The parts of parameters that lie in `range`, in order; padding and empty parameters have
    /// none.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Piece> + '_ {
        let first = self.slots.partition_point(|slot| slot.end <= range.start);
        let slots = self.slots.iter().enumerate().skip(first);
        let end = range.end;
        slots.take_while(move |(_, slot)| slot.start < end).filter_map(move |(index, slot)| {
            let in_bucket = slot.start.max(range.start)..slot.end.min(range.end);
            let in_param = in_bucket.start.checked_sub(slot.start)?..in_bucket.end - slot.start;
            (!in_bucket.is_empty()).then_some(Piece { slot: index, in_param, in_bucket })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `check` with every layout of up to three parameters that is small enough to try.
    fn each_layout(mut check: impl FnMut(&Layout, &[Numel])) {
        for world_size in (1..=9).filter_map(WorldSize::new) {
            for align in [1, 4] {
                for first in 0..=17 {
                    for second in [0, 1, 7] {
                        let numels = [Numel(first), Numel(second), Numel(3)];
                        check(&Layout::new(&numels, world_size, Numel(align)), &numels);
                    }
                }
            }
        }
    }

    #[test]
    fn shards_tile_the_bucket() {
        each_layout(|layout, _| {
            let mut next = 0;
            for rank in layout.world_size().ranks() {
                let shard = layout.shard(rank);
                assert_eq!(shard.start, next);
                assert_eq!(shard.len(), layout.shard_numel().0);
                next = shard.end;
            }
            assert_eq!(next, layout.padded_numel().0);
        });
    }

    #[test]
    fn pieces_of_all_shards_tile_every_parameter() {
        each_layout(|layout, numels| {
            let mut seen = vec![0; numels.len()];
            for rank in layout.world_size().ranks() {
                for piece in layout.pieces(layout.shard(rank)) {
                    assert_eq!(piece.in_param.start, seen[piece.slot], "{layout:?}");
                    assert_eq!(piece.in_param.len(), piece.in_bucket.len());
                    let start = layout.slot(piece.slot).start + piece.in_param.start;
                    assert_eq!(start, piece.in_bucket.start);
                    seen[piece.slot] = piece.in_param.end;
                }
            }
            assert!(seen.iter().zip(numels).all(|(seen, numel)| *seen == numel.0));
        });
    }

    #[test]
    fn slots_do_not_overlap_and_padding_is_less_than_a_row_of_shards() {
        for align in [1, 32] {
            let numels = [5, 0, 7, 64, 1].map(Numel);
            let world_size = WorldSize::new(3).unwrap();
            let layout = Layout::new(&numels, world_size, Numel(align));
            for slot in 1..numels.len() {
                assert!(layout.slot(slot - 1).end <= layout.slot(slot).start);
                assert_eq!(layout.slot(slot).start % align, 0);
            }
            assert!(layout.padded_numel().0 - layout.slot(4).end < 3 * align);
            assert_eq!(layout.shard_numel().0 % align, 0);
        }
    }

    #[test]
    fn an_empty_bucket_has_empty_shards() {
        let layout = Layout::new(&[Numel(0)], WorldSize::new(4).unwrap(), Numel(16));
        assert_eq!(layout.shard(Rank(3)), 0..0);
        assert_eq!(layout.pieces(layout.all()).count(), 0);
    }
}
