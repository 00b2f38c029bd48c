//! Initial weights.

use oxizero_core::Random;
use oxizero_core::config::ModelConfig;

const STD: f32 = 0.02;

/// Fills `values` with the initial weights of the parameter `name`, which depend on `seed`, the
/// name and the configuration alone, and not on who asks or in which order.
///
/// Matrices are normal with standard deviation 0.02; the projections that add to the residual
/// stream are divided by `sqrt(2 * layers)` (Radford et al., 2019, section 2.3); norms are ones,
/// biases zeros.
pub fn init_param(config: &ModelConfig, name: &str, seed: u64, values: &mut [f32]) {
    if name.ends_with(".bias") {
        return values.fill(0.0);
    }
    if [".ln_1.weight", ".ln_2.weight", ".ln_f.weight"].iter().any(|norm| name.ends_with(norm)) {
        return values.fill(1.0);
    }
    let residual = name.ends_with("c_proj.weight");
    let std = if residual { STD / ((2 * config.layers) as f32).sqrt() } else { STD };
    let path: Vec<u64> = name.bytes().map(u64::from).collect();
    let mut random = Random::for_path(seed, &path);
    values.fill_with(|| std * random.normal());
}
