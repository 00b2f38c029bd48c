//! Norms, clipping, and steps that are skipped.

use super::*;

#[test]
fn shards_of_three_and_four_are_clipped_as_one_vector() {
    let mut trial = Trial::new(options(Precision::of_model(F32)), &[("w", &[0.0; 2])], |_, _| {
        vec![vec![3.0, 4.0]]
    });
    trial.options.clip_norm = Some(1.0);
    everywhere(&Trial { ranks: 2, ..trial }, |trained| {
        assert_eq!(trained.outcomes, [Some(5.0)]);
        assert_eq!(trained.weights, [[-0.6, -0.8]]);
    });
}

#[test]
fn the_infinity_norm_is_the_largest_magnitude() {
    let backward: Backward = |at, _| vec![vec![[3.0, -4.0][at.param]]];
    let mut trial = Trial { ranks: 2, ..two_units(F32, backward) };
    trial.options.norm = Norm::Infinity;
    trial.options.clip_norm = Some(2.0);
    everywhere(&trial, |trained| {
        assert_eq!(trained.outcomes, [Some(4.0)]);
        assert_eq!(trained.weights, [[-1.5], [2.0]]);
    });
}

#[test]
fn an_infinite_gradient_skips_the_step_everywhere_and_names_its_place() {
    let backward: Backward = |at, _| match (at.step, at.rank, at.param) {
        (0, 1, 1) => vec![vec![f32::INFINITY, 1.0]],
        _ => vec![vec![1.0; 2]],
    };
    let params: [(&str, &[f32]); 2] = [("fine", &[1.0, 2.0]), ("bad", &[3.0, 4.0])];
    let mut trial = Trial::new(options(Precision::of_model(BF16)), &params, backward);
    trial.options.clip_norm = Some(1.0);
    each_stage(&Trial { ranks: 2, ..trial }, |trial| {
        for (skipped, after_skip, next) in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            let (skipped, _) = trial.window(&mut engine, 0).unwrap();
            let weights = trial.weights(&mut engine).unwrap();
            (skipped, weights, trial.window(&mut engine, 1).unwrap().0)
        }) {
            let parameter = "bad".to_owned();
            let reason = SkipReason::NonFinite;
            assert_eq!(skipped, StepOutcome::Skipped { reason, parameter, rank: Rank(1) });
            assert_eq!(after_skip, trial.initial);
            let StepOutcome::Applied { norm_before, norm_after, .. } = next else {
                panic!("the step after a skipped one is {next:?}");
            };
            assert_eq!((norm_before, norm_after), (2.0, 1.0));
        }
    });
}
