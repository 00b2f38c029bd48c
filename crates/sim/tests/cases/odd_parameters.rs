//! Parameters that are empty, used twice, unused, frozen.

use super::*;
use oxizero_core::OptimGroup;

#[test]
fn empty_parameters_change_nothing_for_the_others() {
    let backward: Backward =
        |at, weights| vec![weights.iter().map(|weight| weight + 1.0 + at.rank as f32).collect()];
    let run = |sizes: &[&[usize]]| {
        let specs = sizes
            .iter()
            .enumerate()
            .map(|(index, shape)| ParamSpec::new(format!("p{index}"), shape, F32, UnitId(0)));
        let specs: Vec<_> = specs.collect();
        let initial = specs.iter().map(|spec| vec![1.0; spec.numel().0]).collect();
        let base = one_weight(Precision::of_model(F32), backward);
        Trial { specs, initial, ranks: 2, ..base }
    };
    let with = run(&[&[0, 8], &[3], &[0], &[5], &[2], &[0, 8]]);
    let without = run(&[&[3], &[5], &[2]]);
    everywhere(&without, |trained| {
        assert_eq!(trained.weights, [vec![-1.5; 3], vec![-1.5; 5], vec![-1.5; 2]]);
        assert_eq!(trained.outcomes, [Some(62.5_f64.sqrt())]);
    });
    everywhere(&with, |trained| {
        let expected = [vec![], vec![-1.5; 3], vec![], vec![-1.5; 5], vec![-1.5; 2], vec![]];
        assert_eq!(trained.weights, expected);
        assert_eq!(trained.outcomes, [Some(62.5_f64.sqrt())]);
    });
    for shapes in world::run(2, |comm| {
        let mut engine = with.start(comm).unwrap();
        let weights = engine.unit_weights(UnitId(0)).unwrap();
        weights.params.iter().map(|param| param.shape.clone()).collect::<Vec<_>>()
    }) {
        assert_eq!(shapes, [vec![0, 8], vec![3], vec![0], vec![5], vec![2], vec![0, 8]]);
    }
}

/// y = w * x1 + w * x2, where the module runs twice in one step.
#[test]
fn a_module_that_is_used_twice_sums_its_gradients() {
    let backward: Backward = |at, _| [[1.0, 2.0], [3.0, 4.0]][at.rank].map(|x| vec![x]).to_vec();
    let mut trial = Trial { ranks: 2, ..one_weight(Precision::of_model(F32), backward) };
    trial.specs[0].contributions = 2;
    everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[5.0]]));
}

#[test]
fn a_tied_weight_has_one_gradient_one_norm_and_one_state() {
    let mut trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0], vec![2.0]]);
    trial.specs[0].contributions = 2;
    trial.rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    everywhere(&trial, |trained| {
        assert_eq!((&trained.grads[0], trained.outcomes[0]), (&vec![vec![3.0]], Some(3.0)));
    });
    each_stage(&trial, |trial| {
        let memory = world::run(1, |comm| trial.engine(comm).unwrap().1.memory());
        assert_eq!(memory[0].optimizer, Bytes(2 * 4)); // two moments of one f32
    });
}

#[test]
fn gradients_may_arrive_in_another_order_on_each_rank() {
    let mut trial = two_units(F32, |_, _| vec![]);
    trial.ranks = 2;
    each_stage(&trial, |trial| {
        for grads in world::run(2, |comm| {
            let rank = comm.rank().0;
            let mut engine = trial.start(comm).unwrap();
            let given = [[1.0, 3.0], [10.0, 30.0]];
            for param in if rank == 0 { [0, 1] } else { [1, 0] } {
                let values = GradView::F32(std::slice::from_ref(&given[param][rank]));
                let grad = GradIn { values, loss_scale: LossScale::ONE };
                engine.grad_ready(ParamId(param), grad).unwrap();
            }
            engine.backward_end().unwrap();
            [0, 1].map(|param| full_grad(&mut engine, param))
        }) {
            assert_eq!(grads, [[2.0], [20.0]]);
        }
    });
}

#[test]
fn a_parameter_that_a_step_does_not_use_does_not_move() {
    let backward: Backward = |at, _| match (at.param, at.step) {
        (0, 1) => vec![],
        _ => vec![vec![1.0]],
    };
    let trial = Trial { ranks: 2, steps: 2, ..two_units(BF16, backward) };
    everywhere(&trial, |trained| {
        assert_eq!(trained.grads, [[[1.0], [1.0]], [[0.0], [1.0]]]);
        assert_eq!(trained.weights, [[-1.0], [-2.0]]);
    });
}

/// Its moments are untouched too: used in the third step for the first time, it moves as in a
/// first step, by the learning rate beside the decay.
#[test]
fn a_parameter_that_no_rank_uses_does_not_decay() {
    let backward: Backward =
        |at, _| if at.param == 0 && at.step < 2 { vec![] } else { vec![vec![1.0]] };
    let mut trial = Trial { ranks: 2, ..two_units(F32, backward) };
    trial.initial = vec![vec![1.0], vec![1.0]];
    trial.rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    trial.groups = vec![GroupOptions { lr: 0.125, weight_decay: 0.5 }];
    everywhere(&Trial { steps: 2, ..trial.clone() }, |trained| {
        assert_eq!(trained.weights[0], [1.0]);
        assert!(trained.weights[1][0] < 0.7);
    });
    everywhere(&Trial { steps: 3, ..trial.clone() }, |trained| {
        let first_step = 1.0 - 0.125 * 0.5 - 0.125;
        assert!((trained.weights[0][0] - first_step).abs() < 1e-6); // rounding in f32
    });
}

#[test]
fn ten_parameters_in_buckets_of_five_are_two_reductions_every_step() {
    let params: Vec<_> = (0..10).map(|index| format!("p{index}")).collect();
    let zeros = [0.0; 10];
    let params: Vec<_> = params.iter().map(|name| (name.as_str(), &zeros[..])).collect();
    let mut options = options(Precision::of_model(F32));
    options.bucketing = Bucketing::Bytes(Bytes(50 * 4));
    let trial = Trial::new(options, &params, |_, _| vec![vec![1.0; 10]]);
    for stage in Stage::ALL {
        let trial = in_stage(&trial, stage);
        for steps in 1..4 {
            let trial = Trial { steps, ..trial.clone() };
            let (_, logs) = world::run_watched(2, Plan::default(), |comm| {
                trial.engine(comm).map(|_| ()).unwrap();
            });
            for log in logs {
                assert_eq!(log.count(Kind::ReduceScatter), 2 * steps, "{stage:?}");
            }
        }
    }
}

#[test]
fn one_trained_parameter_of_a_hundred_costs_a_hundredth() {
    let names: Vec<_> = (0..100).map(|index| format!("p{index}")).collect();
    let params: Vec<_> = names.iter().map(|name| (name.as_str(), &[0.0; 64][..])).collect();
    let base = options(Precision::of_model(BF16));
    let mut trial = Trial::new(base, &params, |_, _| vec![vec![1.0; 64]]);
    trial.rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    each_stage(&trial, |all| {
        let mut one = all.clone();
        one.specs.iter_mut().skip(1).for_each(|spec| spec.trainable = false);
        let [all, one] = [all, &one].map(|trial| {
            let memory = world::run(2, |comm| trial.engine(comm).unwrap().1.memory());
            assert_eq!(memory[0], memory[1]);
            memory[0]
        });
        assert!(one.gradients.0 > 0 && one.optimizer.0 > 0);
        assert_eq!(one.gradients.0 * 100, all.gradients.0);
        assert_eq!(one.optimizer.0 * 100, all.optimizer.0);
        assert_eq!(one.masters.0 * 100, all.masters.0);
        assert_eq!(one.model, all.model);
    });
}

/// One element among four ranks, beside a unit of which nothing is trained.
#[test]
fn ranks_that_own_nothing_train_along() {
    let mut trial = two_units(BF16, |_, _| vec![vec![-3.0]]);
    trial.specs[1].trainable = false;
    trial.groups.push(trial.groups[0]);
    trial.specs[1].group = OptimGroup(1);
    everywhere(&Trial { ranks: 4, ..trial }, |trained| {
        assert_eq!(trained.outcomes, [Some(3.0)]);
        assert_eq!(trained.grads[0], [vec![-3.0], vec![]]);
        assert_eq!(trained.weights, [[3.0], [0.0]]);
    });
}
