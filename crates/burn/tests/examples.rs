//! The examples run, and what they train learns.

#![allow(dead_code, clippy::unwrap_used, reason = "an example's run is called from here")]

#[path = "../examples/own_module.rs"]
mod own_module;
#[path = "../examples/whole_module.rs"]
mod whole_module;

#[test]
fn a_module_of_ones_own_learns_in_stage_3() {
    own_module::run().unwrap();
}

#[test]
fn a_module_that_is_no_chain_learns_in_stage_2() {
    whole_module::run().unwrap();
}
