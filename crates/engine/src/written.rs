//! Weights that others than an update wrote: ranks that hold the same write the same.
//!
//! Of what was written ranks compare a checksum of each whole parameter, in an exchange that a step
//! makes anyway. Only where these differ do they look at every parameter, and find the one to name.

use std::collections::BTreeMap;

use oxizero_core::{Axes, BucketId, ParamId, Placement, Rank, Sharing};
use oxizero_device::{View, kernels};

use crate::bucket::Field;
use crate::groups::{Groups, Message};
use crate::{Engine, EngineError};

/// What was written since ranks last compared their weights.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// The checksum of what was written, where the parameter is whole only for a while.
    params: BTreeMap<ParamId, Option<u64>>,
    /// Windows whose step found no difference.
    windows: u64,
}

/// The checksums that this rank takes of its weights.
#[derive(Debug)]
pub(crate) struct Compared {
    /// The parameters that others are asked about, each with the axes along which they are.
    asked: Vec<(ParamId, Axes)>,
    /// The parameters whose weights are read now.
    read: Vec<ParamId>,
}

impl Written {
    /// The ranks have seen that they hold the same.
    pub(crate) fn agreed(&mut self) {
        self.params.clear();
        self.windows += 1;
    }

    /// Whether this is one of the windows at whose end ranks compare all weights that are lent,
    /// written or not: the first, second, fourth, eighth and so on. A borrower may write without
    /// saying so; one that does it at all mostly does it from the start, and often.
    fn looks_at_all(&self) -> bool {
        (self.windows + 1).is_power_of_two()
    }

    /// Other values have come in place of what was written.
    pub(crate) fn replaced(&mut self, param: ParamId) {
        self.params.remove(&param);
    }
}

impl Engine {
    /// Remembers that a parameter was written, by this rank or by all.
    pub(crate) fn note_written(&mut self, param: ParamId) {
        self.written.params.insert(param, None);
    }

    /// Remembers what was written to the gathered weights of a bucket, `full`, which will not be
    /// whole any more.
    pub(crate) fn note_gathered(&mut self, id: BucketId, full: View<'_>) {
        let spec = self.buckets[id.0].spec();
        if spec.sharing.copies().is_empty() {
            return;
        }
        let slots = (0..spec.params.len()).map(|slot| full.range(spec.layout.slot(slot)));
        let checksums = kernels::checksums(&slots.collect::<Vec<_>>()).into_iter().map(Some);
        self.written.params.extend(spec.params.iter().copied().zip(checksums));
    }

    /// What ranks are to compare now.
    pub(crate) fn compared(&self) -> Compared {
        let sharing = |param: &ParamId| self.sharing(*param);
        // What was written is to be the same wherever weights are said to be; what was not is so
        // only where the engine itself keeps it so.
        let written = self.written.params.keys();
        let mut asked: Vec<_> = written.map(|param| (*param, sharing(param).copies())).collect();
        if self.written.looks_at_all() && !self.shares_weights() {
            let lent = (0..self.specs.len()).map(ParamId).filter(|param| self.is_lent(*param));
            asked.extend(lent.map(|param| (param, sharing(&param).reduced)));
        }
        // A rank that is alone with its weights asks nobody.
        asked.retain(|(_, axes)| !axes.is_empty());
        let mut read: Vec<_> = asked.iter().map(|(param, _)| *param).collect();
        read.sort_unstable();
        read.dedup();
        read.retain(|param| self.written.params.get(param).is_none_or(Option::is_none));
        read.retain(|param| self.replica(*param).is_some());
        Compared { asked, read }
    }

    /// The weights that are read for a comparison, in its order.
    pub(crate) fn views_of(&self, compared: &Compared) -> Vec<View<'_>> {
        compared.read.iter().filter_map(|param| self.replica(*param)).collect()
    }

    /// By set of axes, what tells this rank's weights from those of others along them, with the
    /// checksums of what was read.
    pub(crate) fn fingerprints(&self, compared: &Compared, read: &[u64]) -> Vec<u64> {
        let mut told = vec![0; self.groups.compared().len()];
        for (param, axes) in &compared.asked {
            let at = self.groups.compared().iter().position(|known| known == axes);
            let told = &mut told[at.expect("the groups were given every parameter's axes")];
            let fixed = self.written.params.get(param).copied().flatten();
            let now = compared.read.binary_search(param).map_or(0, |index| read[index]);
            *told = mixed(mixed(*told, param.0 as u64 + 1), fixed.unwrap_or(now));
        }
        told
    }

    /// Compares what was written now, and not with the next step; a collective call.
    pub(crate) fn compare_written(&mut self) -> Result<(), EngineError> {
        let compared = self.compared();
        let read = kernels::checksums(&self.views_of(&compared));
        let own = self.fingerprints(&compared, &read);
        let bytes: Vec<u8> = own.iter().flat_map(|told| told.to_le_bytes()).collect();
        let told = self.groups.exchange(Message::Written, "what was written", &bytes);
        let told = told.map_err(|error| self.fail(error))?;
        let (words, _): (Vec<_>, Vec<_>) = told.iter().map(|bytes| bytes.as_chunks::<8>()).unzip();
        if differ(&self.groups, |rank| words[rank.0]) {
            self.compare_all()?;
        }
        self.written.params.clear();
        Ok(())
    }

    /// Finds the first parameter whose weights are not alike where they are to be; a collective
    /// call.
    pub(crate) fn compare_all(&mut self) -> Result<(), EngineError> {
        const BYTES: usize = 9;
        let all = (0..self.specs.len()).map(ParamId);
        let (read, views): (Vec<_>, Vec<_>) =
            all.filter_map(|param| Some((param, self.replica(param)?))).unzip();
        let mut own = vec![0; BYTES * self.specs.len()];
        let mut tell = |param: &ParamId, checksum: u64| {
            own[BYTES * param.0..][1..BYTES].copy_from_slice(&checksum.to_le_bytes());
        };
        read.iter().zip(kernels::checksums(&views)).for_each(|(param, read)| tell(param, read));
        let written = || self.written.params.iter();
        written().for_each(|(param, checksum)| checksum.iter().for_each(|it| tell(param, *it)));
        written().for_each(|(param, _)| own[BYTES * param.0] = 1);
        let told = self.groups.exchange(Message::Weights, "all weights", &own);
        let told = told.map_err(|error| self.fail(error))?;
        for (index, spec) in self.specs.iter().enumerate() {
            let of = |rank: Rank| &told[rank.0][BYTES * index..][..BYTES];
            let sharing = self.sharing(ParamId(index));
            let is_written = (0..told.len()).any(|rank| of(Rank(rank))[0] == 1);
            let axes = if is_written { sharing.copies() } else { sharing.reduced };
            if let Some((first, others)) = others(self.groups.firsts(axes), |rank| &of(rank)[1..]) {
                return Err(EngineError::WritesDiffer { param: spec.name.clone(), first, others });
            }
        }
        Ok(())
    }

    /// What tells a parameter's values from those that other ranks are given for a call: of
    /// weights, which all ranks have, and of whatever else each rank has all of. `None` where a
    /// rank's optimizer updates a part, and takes that part of what the rank is given.
    pub(crate) fn told_of(&self, field: Field, values: View<'_>) -> Option<u64> {
        let all_have_it =
            field == Field::Master || self.options.stage.optim() == Placement::Replicated;
        all_have_it.then(|| kernels::checksums(&[values])[0])
    }

    /// How ranks share a parameter.
    pub(crate) fn sharing(&self, param: ParamId) -> Sharing {
        self.buckets[self.params[param.0].bucket.0].spec().sharing
    }

    /// The whole weights of a parameter, where they rest on this rank.
    fn replica(&self, param: ParamId) -> Option<View<'_>> {
        let state = &self.params[param.0];
        let bucket = &self.buckets[state.bucket.0];
        bucket.resting(bucket.spec().layout.slot(state.slot))
    }

    fn is_lent(&self, param: ParamId) -> bool {
        self.buckets[self.params[param.0].bucket.0].is_lent()
    }
}

/// Whether ranks that are to hold the same weights may not, by their fingerprints.
pub(crate) fn differ<'a, T: PartialEq + 'a>(
    groups: &Groups,
    told: impl Fn(Rank) -> &'a [T],
) -> bool {
    let mut compared = groups.compared().iter().enumerate();
    compared.any(|(at, axes)| others(groups.firsts(*axes), |rank| &told(rank)[at]).is_some())
}

/// The first of the ranks that are to say the same, and those that say something else than it; none
/// where all say the same. `firsts` says of every rank which is the first of those.
pub(crate) fn others<T: PartialEq>(
    firsts: &[Rank],
    says: impl Fn(Rank) -> T,
) -> Option<(Rank, Vec<Rank>)> {
    let differs = |(first, rank): &(Rank, Rank)| says(*first) != says(*rank);
    let pairs = || firsts.iter().copied().zip((0..).map(Rank));
    let (first, _) = pairs().find(differs)?;
    let others = pairs().filter(|pair| pair.0 == first && differs(pair));
    Some((first, others.map(|(_, rank)| rank).collect()))
}

/// For comparison and not for security.
fn mixed(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}
