//! `oxizero experiment`: small, but with everything that it writes.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use common::Place;
use rustix::process::{Pid, Signal, kill_process};

const WORDS: &str = "experiment accumulation --steps 2 --seeds 4,7 --windows 1,64 --data text.txt";

/// What the command says; it must succeed.
fn run(place: &Place, words: &str) -> String {
    let output = place.run(words);
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The values of the rows of accumulation.csv that start so.
fn values(csv: &str, start: &str) -> Vec<f64> {
    let rows = csv.lines().filter(|row| row.starts_with(start));
    let values: Vec<f64> =
        rows.map(|row| row.rsplit(',').next().unwrap().parse().unwrap()).collect();
    assert!(!values.is_empty(), "{start}: {csv}");
    values
}

#[test]
fn accumulation_in_f32_is_far_nearer_and_the_runs_are_those_of_train() {
    let place = Place::new();
    let said = run(&place, &format!("{WORDS} --folder out"));
    let read = |name: &str| fs::read_to_string(place.path().join("out").join(name)).unwrap();
    let (page, chart, csv) =
        (read("accumulation.md"), read("accumulation.svg"), read("accumulation.csv"));
    let error = |weights: &str, of: &str, seed| {
        let start = format!("gradient by micro-batches; {weights} weights,\"{of}\",{seed},64,");
        values(&csv, &start)[0]
    };
    for seed in [4, 7] {
        for weights in ["initial", "trained"] {
            let of = |name| error(weights, name, seed);
            let [wide, narrow, other] = ["f32 sums", "bf16 sums", "another batch"].map(of);
            assert!(0.0 < wide && 5.0 * wide < narrow, "{weights}, {seed}: {wide} {narrow}");
            assert!(narrow < other && other < 2.0, "{weights}, {seed}: {narrow} {other}");
        }
        assert_ne!(error("initial", "f32 sums", seed), error("trained", "f32 sums", seed));
    }
    assert!(chart.starts_with("<svg ") && chart.trim_end().ends_with("</svg>"), "{chart}");
    assert!(page.contains(&format!("-- {WORDS} --folder out\n")), "{page}");
    let (tables, _) = page.split_once("### How").unwrap();
    for row in tables.lines().filter(|line| line.starts_with('|')) {
        assert!(said.contains(row), "{row}: {said}");
    }
    let config = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    place.write("page.toml", config);
    let events = place.events("train page.toml --json --seed 7");
    let evaluations = events.iter().filter(|event| event["event"] == "evaluation");
    let trained: Vec<_> =
        evaluations.map(|event| event["bits_per_byte"].as_f64().unwrap()).collect();
    let measured = values(&csv, "loss by step,\"bf16, f32 sums\",7,");
    assert_eq!(trained.len(), 3);
    let rounded = |bits: &f64| format!("{bits:.6e}");
    assert!(
        trained.iter().map(rounded).eq(measured.iter().map(rounded)),
        "{trained:?} {measured:?}"
    );
}

#[test]
fn a_page_keeps_its_words_and_a_folder_is_made_where_none_is_named() {
    let place = Place::new();
    let words = WORDS.replace("4,7", "4").replace("1,64", "1");
    run(&place, &words);
    let page = place.path().join("runs/0001/accumulation.md");
    let text = fs::read_to_string(&page).unwrap();
    fs::write(&page, text.replace("\n\n", "\n\nWords of mine.\n\n")).unwrap();
    run(&place, &format!("{words} --folder runs/0001"));
    let text = fs::read_to_string(&page).unwrap();
    assert_eq!(text.matches("Words of mine.").count(), 1, "{text}");
    assert!(text.contains("--folder runs/0001"), "{text}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_trained() {
    let place = Place::new();
    place.write("accumulation.md", "A page of mine.\n");
    for flags in ["--folder .", "--steps 0", "--seeds x", "--windows 0", "--data nothing"] {
        let output = place.run(&format!("experiment accumulation --data text.txt {flags}"));
        assert_eq!(output.status.code(), Some(2), "{flags}");
        assert!(!place.path().join("runs").exists(), "{flags}: a run folder was made");
    }
    let page = fs::read_to_string(place.path().join("accumulation.md")).unwrap();
    assert_eq!(page, "A page of mine.\n");
}

#[test]
fn an_interrupted_experiment_says_so_and_leaves_nothing() {
    let place = Place::new();
    let mut command = place.command("experiment accumulation --data text.txt --windows 1");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Kept until the end, for a command that nobody reads ends by itself.
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    said.find(|line| line.starts_with("seed 0, f32 ")).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(output.stderr, b"interrupted; no results were written\n");
    assert!(!place.path().join("runs").exists());
}
