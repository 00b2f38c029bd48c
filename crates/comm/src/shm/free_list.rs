//! Which parts of a section are free.

use std::collections::BTreeMap;
use std::ops::Range;

/// The free parts of a range of addresses: first fit, neighbours merged.
#[derive(Debug)]
pub(super) struct FreeList {
    /// End by start. No two parts touch.
    parts: BTreeMap<usize, usize>,
}

impl FreeList {
    /// All of `range` is free.
    pub(super) fn new(range: Range<usize>) -> Self {
        Self { parts: BTreeMap::from([(range.start, range.end)]) }
    }

    /// The first free range of `len` addresses that starts on a multiple of `align`.
    pub(super) fn take(&mut self, len: usize, align: usize) -> Option<Range<usize>> {
        let fitting = |(start, end): (&usize, &usize)| {
            let first = start.checked_next_multiple_of(align)?;
            let last = first.checked_add(len)?;
            (last <= *end).then_some((*start..*end, first..last))
        };
        let (part, taken) = self.parts.iter().find_map(fitting)?;
        self.parts.remove(&part.start);
        if part.start < taken.start {
            self.parts.insert(part.start, taken.start);
        }
        if taken.end < part.end {
            self.parts.insert(taken.end, part.end);
        }
        Some(taken)
    }

    /// Makes `range`, which was taken, free again.
    pub(super) fn give(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        if let Some((before, &touches)) = self.parts.range(..start).next_back()
            && touches == start
        {
            start = *before;
        }
        if let Some(after) = self.parts.remove(&end) {
            end = after;
        }
        self.parts.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxizero_core::Random;

    #[test]
    fn the_first_fit_is_taken() {
        let mut list = FreeList::new(0..100);
        assert_eq!(list.take(10, 1), Some(0..10));
        assert_eq!(list.take(10, 1), Some(10..20));
        list.give(0..10);
        assert_eq!(list.take(11, 1), Some(20..31));
        assert_eq!(list.take(4, 1), Some(0..4));
        assert_eq!(list.take(70, 1), None);
    }

    #[test]
    fn alignment_leaves_the_front_free() {
        let mut list = FreeList::new(8..256);
        assert_eq!(list.take(64, 64), Some(64..128));
        assert_eq!(list.take(56, 8), Some(8..64));
        assert_eq!(list.take(128, 64), Some(128..256));
        assert_eq!(list.take(1, 1), None);
    }

    #[test]
    fn what_is_taken_is_disjoint_and_all_comes_back() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let mut list = FreeList::new(0..1 << 16);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for _ in 0..500 {
                if random.below(3) > 0 || taken.is_empty() {
                    let align = 1 << random.below(8);
                    let new = list.take(1 + random.below(900), align);
                    let Some(new) = new else { continue };
                    assert!(new.start.is_multiple_of(align) && new.end <= 1 << 16);
                    let apart = |old: &Range<usize>| old.end <= new.start || new.end <= old.start;
                    assert!(taken.iter().all(apart), "seed {seed}: {new:?} in {taken:?}");
                    taken.push(new);
                } else {
                    let index = random.below(taken.len());
                    list.give(taken.swap_remove(index));
                }
            }
            taken.into_iter().for_each(|range| list.give(range));
            assert_eq!(list.parts, BTreeMap::from([(0, 1 << 16)]), "seed {seed}");
        }
    }
}
