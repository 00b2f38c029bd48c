//! The plain copies that benches are compared with.

use std::hint::black_box;

use oxizero_comm::Communicator;
use oxizero_core::Bytes;

use super::clock::{Clock, Lap};
use crate::rank::RankError;

/// Many times as large as a cache, so that nothing of a piece is left when it is copied again.
const PIECE: Bytes = Bytes(256 << 20);

/// Memory to copy from and to, every page of it in use.
pub(crate) struct Copies {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Copies {
    /// For whatever moves at most so many bytes.
    pub(crate) fn new(moved_max: Bytes) -> Self {
        let len = PIECE.0.min(moved_max.0 / 2);
        Self { source: vec![1; len], target: vec![2; len] }
    }

    /// Times copies that move `moved` bytes: they read half of them and write as many, again and
    /// again in the same memory where that is smaller. Returns the seconds.
    pub(crate) fn time(
        &mut self,
        moved: Bytes,
        name: &str,
        clock: &mut Clock,
        comm: &dyn Communicator,
    ) -> Result<f64, RankError> {
        let lap = Lap::start(comm)?;
        let mut left = moved.0 / 2;
        while left > 0 {
            let len = left.min(self.source.len());
            self.target[..len].copy_from_slice(black_box(&self.source[..len]));
            black_box(&mut self.target);
            left -= len;
        }
        Ok(clock.stop(lap, name, name, comm)?)
    }
}

#[cfg(test)]
mod tests {
    use oxizero_comm::threads;
    use oxizero_core::WorldSize;

    use super::*;

    #[test]
    fn copies_end_whatever_the_size() {
        let comm = threads::group(WorldSize::ONE).remove(0);
        let mut clock = Clock::default();
        let mut copies = Copies::new(Bytes(1000));
        for moved in [0, 1, 2, 999, 1000, 5001] {
            copies.time(Bytes(moved), "copies", &mut clock, &*comm).unwrap();
        }
        assert!(copies.target.iter().all(|byte| *byte == 1));
        assert_eq!(clock.rows(1)[0].ratio, 1.0);
    }
}
