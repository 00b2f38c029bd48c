//! `oxizero parity`: the engine equals the oracle, and no planted fault is missed.

mod common;

use common::Place;

/// What the command shows; it must succeed.
fn shown(words: &str) -> String {
    let output = Place::new().run(words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}: {said}");
    String::from_utf8(output.stdout).expect("the table is UTF-8")
}

#[test]
fn every_stage_and_precision_differs_by_nothing() {
    let shown = shown("parity --quick --ranks 3,2 --seed 5 --trials 17");
    assert!(shown.starts_with("the engine beside the oracle: ranks 3 2, seed 5\n"), "{shown}");
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let table: Vec<_> = shown.lines().skip(2).map(cells).take_while(|row| row.len() > 1).collect();
    let columns = [
        "stage",
        "groups",
        "weights",
        "wire",
        "sums",
        "trials",
        "gradients",
        "norms",
        "weights",
        "states",
    ];
    assert_eq!(table[0], columns);
    // Of each stage eight precisions, and three arrangements of as many ranks.
    assert_eq!(table.len(), 1 + 4 * (8 + 3), "{shown}");
    for groups in ["1 data x 2 tensor", "2 expert", "3 expert"] {
        assert_eq!(shown.lines().filter(|line| line.contains(&format!("  {groups}  "))).count(), 4);
    }
    for row in &table[1..] {
        let [.., trials, grads, norms, weights, states] = &row[..] else { panic!("{row:?}") };
        assert_eq!([trials, grads, weights, states], ["17", "0", "0", "0"]);
        assert!(norms.parse::<f64>().expect("a number") <= 1e-12, "{row:?}");
    }
}

#[test]
fn the_self_test_catches_every_fault() {
    let shown = shown("parity --self-test");
    for harmless in ["no fault", "padding that is not a number"] {
        let line = shown.lines().find(|line| line.starts_with(harmless)).expect(harmless);
        let cells: Vec<_> = line[harmless.len()..].split_whitespace().collect();
        assert_eq!(cells, ["0", "-"], "{shown}");
    }
    assert!(shown.trim_end().ends_with("all 22 faults are caught"), "{shown}");
}

#[test]
fn worlds_that_cannot_be_are_refused() {
    for flags in ["--ranks 0", "--ranks 65", "--ranks 2,x", "--quick --full", "--seed -1"] {
        let output = Place::new().run(&format!("parity {flags}"));
        assert_eq!(output.status.code(), Some(2), "{flags}");
    }
}
