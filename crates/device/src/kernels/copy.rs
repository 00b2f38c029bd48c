//! Bytes from one place to another.

use crate::simd::{LINE, prefetch, vectorised, written};

/// The bytes that are moved at once.
const PART: usize = 4 * LINE;

/// How far ahead of what is read lines are asked for: a page, so that the next page's address is
/// known when it is come to. Where pages are small, as those that processes share mostly are,
/// to wait for that costs as much as the copy.
const AHEAD: usize = 4096;

/// What is smaller stays in the caches, where the next to use it finds it.
const LARGE: usize = 1 << 20;

/// Copies `source` over `target`. What is large is written past the caches, as the C library's
/// copies are.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy(source: &[u8], target: &mut [u8]) {
    assert_eq!(source.len(), target.len(), "a copy between different lengths");
    if source.len() < LARGE {
        return target.copy_from_slice(source);
    }
    let (target_head, target) = target.split_at_mut(target.as_ptr().align_offset(LINE));
    let (head, source) = source.split_at(target_head.len());
    target_head.copy_from_slice(head);
    written(target, true, |mut writer| {
        vectorised(
            #[inline(always)]
            || {
                let (parts, rest) = source.as_chunks::<PART>();
                for (index, part) in parts.iter().enumerate() {
                    prefetch::<u8, PART>(source, index * PART + AHEAD);
                    writer.write(index * PART, part);
                }
                writer.write_part(parts.len() * PART, rest);
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_wherever_the_two_start() {
        let source: Vec<u8> = (0..LARGE + 1000).map(|index| (index % 251) as u8).collect();
        for (from, to, len) in
            [(0, 0, 0), (1, 2, 100), (0, 1, LARGE), (3, 0, LARGE + 1), (5, 63, LARGE + 900)]
        {
            let mut target = vec![0; to + len + 70];
            copy(&source[from..from + len], &mut target[to..to + len]);
            assert_eq!(target[to..to + len], source[from..from + len]);
            assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0));
        }
    }
}
