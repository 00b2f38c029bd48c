//! Times of what all ranks do at once.

use std::time::SystemTime;

use oxizero_comm::{CommError, Communicator};

use super::rows::Row;

/// The times of this rank, by name in the order in which they first came.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    timed: Vec<Timed>,
}

#[derive(Debug)]
struct Timed {
    name: String,
    reference: String,
    seconds: Vec<f64>,
}

/// A time that has begun, on all ranks. It is told by a clock that the ranks of a machine share:
/// where there are more of them than processors, some start when others have ended.
#[derive(Debug)]
pub(crate) struct Lap(SystemTime);

impl Lap {
    /// Waits for all ranks, and starts.
    pub(crate) fn start(comm: &dyn Communicator) -> Result<Self, CommError> {
        comm.barrier()?;
        Ok(Self(SystemTime::now()))
    }

    /// Waits for all ranks; the seconds from when the first of them started until the last one
    /// stopped.
    pub(crate) fn stop(self, comm: &dyn Communicator) -> Result<f64, CommError> {
        let stopped = SystemTime::now();
        let nanoseconds = [self.0, stopped].map(since_epoch).map(u64::to_le_bytes);
        let told = comm.exchange("times of a lap", nanoseconds.as_flattened())?;
        Ok(1e-9 * span(&told) as f64)
    }
}

impl Clock {
    /// Waits for all ranks, and keeps the seconds from when the first of them started until the
    /// last one stopped, which it returns.
    /// `reference` names what the time is to be compared with.
    pub(crate) fn stop(
        &mut self,
        lap: Lap,
        name: &str,
        reference: &str,
        comm: &dyn Communicator,
    ) -> Result<f64, CommError> {
        let seconds = lap.stop(comm)?;
        self.keep(name, reference, seconds);
        Ok(seconds)
    }

    /// Keeps a time that was measured otherwise.
    pub(crate) fn keep(&mut self, name: &str, reference: &str, seconds: f64) {
        match self.timed.iter_mut().find(|timed| timed.name == name) {
            Some(timed) => timed.seconds.push(seconds),
            None => {
                let (name, reference) = (name.to_owned(), reference.to_owned());
                self.timed.push(Timed { name, reference, seconds: vec![seconds] });
            }
        }
    }

    /// The medians, without hashes.
    ///
    /// # Panics
    ///
    /// If a reference was never timed.
    pub(crate) fn rows(&self, ranks: usize) -> Vec<Row> {
        let reference = |timed: &Timed| {
            let found = self.timed.iter().find(|other| other.name == timed.reference);
            median(&found.expect("a reference is timed in every round").seconds)
        };
        let row = |timed: &Timed| {
            let median = median(&timed.seconds);
            Row {
                name: timed.name.clone(),
                ranks,
                median,
                unit: "s",
                reference: timed.reference.clone(),
                ratio: median / reference(timed),
                hash: None,
            }
        };
        self.timed.iter().map(row).collect()
    }
}

fn since_epoch(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// From the earliest of the ranks' starts to the latest of their ends.
fn span(told: &[Vec<u8>]) -> u64 {
    let times = |index: usize| {
        told.iter().map(move |times| {
            let time = times.as_chunks().0[index];
            u64::from_le_bytes(time)
        })
    };
    let [start, end] = [times(0).min(), times(1).max()];
    end.unwrap_or(0).saturating_sub(start.unwrap_or(0))
}

/// The middle one, or the mean of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle_whatever_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn a_lap_lasts_from_the_first_start_to_the_last_end() {
        let times = |start: u64, end: u64| [start, end].map(u64::to_le_bytes).concat();
        assert_eq!(span(&[times(5, 9), times(7, 12), times(6, 6)]), 7);
    }

    #[test]
    fn ratios_are_over_the_median_of_the_reference() {
        let timed = |name: &str, seconds: &[f64]| Timed {
            name: name.into(),
            reference: "memcpy".into(),
            seconds: seconds.to_vec(),
        };
        let timed = vec![timed("memcpy", &[1.0, 9.0, 2.0]), timed("a", &[3.0, 3.0, 0.0])];
        let rows = Clock { timed }.rows(2);
        let ratios: Vec<_> = rows.iter().map(|row| (&*row.name, row.ratio)).collect();
        assert_eq!(ratios, [("memcpy", 1.0), ("a", 1.5)]);
    }
}
