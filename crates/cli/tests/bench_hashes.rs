//! What benches compute, worked out once more by plain loops: the hashes that they tell are those.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use common::Place;
use oxizero_core::DType;
use oxizero_sim::round;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The hash of every row that has one, by name, in the order of names.
fn hashes(rows: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let pair = |row: &Value| Some((text(&row["name"]), text(row.get("hash")?)));
    let mut pairs: Vec<_> = rows.iter().filter_map(pair).collect();
    pairs.sort();
    pairs
}

/// Expected names and hashes, in the order of names.
fn expected(mut pairs: Vec<(String, Vec<u8>)>) -> Vec<(String, String)> {
    pairs.sort();
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    pairs.into_iter().map(|(name, hash)| (name, hex(hash))).collect()
}

fn sha(bytes: &[u8]) -> Vec<u8> {
    Sha256::digest(bytes).to_vec()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Of the hashes of as many equal parts as there are ranks.
fn of_parts(values: &[f32], ranks: usize) -> Vec<u8> {
    let parts = values.chunks(values.len() / ranks);
    sha(&parts.flat_map(|part| sha(&bytes(part))).collect::<Vec<u8>>())
}

/// Rank `r` gives `i % 61 + r` as element `i`.
fn collectives(ranks: usize, numel: usize) -> Vec<(String, Vec<u8>)> {
    let given = |index: usize, rank: usize| (index % 61 + rank) as f32;
    let sum = |index| (0..ranks).map(|rank| given(index, rank)).sum();
    let sums: Vec<f32> = (0..2 * numel).map(sum).collect();
    let doubled: Vec<f32> = sums.iter().map(|sum| 2.0 * sum).collect();
    let gathered: Vec<_> = (0..numel).map(|index| given(index, index / (numel / ranks))).collect();
    let told: Vec<u8> = (0..ranks).flat_map(|rank| [rank as u8; 16]).collect();
    vec![
        ("reduce_scatter/f32/24KiB".into(), of_parts(&sums[..numel], ranks)),
        ("reduce_scatter/f32/24KiB/stream_add".into(), of_parts(&sums[..numel], ranks)),
        ("reduce_scatter/bf16/24KiB".into(), of_parts(&sums, ranks)),
        ("reduce_scatter_add/bf16/24KiB".into(), of_parts(&doubled, ranks)),
        ("all_reduce/f32/24KiB".into(), sha(&bytes(&sums[..numel]))),
        ("all_gather/f32/24KiB".into(), sha(&bytes(&gathered))),
        ("all_gather/replica/24KiB".into(), sha(&bytes(&gathered))),
        ("exchange/16B".into(), sha(&told)),
    ]
}

#[test]
fn collectives_give_the_sums_and_parts_of_plain_loops() {
    let place = Place::new();
    let bench = |flags: &str| {
        let words = format!("bench collectives --sizes 24KiB --rounds 2 --json {flags}");
        hashes(&place.events(&words))
    };
    // 24 KiB are 6,144 elements.
    for ranks in [2, 3] {
        let by_hand = expected(collectives(ranks, 6144));
        assert_eq!(bench(&format!("--ranks {ranks}")), by_hand);
        // Threads share no replica.
        let mut copied = by_hand;
        copied.retain(|(name, _)| !name.starts_with("all_gather/replica"));
        assert_eq!(bench(&format!("--ranks {ranks} --launch threads")), copied);
    }
}

/// One element: gradient, master, first and second state.
type Element = (f32, f32, [f32; 2]);

/// Update number `step` with learning rate 0.001 and weight decay 0.1: the new master and states.
fn updated(rule: &str, step: i32, (grad, weight, [first, second]): Element) -> (f32, Vec<f32>) {
    let (lr, decay) = (1e-3_f64, 0.1_f64);
    let adam = |weight: f32, grad: f32| {
        let first = first + (1.0 - 0.9_f64) as f32 * (grad - first);
        let second = second * 0.999_f64 as f32 + (1.0 - 0.999_f64) as f32 * grad * grad;
        let root = second.sqrt() / (1.0 - 0.999_f64.powi(step)).sqrt() as f32 + 1e-8_f64 as f32;
        let change = (lr / (1.0 - 0.9_f64.powi(step))) as f32 * first / root;
        (weight - change, vec![first, second])
    };
    match rule {
        "adamw" => adam(weight * (1.0 - lr * decay) as f32, grad),
        "adam" => adam(weight, grad + decay as f32 * weight),
        _ => {
            let momentum = 0.9_f64 as f32 * first + (grad + decay as f32 * weight);
            (weight - lr as f32 * momentum, vec![momentum])
        }
    }
}

/// Of the 1,021 elements after which they repeat: masters, states, and bf16 weights.
fn update_hash(rule: &str) -> Vec<u8> {
    let element = |index: usize| {
        let state = |number: usize| (index % 5 + number + 1) as f32 / 1024.0;
        let grad = (index % 127) as f32 / 64.0 - 1.0;
        (grad / 3.0 * 0.75, 1.0 + index as f32 / 1024.0, [state(0), state(1)])
    };
    let updated: Vec<_> = (0..1021).map(|index| updated(rule, 3, element(index))).collect();
    let masters: Vec<f32> = updated.iter().map(|(master, _)| *master).collect();
    let mut all = bytes(&masters);
    for number in 0..updated[0].1.len() {
        let states: Vec<f32> = updated.iter().map(|(_, states)| states[number]).collect();
        all.extend(bytes(&states));
    }
    for master in masters {
        let narrow = (round(master, DType::Bf16).to_bits() >> 16) as u16;
        all.extend(narrow.to_le_bytes());
    }
    sha(&all)
}

#[test]
fn updates_give_the_weights_of_the_formulas() {
    let place = Place::new();
    let rows = place.events("bench optimizer --params 262145 --rounds 2 --json");
    let mut by_hand = Vec::new();
    for rule in ["adamw", "adam", "sgd"] {
        for grads in ["f32", "bf16"] {
            by_hand.push((format!("{rule}/{grads}/262145"), update_hash(rule)));
        }
    }
    assert_eq!(hashes(&rows), expected(by_hand));
    assert!(rows.iter().all(|row| row["ranks"] == 1 && row["unit"] == "ns/param"), "{rows:?}");
    assert_compared(&rows);
    let alone = "bench optimizer --params 262144 --rounds 1 --rule sgd --grads bf16 --json";
    let names: Vec<_> = place.events(alone).iter().map(|row| row["name"].clone()).collect();
    assert_eq!(names, ["copies/20B", "sgd/bf16/262144"]);
}

/// Of the 61 elements after which masters repeat, after so many steps of AdamW: element `i` starts
/// as `1 + i / 64`, and rank `r` gives it the gradient `i + r`.
fn trained(steps: i32, ranks: usize) -> Vec<u8> {
    let master = |index: usize| {
        let sum: usize = (0..ranks).map(|rank| index + rank).sum();
        let grad = sum as f32 / ranks as f32;
        let start = (1.0 + index as f32 / 64.0, vec![0.0, 0.0]);
        let step = |(weight, states): (f32, Vec<f32>), step| {
            updated("adamw", step, (grad, weight, [states[0], states[1]]))
        };
        (1..=steps).fold(start, step).0
    };
    sha(&bytes(&(0..61).map(master).collect::<Vec<_>>()))
}

#[test]
fn steps_give_the_weights_of_the_formula_in_every_stage() {
    let place = Place::new();
    for (flags, dtype, ranks, stages) in [
        ("step --params 262145", "bf16", 2, vec![1, 2, 3]),
        ("step --params 262145 --dtype f32 --own-weights --ranks 3 --stage 1", "f32", 3, vec![1]),
        ("step --params 262145 --launch threads --stage 0", "bf16", 2, vec![0]),
        ("overhead --params 250", "f32", 2, vec![1, 2, 3]),
        ("overhead --params 250 --numel 100 --stage 0 --ranks 1", "f32", 1, vec![0]),
    ] {
        let rows = place.events(&format!("bench {flags} --rounds 3 --json"));
        let bench = flags.split(' ').next().unwrap();
        let mut by_hand = Vec::new();
        for stage in stages {
            let name = format!("{bench}/stage{stage}/{dtype}");
            by_hand.push((name.clone(), trained(3, ranks)));
            for half in ["", "/micro_batch", "/boundary"] {
                let name = format!("{name}{half}");
                assert!(rows.iter().any(|row| row["name"] == name.as_str()), "{name}: {rows:?}");
            }
        }
        assert_eq!(hashes(&rows), expected(by_hand), "{flags}");
        assert_compared(&rows);
    }
}

#[test]
fn what_is_loaded_are_the_weights_that_were_saved() {
    let place = Place::new();
    for (flags, ranks) in [("--ranks 2", 2), ("--ranks 3 --stage 3 --launch threads", 3)] {
        let rows =
            place.events(&format!("bench checkpoint --params 262145 --rounds 2 --json {flags}"));
        assert_eq!(hashes(&rows), expected(vec![("load".into(), trained(2, ranks))]), "{flags}");
        let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
        let wanted = ["write", "save", "memcpy", "pause", "background", "read", "load"];
        assert_eq!(names, wanted);
        assert_compared(&rows);
        let left = std::fs::read_dir(place.path()).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().contains("bench")), "{left:?}");
    }
    let output = place.run("bench checkpoint --params 262145 --folder none");
    assert_eq!(output.status.code(), Some(2));
}

/// Every row is compared with another of the same run.
fn assert_compared(rows: &[Value]) {
    for row in rows {
        let of = rows.iter().find(|other| other["name"] == row["reference"]);
        let of = of.unwrap_or_else(|| panic!("{row} is compared with nothing"));
        let [time, base, ratio] = [&row["median"], &of["median"], &row["ratio"]];
        let [time, base, ratio] = [time, base, ratio].map(|number| number.as_f64().unwrap());
        assert!(time > 0.0 && (ratio - time / base).abs() <= 1e-9 * ratio, "{row}");
    }
}
