//! Weights that somebody else than an update wrote: ranks that hold the same write the same.

use std::collections::BTreeMap;

use oxizero_core::{ParamId, Placement};
use oxizero_device::View;

use crate::Engine;
use crate::bucket::Field;

/// By parameter: what tells the values that were written since the last window from others.
#[derive(Debug, Default)]
pub(crate) struct Written(BTreeMap<ParamId, u64>);

impl Written {
    /// What tells all of it from others.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.iter().fold(0, |hash, (param, values)| mixed(mixed(hash, param.0 as u64), *values))
    }

    /// What was written is known to be the same on all ranks, or no rank's affair any more.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Engine {
    /// Remembers that a parameter was written, and what.
    pub(crate) fn note_written(&mut self, param: ParamId) {
        let state = &self.params[param.0];
        let bucket = &self.buckets[state.bucket.0];
        let elements = bucket.spec().layout.slot(state.slot);
        let values = bucket.resting(elements).and_then(|values| self.fingerprint(param, values));
        self.written.0.insert(param, values.unwrap_or_default());
    }

    /// A call with what tells its values from others, so that ranks which give others hear of it:
    /// of weights, which all ranks have, and of whatever else each rank has all of. Where a rank's
    /// optimizer updates a part, that part of what the rank gives is taken.
    pub(crate) fn call_of(&self, call: &str, field: Field, of: (ParamId, View<'_>)) -> String {
        let all_have_it =
            field == Field::Master || self.options.stage.optim() == Placement::Replicated;
        match all_have_it.then(|| self.fingerprint(of.0, of.1)).flatten() {
            Some(values) => format!("{call} with values {values:016x}"),
            None => call.to_owned(),
        }
    }

    /// Tells values of a parameter from others. `None` where ranks hold parts of it, or the values
    /// lie where the host would have to wait for them.
    fn fingerprint(&self, param: ParamId, values: View<'_>) -> Option<u64> {
        let bucket = self.params.get(param.0)?.bucket;
        let is_same = self.buckets[bucket.0].spec().sharing.parts().is_empty();
        match values {
            View::Device(_) => None,
            host => is_same.then(|| of_bytes(host.bytes())),
        }
    }
}

/// For comparison and not for security.
fn of_bytes(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(0, |hash, word| mixed(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, byte| mixed(hash, u64::from(*byte)))
}

fn mixed(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}
