//! Benches run small: what they compute, the form in which they tell, and memory within what is no
//! matter of size; but no time.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use common::Place;
use serde_json::Value;

/// A small bench of gradients; the ranks check what they read.
fn gradients(place: &Place, flags: &str) -> Vec<Value> {
    place.events(&format!("bench gradients --params 300001 --rounds 2 --json {flags}"))
}

/// By name of what was timed: the hash of what was computed.
fn hashes(rows: &[Value], tensors: usize) -> Vec<&str> {
    let of_size = |row: &&Value| row["name"].as_str().unwrap().ends_with(&format!("/{tensors}"));
    rows.iter().filter(of_size).map(|row| row["hash"].as_str().unwrap()).collect()
}

#[test]
fn gradients_are_told_in_the_form_of_every_bench() {
    let place = Place::new();
    let rows = gradients(&place, "");
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let of = |tensors: usize| {
        ["full_grads/first", "full_grads/copy", "full_grads/fresh", "full_grad/loop"]
            .into_iter()
            .chain(["grad_views/open", "grad_views/read"])
            .map(move |what| format!("{what}/{tensors}"))
    };
    for name in of(150).chain(of(1500)).chain(["memcpy".into(), "read".into()]) {
        assert_eq!(names.iter().filter(|other| **other == name).count(), 1, "{name}: {names:?}");
    }
    for row in &rows {
        assert_eq!((&row["ranks"], &row["unit"]), (&Value::from(2), &Value::from("s")), "{row}");
        let reference = rows.iter().find(|other| other["name"] == row["reference"]).unwrap();
        let [time, base, ratio] = [&row["median"], &reference["median"], &row["ratio"]]
            .map(|number| number.as_f64().unwrap());
        assert!(time > 0.0 && (ratio - time / base).abs() <= 1e-9 * ratio, "{row}");
    }
    let copies = rows.iter().filter(|row| row["name"].as_str().unwrap().contains("grads/copy"));
    assert!(copies.into_iter().all(|row| row["reference"] == "memcpy"));
}

#[test]
fn what_is_read_depends_on_no_stage_and_no_dtype() {
    let place = Place::new();
    let expected = gradients(&place, "--stage 0 --ranks 3");
    for flags in ["--stage 1 --ranks 3", "--stage 3 --ranks 3", "--ranks 3 --dtype bf16"] {
        let got = gradients(&place, flags);
        for tensors in [150, 1500] {
            let hashes = [hashes(&expected, tensors), hashes(&got, tensors)].concat();
            assert_eq!(hashes.len(), 12);
            assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{flags}: {hashes:?}");
        }
    }
}

#[test]
fn the_table_names_everything_and_bad_flags_are_refused() {
    let place = Place::new();
    let output = place.run("bench gradients --params 300001 --rounds 1 --ranks 1");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && table.starts_with("gradients: 300001 parameters, f32"));
    assert_eq!(table.lines().count(), 18, "{table}");
    let said = String::from_utf8(output.stderr).unwrap();
    let begins = "running: gradients: 300001 parameters, f32; ZeRO stage 2; 1 rank, 1 round; takes";
    assert!(said.starts_with(begins) && said.lines().count() == 1, "{said}");
    for flags in ["--params 9", "--rounds 0", "--dtype f16", "--stage 4", "--ranks 0"] {
        let output = place.run(&format!("bench gradients {flags}"));
        assert_eq!(output.status.code(), Some(2), "{flags}");
    }
}

/// More than an allocator leaves between blocks of so small a model and takes for itself; that is
/// little beside a model of the size which the bound is for.
const LEFT_BETWEEN: f64 = (16 << 20) as f64;

#[test]
fn memory_stays_below_its_bound_but_for_what_the_allocator_leaves_between() {
    let place = Place::new();
    for stage in 0..4 {
        let words = format!("bench memory --params 8000001 --rounds 2 --json --stage {stage}");
        let output = place.run(&words);
        let lines = String::from_utf8(output.stdout).unwrap();
        let rows: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows.len(), 8, "{lines}");
        for (wire, rows) in ["bf16", "f32"].into_iter().zip(rows.chunks(4)) {
            let name = format!("memory/stage{stage}/{wire}-wire");
            for (row, end) in rows.iter().zip(["", "/accounted", "/planned", "/bound"]) {
                assert_eq!(row["name"], format!("{name}{end}"));
                assert_eq!((&row["ranks"], &row["unit"]), (&2.into(), &"bytes".into()), "{row}");
                assert_eq!(row["reference"], "bound", "{row}");
            }
            let [most, accounted, planned, bound] =
                [0, 1, 2, 3].map(|index| rows[index]["median"].as_f64().unwrap());
            assert!(accounted == planned && planned <= bound, "{lines}");
            assert!(most > 0.9 * accounted && most <= bound + LEFT_BETWEEN, "{lines}");
            let ratio = rows[0]["ratio"].as_f64().unwrap();
            assert!((ratio - most / bound).abs() <= 1e-9 * ratio, "{lines}");
        }
        // So small a model is not judged.
        assert_eq!(output.status.code(), Some(0), "{lines}");
    }
}

#[test]
fn what_no_machine_can_do_is_refused_before_a_rank_is_started() {
    let place = Place::new();
    for (words, expected) in [
        ("gradients --params 70368744177664", "`params = 70368744177664`"),
        ("memory --params 70368744177664", "`params = 70368744177664`"),
        ("optimizer --params 70368744177664", "`params = 70368744177664`"),
        ("collectives --sizes 4KiB,1024GiB", "`sizes = 1024GiB`"),
        ("collectives --ranks 65", "`run.ranks = 65`"),
        ("memory --launch threads", "`launch = threads`"),
    ] {
        let output = place.run(&format!("bench {words} --rounds 1"));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}: {error}");
        assert!(error.contains(expected) && error.lines().count() == 1, "{words}: {error}");
        assert!(!expected.contains("00") || error.contains(" are available"), "{error}");
    }
    for words in [
        "gradients --params 18446744073709551615",
        "optimizer --params 99999999999999999999",
        "optimizer --rule lion",
        "collectives --sizes 1TiB",
        "collectives --sizes 4KiB,",
        "collectives --rounds 1000000",
        "collectives --launch fork",
    ] {
        let output = place.run(&format!("bench {words}"));
        assert_eq!(output.status.code(), Some(2), "{words}");
    }
}
