//! Kernels and updates against copies of the same bytes, one thread.
//!
//! `cargo run --release -p oxizero-optim --example speed [-- WORD [MEGA_ELEMENTS]]` measures what
//! has `WORD` in its name. Each is timed in turn with a copy that reads and writes as many bytes
//! together; shown are the medians, and their ratio. `OXIZERO_SIMD` chooses the instructions.

use std::hint::black_box;
use std::time::Instant;

use oxizero_core::{DType, Numel};
use oxizero_device::kernels::{self, Combine, Power};
use oxizero_device::simd::Level;
use oxizero_device::{Buffer, View, ViewMut};
use oxizero_optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Gradient, Hyper, Lion, LionOptions, MomentOptions,
    Momentum, OptimError, Optimizer, Sgd, Weights,
};

const ROUNDS: usize = 7;

fn main() -> Result<(), OptimError> {
    let mut arguments = std::env::args().skip(1);
    let word = arguments.next().unwrap_or_default();
    let mega = arguments.next().and_then(|mega| mega.parse().ok()).unwrap_or(128);
    let bench = Bench { word, numel: Numel(mega << 20) };
    println!("{} elements, {}", bench.numel, Level::current().name());
    sums(&bench);
    casts(&bench);
    norms(&bench);
    let rules: [(&str, &dyn Optimizer); 6] = [
        ("adamw", &AdamW::new(MomentOptions::default())?),
        ("adam", &Adam::new(MomentOptions::default())?),
        ("sgd", &Sgd::new(Momentum::None)?),
        ("momentum", &Sgd::new(Momentum::Classical(0.9))?),
        ("lion", &Lion::new(LionOptions::default())?),
        ("adagrad", &Adagrad::new(AdagradOptions::default())?),
    ];
    for (name, rule) in rules {
        for grad in [DType::F32, DType::Bf16] {
            for divisor in [1.0, 3.0] {
                update(&bench, &format!("{name}/{grad}/by-{divisor}"), rule, (grad, divisor));
            }
        }
    }
    Ok(())
}

struct Bench {
    word: String,
    numel: Numel,
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        name.contains(&self.word)
    }

    /// Times `work`, which moves so many bytes, beside a copy.
    fn run(&self, name: &str, bytes: usize, mut work: impl FnMut()) {
        let source = filled(Numel(bytes / 8), DType::F32);
        let mut target = Buffer::mapped(Numel(bytes / 8), DType::F32);
        let mut copy = || {
            let source = black_box(source.region().bytes());
            black_box(target.region_mut().bytes_mut()).copy_from_slice(source);
        };
        let mut times = [Vec::new(), Vec::new()];
        copy();
        work();
        for _ in 0..ROUNDS {
            times[0].push(seconds(&mut copy));
            times[1].push(seconds(&mut work));
        }
        let [copy, work] = times.map(median);
        let nanoseconds = work * 1e9 / self.numel.0 as f64;
        let ratio = work / copy;
        println!("{name:32} {nanoseconds:6.3} ns an element, {ratio:5.3} of a copy of its bytes");
    }
}

/// How long this thread computes: what others do meanwhile on its CPU does not count.
fn seconds(work: &mut impl FnMut()) -> f64 {
    let (start, wall) = (computed(), Instant::now());
    work();
    let computing = computed().zip(start).map(|(end, start)| end - start);
    computing.unwrap_or_else(|| wall.elapsed().as_secs_f64())
}

/// Seconds that this thread has run, where the system says so.
fn computed() -> Option<f64> {
    std::thread::yield_now(); // the system adds up when it chooses who runs
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: u64 = stat.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds as f64 * 1e-9)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Elements of every size around 1.
fn filled(numel: Numel, dtype: DType) -> Buffer {
    let mut buffer = Buffer::mapped(numel, dtype);
    let block: Vec<f32> = (0..1 << 16).map(|i| ((i * 7919 % 65_521) as f32 - 3e4) * 1e-4).collect();
    for start in (0..numel.0).step_by(block.len()) {
        let end = numel.0.min(start + block.len());
        kernels::cast(View::F32(&block[..end - start]), buffer.range_mut(start..end));
    }
    buffer
}

fn sums(bench: &Bench) {
    for dtype in DType::ALL {
        for to in [DType::F32, dtype] {
            for ranks in [1, 2, 4] {
                for combine in [Combine::Assign, Combine::Add] {
                    let name = format!("sum/{ranks}x{dtype}/{to}/{combine:?}").to_lowercase();
                    if !bench.wants(&name) {
                        continue;
                    }
                    let inputs: Vec<_> = (0..ranks).map(|_| filled(bench.numel, dtype)).collect();
                    let views: Vec<_> = inputs.iter().map(Buffer::view).collect();
                    let mut target = filled(bench.numel, to);
                    let writes = if combine == Combine::Add { 2 } else { 1 };
                    let bytes = dtype.size() * ranks + to.size() * writes;
                    bench.run(&name, bytes * bench.numel.0, || {
                        kernels::tree_sum(&views, target.view_mut(), combine);
                    });
                }
            }
        }
    }
}

fn casts(bench: &Bench) {
    for (from, to) in [
        (DType::F32, DType::Bf16),
        (DType::Bf16, DType::F32),
        (DType::F32, DType::F16),
        (DType::F16, DType::F32),
    ] {
        let name = format!("cast/{from}/{to}");
        if bench.wants(&name) {
            let source = filled(bench.numel, from);
            let mut target = filled(bench.numel, to);
            let bytes = (from.size() + to.size()) * bench.numel.0;
            bench.run(&name, bytes, || kernels::cast(source.view(), target.view_mut()));
        }
    }
    for dtype in DType::ALL {
        let name = format!("accumulate/{dtype}");
        if bench.wants(&name) {
            let source = filled(bench.numel, dtype);
            let mut target = filled(bench.numel, DType::F32);
            let bytes = (dtype.size() + 8) * bench.numel.0;
            bench.run(&name, bytes, || {
                kernels::accumulate(source.view(), target.view_mut(), Combine::Add);
            });
        }
    }
}

fn norms(bench: &Bench) {
    for dtype in DType::ALL {
        for divisor in [1.0, 3.0] {
            let name = format!("squares/{dtype}/by-{divisor}");
            if bench.wants(&name) {
                let grad = filled(bench.numel, dtype);
                bench.run(&name, dtype.size() * bench.numel.0, || {
                    black_box(kernels::divided_powers(grad.view(), divisor, Power::Two));
                });
            }
            let name = format!("divide/{dtype}/by-{divisor}");
            if bench.wants(&name) {
                let mut grad = filled(bench.numel, dtype);
                bench.run(&name, 2 * dtype.size() * bench.numel.0, || {
                    kernels::divide(grad.view_mut(), divisor);
                });
            }
        }
    }
}

/// An update that writes bf16 weights too.
fn update(bench: &Bench, name: &str, rule: &dyn Optimizer, (dtype, divisor): (DType, f32)) {
    if !bench.wants(name) {
        return;
    }
    let numel = bench.numel;
    let grad = filled(numel, dtype);
    let mut master = filled(numel, DType::F32);
    let states = rule.state_names().len();
    let mut states: Vec<_> = (0..states).map(|_| Buffer::mapped(numel, DType::F32)).collect();
    let mut model = Buffer::mapped(numel, DType::Bf16);
    let hyper = Hyper { lr: 1e-3, weight_decay: 0.1 };
    let bytes = dtype.size() + 8 * (1 + states.len()) + model.dtype().size();
    let mut step = 0;
    bench.run(name, bytes * numel.0, || {
        step += 1;
        let gradient = Gradient { values: grad.view(), divisor, factor: 0.9 };
        let mut states: Vec<ViewMut<'_>> = states.iter_mut().map(Buffer::view_mut).collect();
        let (master, model) = (master.view_mut(), Some(model.view_mut()));
        rule.update(hyper, step, gradient, Weights { master, states: &mut states, model });
    });
}
