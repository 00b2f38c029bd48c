//! What this rank holds, kept up to date as buckets change.

use oxizero_core::{Bytes, RoleBytes};

/// Running bytes by role, and the most there were.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ledger {
    live: RoleBytes,
    peak: RoleBytes,
    fullest: RoleBytes,
}

impl Ledger {
    /// Starts with what rests; while the last bucket was made, its initial weights lay beside it.
    pub(crate) fn start(rest: RoleBytes, initial: Bytes) -> Self {
        let start = RoleBytes { initial, ..rest };
        Self { live: rest, peak: start, fullest: start }
    }

    /// A bucket that held `before` holds `after`.
    pub(crate) fn change(&mut self, before: RoleBytes, after: RoleBytes) {
        // Most of what happens to a bucket changes no size: a gradient comes into its slot.
        if before != after {
            self.live = self.live + after - before;
            self.peak = self.peak.max(self.live);
            if self.live.total() >= self.fullest.total() {
                self.fullest = self.live;
            }
        }
    }

    /// The most of each role.
    pub(crate) fn peak(&self) -> RoleBytes {
        self.peak
    }

    /// Each role at the last of the moments that had the most of all together.
    pub(crate) fn fullest(&self) -> RoleBytes {
        self.fullest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_the_sum_is_no_sum_of_peaks() {
        let mut ledger = Ledger::default();
        let gathered = RoleBytes { gathered: Bytes(10), ..RoleBytes::default() };
        let partial = RoleBytes { partial: Bytes(4), ..RoleBytes::default() };
        ledger.change(RoleBytes::default(), gathered);
        ledger.change(gathered, partial);
        assert_eq!(ledger.peak().total(), Bytes(14));
        assert_eq!(ledger.fullest(), gathered);
    }
}
