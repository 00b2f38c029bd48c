//! Trials that nobody thought of: everything is drawn from a seed, which is printed.

use super::*;
use oxizero_sim::drawn;

#[test]
fn whatever_is_drawn_trains_as_the_oracle() {
    for seed in 0..800 {
        println!("seed {seed}"); // the last one that is printed is the one that failed
        let trial = drawn::any(seed);
        assert_trains_to(&trial, &trial.oracle());
    }
}
