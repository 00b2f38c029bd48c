//! Cache colours: where large regions start within the memory that is set aside for them.
//!
//! Large blocks of memory start on a multiple of a huge page, or lie a power of two apart, and a
//! cache tells few such addresses apart: the operands of a loop would drive each other's lines out
//! of it, which doubles the time of an update. So each block's region starts a page and a few
//! lines further in than the region before, until that begins anew.

use crate::REGION_ALIGN;

/// The colours that there are.
const COLOURS: usize = 16;

/// The size of small pages, and of what a first-level cache keeps apart.
const PAGE: usize = 4096;

const STEP: usize = PAGE + 5 * REGION_ALIGN;

/// What must be set aside beyond a region, in bytes, so that it may have any colour.
pub const COLOURS_LEN: usize = (COLOURS - 1) * STEP;

/// Where region number `number` starts in its memory, in bytes; at most [`COLOURS_LEN`], a multiple
/// of [`REGION_ALIGN`].
pub fn colour(number: usize) -> usize {
    number % COLOURS * STEP
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn neighbours_start_on_lines_that_caches_tell_apart() {
        let starts: Vec<usize> = (5..5 + COLOURS).map(colour).collect();
        assert!(starts.iter().all(|start| start.is_multiple_of(REGION_ALIGN)));
        assert_eq!(starts.iter().max(), Some(&COLOURS_LEN));
        for size in [PAGE, 1 << 17] {
            let places: BTreeSet<_> = starts.iter().map(|start| start % size).collect();
            assert_eq!(places.len(), COLOURS, "within {size} bytes");
        }
    }
}
