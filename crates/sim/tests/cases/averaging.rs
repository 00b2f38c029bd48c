//! What a window adds up to, and is divided by.

use super::*;
use oxizero::Boundary;
use oxizero_sim::oracle::{MicroBatch, Pass};

#[test]
fn every_micro_batch_of_every_rank_counts() {
    let backward: Backward = |at, _| vec![vec![[[1.0, 3.0], [5.0, 7.0]][at.rank][at.micro]]];
    let mut trial = Trial { ranks: 2, ..one_weight(Precision::of_model(BF16), backward) };
    trial.options.accumulation = 2;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[4.0]]));
}

#[test]
fn a_constant_gradient_stays_constant() {
    let trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0]]);
    everywhere(&Trial { ranks: 2, steps: 5, ..trial }, |trained| {
        assert_eq!(trained.grads, vec![[[1.0]]; 5]);
    });
}

/// Two backward passes and one step, where the configuration knows of one.
#[test]
fn every_backward_before_the_step_counts() {
    let one_micro_batch =
        |_: &Trial, _, _| vec![MicroBatch { passes: vec![Pass::Reduced; 2], weight: 1.0 }];
    let backward: Backward = |at, _| vec![vec![[1.0, 2.0][at.pass]]];
    let trial = summed(&one_weight(Precision::of_model(F32), backward), 1);
    everywhere(&Trial { windows: one_micro_batch, ..trial }, |trained| {
        assert_eq!((&trained.grads[0], &trained.weights), (&vec![vec![3.0]], &vec![vec![-3.0]]));
    });
    let backward: Backward = |at, _| vec![vec![[1.0, 2.0][at.micro]]];
    let trial = summed(&one_weight(Precision::of_model(F32), backward), 1);
    each_stage(&trial, |trial| {
        for (grad, outcome) in world::run(1, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.pass(&mut engine, at(0)).unwrap();
            engine.set_boundary(Boundary::Later);
            let outcome = engine.step().unwrap();
            assert_eq!(outcome, StepOutcome::Accumulated { n: 1, of: 1 });
            trial.pass(&mut engine, at(1)).unwrap();
            engine.set_boundary(Boundary::Now);
            (full_grad(&mut engine, 0), engine.step().unwrap())
        }) {
            assert_eq!(grad, [3.0]);
            assert_eq!(outcome, StepOutcome::Applied { norm_before: 3.0, norm_after: 3.0 });
        }
    });
}

/// Five tokens whose gradients are 1, on one rank, and one token with 10 on the other.
#[test]
fn tokens_weigh_the_same_wherever_they_are() {
    let windows = |_: &Trial, _, rank: usize| {
        vec![MicroBatch { passes: vec![Pass::Reduced], weight: [5.0, 1.0][rank] }]
    };
    let backward: Backward = |at, _| vec![vec![[5.0 * 1.0, 1.0 * 10.0][at.rank]]];
    let mut trial = Trial { windows, ranks: 2, ..one_weight(Precision::of_model(BF16), backward) };
    trial.options.reduction = Reduction::Weighted;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[2.5]]));
}

#[test]
fn sums_are_not_divided() {
    let backward: Backward = |at, _| vec![vec![[1.0, 3.0][at.rank]]];
    let trial = summed(&one_weight(Precision::of_model(BF16), backward), 1);
    everywhere(&Trial { ranks: 2, ..trial }, |trained| assert_eq!(trained.grads[0], [[4.0]]));
}

#[test]
fn a_window_that_ends_early_is_divided_by_what_it_holds() {
    let windows =
        |_: &Trial, _, _| vec![MicroBatch { passes: vec![Pass::Reduced], weight: 1.0 }; 2];
    let backward: Backward = |at, _| vec![vec![[2.0, 4.0][at.micro]]];
    let mut trial = Trial { windows, ..one_weight(Precision::of_model(BF16), backward) };
    trial.options.accumulation = 4;
    everywhere(&trial, |trained| {
        assert_eq!((trained.outcomes[0], &trained.weights[0]), (Some(3.0), &vec![-3.0]));
    });
}

#[test]
fn a_parameter_that_one_micro_batch_uses_is_divided_as_the_others() {
    let backward: Backward = |at, _| match (at.param, at.micro) {
        (0, 0) => vec![vec![4.0]],
        (0, _) => vec![],
        (_, micro) => vec![vec![[1.0, 3.0][micro]]],
    };
    let mut trial = two_units(BF16, backward);
    trial.options.accumulation = 2;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[2.0], [2.0]]));
    everywhere(&Trial { ranks: 3, ..trial }, |trained| {
        assert_eq!(trained.grads[0], [[2.0], [2.0]]);
    });
}
