//! What this rank holds, kept up to date as buckets change.

use oxizero_core::{Bytes, RoleBytes};

/// Running bytes by role, and the most there were.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ledger {
    live: RoleBytes,
    peak: RoleBytes,
    peak_total: Bytes,
}

impl Ledger {
    /// Starts with what rests; while the last bucket was made, its initial weights lay beside it.
    pub(crate) fn start(rest: RoleBytes, initial: Bytes) -> Self {
        Self { live: rest, peak: rest, peak_total: rest.total() + initial }
    }

    /// A bucket that held `before` holds `after`.
    pub(crate) fn change(&mut self, before: RoleBytes, after: RoleBytes) {
        // Most of what happens to a bucket changes no size: a gradient comes into its slot.
        if before != after {
            self.live = self.live + after - before;
            self.peak = self.peak.max(self.live);
            self.peak_total = self.peak_total.max(self.live.total());
        }
    }

    /// The most of each role.
    pub(crate) fn peak(&self) -> RoleBytes {
        self.peak
    }

    /// The most of all roles at one moment.
    pub(crate) fn peak_total(&self) -> Bytes {
        self.peak_total
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
        assert_eq!(ledger.peak_total(), Bytes(10));
    }
}
