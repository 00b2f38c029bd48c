//! What is kept on the way of a gradient.

use super::*;

#[test]
fn two_bf16_gradients_average_in_f32_whatever_travels() {
    for reduce in [F32, BF16] {
        let precision = Precision { reduce, ..Precision::of_model(BF16) };
        let backward: Backward = |at, _| vec![vec![[1.0, 1.007_812_5][at.rank]]];
        let trial = Trial { ranks: 2, ..one_weight(precision, backward) };
        everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[1.003_906_25]]));
        for dtype in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            engine.full_grad(ParamId(0)).unwrap().unwrap().dtype()
        }) {
            assert_eq!(dtype, F32);
        }
    }
}

#[test]
fn small_micro_batches_after_a_large_one_are_not_lost() {
    let backward: Backward = |at, _| vec![vec![if at.micro == 0 { 1.0 } else { 1.0 / 512.0 }]];
    let trial = one_weight(Precision::of_model(BF16), backward);
    everywhere(&summed(&trial, 257), |trained| assert_eq!(trained.grads[0], [[1.5]]));
}

#[test]
fn what_cancels_leaves_the_rest() {
    let backward: Backward = |at, _| vec![vec![[256.0, 1.0, -256.0][at.micro]]];
    let trial = one_weight(Precision::of_model(BF16), backward);
    everywhere(&summed(&trial, 3), |trained| assert_eq!(trained.grads[0], [[1.0]]));
}

#[test]
fn the_accumulator_has_the_dtype_that_was_asked_for() {
    let backward: Backward = |at, _| vec![vec![[256.0, 1.0][at.micro]]];
    for (model, accumulate, sum) in [(BF16, BF16, 256.0), (F16, F16, 257.0), (BF16, F32, 257.0)] {
        let precision = Precision { accumulate, ..Precision::of_model(model) };
        let trial = summed(&one_weight(precision, backward), 2);
        everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[sum]]));
    }
}

#[test]
fn three_ranks_of_one_average_to_one() {
    let trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0]]);
    everywhere(&Trial { ranks: 3, ..trial }, |trained| assert_eq!(trained.grads[0], [[1.0]]));
}

#[test]
fn the_mean_of_a_window_keeps_its_small_parts() {
    let backward: Backward = |at, _| vec![vec![if at.micro == 0 { 4.0 } else { 1.0 / 64.0 }]];
    let mut trial = one_weight(Precision::of_model(BF16), backward);
    trial.options.accumulation = 4;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[1.011_718_75]]));
}

#[test]
fn masters_move_where_model_weights_cannot() {
    let mut trial =
        Trial::new(options(Precision::of_model(BF16)), &[("w", &[1.0])], |_, _| vec![vec![1.0]]);
    trial.steps = 10;
    trial.groups[0].lr = 0.001;
    each_stage(&trial, |trial| {
        for (trained, master) in world::run(2, |comm| {
            let (trained, mut engine) = trial.engine(comm).unwrap();
            (trained, engine.full_param(ParamId(0)).unwrap().unwrap())
        }) {
            assert_eq!(master.f32(), [0.990_000_13]);
            assert_eq!(trained.weights, [[0.988_281_25]]);
        }
    });
}

#[test]
fn norms_add_in_more_than_the_gradients_have() {
    let ones = Trial::new(options(Precision::of_model(BF16)), &[("w", &[0.0; 4096])], |_, _| {
        vec![vec![1.0; 4096]]
    });
    everywhere(&ones, |trained| assert_eq!(trained.outcomes, [Some(64.0)]));
    let large = one_weight(Precision::of_model(F16), |_, _| vec![vec![300.0]]);
    everywhere(&large, |trained| assert_eq!(trained.outcomes, [Some(300.0)]));
}

#[test]
fn parameters_of_two_dtypes_in_one_unit_keep_their_own() {
    let weights: [(&str, &[f32]); 2] = [("p0", &[1.0]), ("p1", &[1.003_906_25])];
    let mut trial =
        Trial::new(options(Precision::of_model(BF16)), &weights, |_, _| vec![vec![0.0]]);
    trial.specs[1] = ParamSpec::new("p1", &[1], F32, UnitId(0));
    everywhere(&Trial { ranks: 2, ..trial.clone() }, |trained| {
        assert_eq!(trained.weights, [[1.0], [1.003_906_25]]);
    });
    each_stage(&trial, |trial| {
        let dtypes = world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            engine.pre_forward(UnitId(0)).unwrap();
            let weights = engine.unit_weights(UnitId(0)).unwrap();
            [0, 1].map(|param: usize| weights.params[param].dtype())
        });
        assert_eq!(dtypes, [[BF16, F32]; 2]);
    });
}

#[test]
fn eight_f16_gradients_that_overflow_in_their_sum_average() {
    let trial = one_weight(Precision::of_model(F16), |_, _| vec![vec![10_000.0]]);
    everywhere(&Trial { ranks: 8, ..trial }, |trained| assert_eq!(trained.grads[0], [[10_000.0]]));
}

/// A parameter of another dtype than the model's, whose accumulator was asked to be f32.
#[test]
fn narrow_parameters_of_an_f32_model_accumulate_in_f32() {
    let backward: Backward = |at, _| vec![vec![[256.0, 1.0][at.micro]]];
    let mut trial = summed(&one_weight(Precision::of_model(F32), backward), 2);
    trial.specs[0].dtype = BF16;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[257.0]]));

    let mut trial = one_weight(Precision::of_model(F32), |_, _| vec![vec![10_000.0]]);
    trial.specs[0].dtype = F16;
    everywhere(&Trial { ranks: 8, ..trial }, |trained| assert_eq!(trained.grads[0], [[10_000.0]]));
}
