//! How parameters fall into buckets. A bucket is the parameters that are communicated together.

use serde::{Deserialize, Serialize};

use crate::{Bytes, DType, Layout, Mesh, Numel, ParamId, ParamSpec, Sharing, UnitId};

/// A bucket's index, in the order of its first parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketId(pub usize);

impl std::fmt::Display for BucketId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Where one bucket ends and the next begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bucketing {
    /// One bucket a unit: what is used together travels together.
    #[default]
    Unit,
    /// As many consecutive parameters as fit in so many bytes of model weights, whatever their
    /// units. A larger parameter is a bucket of its own.
    Bytes(Bytes),
}

/// The parameters of one bucket, and where each lies in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketSpec {
    /// The parameters, in slot order.
    pub params: Vec<ParamId>,
    /// The units that they belong to, ascending.
    pub units: Vec<UnitId>,
    /// The dtype of the model weights; buckets do not mix dtypes.
    pub dtype: DType,
    /// Whether the parameters are trained; buckets do not mix trained and frozen ones.
    pub trainable: bool,
    /// How the ranks share the parameters: all alike.
    pub sharing: Sharing,
    /// The most gradients that one of the parameters gives in a micro-batch.
    pub contributions: usize,
    /// The element ranges.
    pub layout: Layout,
}

/// Assigns every parameter to a bucket, in order.
///
/// A bucket's key is (process groups, dtype, trainable): what differs in these never shares a
/// buffer, so that one collective serves all of it, a norm counts it as a whole, and frozen
/// parameters cost no gradient or state. `align_bytes` is the alignment of each parameter and shard
/// in a buffer of model weights.
pub fn assign_buckets(
    specs: &[ParamSpec],
    mesh: &Mesh,
    bucketing: Bucketing,
    align_bytes: Bytes,
) -> Vec<BucketSpec> {
    let keys: Vec<_> =
        specs.iter().map(|spec| (mesh.sharing(spec), spec.dtype, spec.trainable)).collect();
    let mut members: Vec<Vec<ParamId>> = Vec::new();
    let mut open: Vec<usize> = Vec::new(); // at most one bucket a key takes more parameters
    for (index, spec) in specs.iter().enumerate() {
        let same_key = |bucket: &usize| keys[members[*bucket][0].0] == keys[index];
        let place = open.iter().position(same_key);
        match place.map(|place| open[place]) {
            Some(bucket) if fits(specs, &members[bucket], spec, bucketing) => {
                members[bucket].push(ParamId(index));
            }
            _ => {
                place.map(|place| open.swap_remove(place));
                open.push(members.len());
                members.push(vec![ParamId(index)]);
            }
        }
    }
    let bucket = |params| bucket_of(specs, params, mesh, align_bytes);
    members.into_iter().map(bucket).collect()
}

fn fits(specs: &[ParamSpec], members: &[ParamId], spec: &ParamSpec, bucketing: Bucketing) -> bool {
    match bucketing {
        Bucketing::Unit => specs[members[0].0].unit == spec.unit,
        Bucketing::Bytes(max) => {
            let numel: Numel = members.iter().map(|param| specs[param.0].numel()).sum();
            (numel + spec.numel()).bytes(spec.dtype) <= max
        }
    }
}

fn bucket_of(
    specs: &[ParamSpec],
    params: Vec<ParamId>,
    mesh: &Mesh,
    align_bytes: Bytes,
) -> BucketSpec {
    let of = |param: &ParamId| &specs[param.0];
    let ParamSpec { dtype, trainable, .. } = *of(&params[0]);
    let mut units: Vec<UnitId> = params.iter().map(|param| of(param).unit).collect();
    units.sort_unstable();
    units.dedup();
    let contributions = params.iter().map(|param| of(param).contributions).max().unwrap_or(0);
    let numels: Vec<Numel> = params.iter().map(|param| of(param).numel()).collect();
    let align = Numel(align_bytes.numel(dtype).0.max(1));
    let sharing = mesh.sharing(of(&params[0]));
    let layout = Layout::new(&numels, mesh.size_over(sharing.reduced), align);
    BucketSpec { params, units, dtype, trainable, sharing, contributions, layout }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Along, Batches, MeshAxis, WorldSize};

    fn spec(numel: usize, unit: usize) -> ParamSpec {
        ParamSpec::new("p", &[numel], DType::F32, UnitId(unit))
    }

    fn assign(specs: &[ParamSpec], bucketing: Bucketing) -> Vec<Vec<usize>> {
        assign_on(&Mesh::data(WorldSize::ONE), specs, bucketing)
    }

    fn assign_on(mesh: &Mesh, specs: &[ParamSpec], bucketing: Bucketing) -> Vec<Vec<usize>> {
        let buckets = assign_buckets(specs, mesh, bucketing, Bytes(4));
        buckets.iter().map(|bucket| bucket.params.iter().map(|p| p.0).collect()).collect()
    }

    #[test]
    fn units_are_buckets() {
        let specs = [spec(3, 0), spec(4, 0), spec(5, 1)];
        assert_eq!(assign(&specs, Bucketing::Unit), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn bytes_fill_buckets_across_units() {
        let specs: Vec<_> = (0..10).map(|unit| spec(10, unit)).collect();
        let buckets = assign(&specs, Bucketing::Bytes(Bytes(50 * 4)));
        assert_eq!(buckets, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]);
    }

    #[test]
    fn a_large_parameter_is_a_bucket_of_its_own() {
        let specs = [spec(2, 0), spec(100, 0), spec(2, 0)];
        assert_eq!(assign(&specs, Bucketing::Bytes(Bytes(16))), [[0], [1], [2]]);
    }

    #[test]
    fn dtypes_and_frozen_parameters_keep_apart() {
        let mut specs = vec![spec(2, 0); 5];
        specs[1].dtype = DType::Bf16;
        specs[3].trainable = false;
        assert_eq!(assign(&specs, Bucketing::Unit), [vec![0, 2, 4], vec![1], vec![3]]);
    }

    #[test]
    fn process_groups_keep_apart_and_shard_over_their_own_ranks() {
        let size = |size| WorldSize::new(size).unwrap();
        let axes = vec![
            MeshAxis::new("data", size(3), Batches::Different),
            MeshAxis::new("tensor", size(2), Batches::Same),
        ];
        let mesh = Mesh::new(axes).unwrap();
        let mut specs = vec![spec(6, 0); 5];
        specs[1].along = vec![Along::Reduced, Along::Split { dim: 0 }];
        specs[3].along = vec![Along::Distinct, Along::Replicated];
        specs[4].along = vec![Along::Reduced, Along::Reduced];
        let unit = Bucketing::Unit;
        assert_eq!(assign_on(&mesh, &specs, unit), [vec![0, 2], vec![1], vec![3], vec![4]]);
        let buckets = assign_buckets(&specs, &mesh, unit, Bytes(4));
        assert_eq!(
            buckets.iter().map(|b| b.layout.world_size().get()).collect::<Vec<_>>(),
            [3, 3, 1, 6]
        );
    }

    #[test]
    fn every_parameter_is_in_one_bucket() {
        for max in [1, 8, 40, 1000] {
            let specs: Vec<_> = [3, 0, 5, 2, 17, 1].map(|numel| spec(numel, numel % 2)).into();
            for bucketing in [Bucketing::Unit, Bucketing::Bytes(Bytes(max))] {
                let mut seen: Vec<_> = assign(&specs, bucketing).concat();
                seen.sort_unstable();
                assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
            }
        }
    }
}
