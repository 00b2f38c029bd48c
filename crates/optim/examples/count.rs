//! One kernel, run a fixed number of times on made-up elements: for counting its instructions.
//!
//! `OXIZERO_SIMD=avx2 valgrind --tool=callgrind TARGET/release/examples/count KERNEL [ROUNDS]`,
//! where the kernel is `nothing`, `sum`, `accumulate`, `cast`, `squares`, `divide` or `adamw`.
//! Counts for different rounds differ by the kernel's own instructions alone.

use std::hint::black_box;

use oxizero_core::{DType, Numel};
use oxizero_device::kernels::{self, Combine};
use oxizero_device::{Buffer, View, ViewMut};
use oxizero_optim::{AdamW, Gradient, Hyper, MomentOptions, Optimizer, Weights};

/// Of each operand: enough that what a call does besides its loop is little.
const NUMEL: Numel = Numel(1 << 16);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let kernel = arguments.next().ok_or("which kernel?")?;
    let rounds = arguments.next().map_or(Ok(4), |rounds| rounds.parse::<u64>())?;
    let (mut wide, mut narrow) = (filled(DType::F32), filled(DType::Bf16));
    let mut owned: Vec<Buffer> = (0..3).map(|_| filled(DType::F32)).collect();
    let rule = AdamW::new(MomentOptions::default())?;
    for step in 1..=rounds {
        match kernel.as_str() {
            "nothing" => {}
            "sum" => kernels::tree_sum(&[narrow.view(); 2], wide.view_mut(), Combine::Assign),
            "accumulate" => {
                kernels::accumulate(narrow.view(), wide.view_mut(), Combine::Add);
            }
            "cast" => kernels::cast(wide.view(), narrow.view_mut()),
            "squares" => {
                black_box(kernels::divided_squares(narrow.view(), 3.0));
            }
            "divide" => kernels::divide(narrow.view_mut(), 3.0),
            "adamw" => {
                let grad = Gradient { values: wide.view(), divisor: 3.0, factor: 0.5 };
                let mut owned = owned.iter_mut().map(Buffer::view_mut);
                let master = owned.next().ok_or("no master weights")?;
                let mut states: Vec<ViewMut<'_>> = owned.collect();
                let hyper = Hyper { lr: 1e-3, weight_decay: 0.1 };
                let model = Some(narrow.view_mut());
                rule.update(hyper, step, grad, Weights { master, states: &mut states, model });
            }
            other => return Err(format!("no kernel `{other}`").into()),
        }
    }
    black_box((wide, narrow, owned));
    Ok(())
}

/// Elements between 0 and 1.
fn filled(dtype: DType) -> Buffer {
    let values: Vec<f32> = (0..NUMEL.0).map(|index| (index % 1021) as f32 / 1024.0).collect();
    let mut buffer = Buffer::heap(NUMEL, dtype);
    kernels::cast(View::F32(&values), buffer.view_mut());
    buffer
}
