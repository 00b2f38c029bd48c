//! Ranks that say or ask for different things: an error on all, or the right numbers.

use super::*;

#[test]
fn optimizers_that_differ_are_refused_on_all_ranks() {
    let trial = one_weight(Precision::of_model(F32), |_, _| vec![]);
    let rule = |beta1| -> Box<dyn Optimizer> {
        let options = MomentOptions { beta1, ..MomentOptions::default() };
        Box::new(AdamW::new(options).unwrap())
    };
    let adam = || Box::new(Adam::new(MomentOptions::default()).unwrap());
    let setup = |rule, lr, warmup| OptimizerSetup {
        rule,
        groups: vec![GroupOptions { lr, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(warmup),
    };
    type Make<'a> = &'a (dyn Fn() -> OptimizerSetup + Sync);
    let others: [(&str, Make<'_>); 4] = [
        ("`groups` is lr 0.1 and weight decay 0.0 on rank 0 and lr 0.2", &|| {
            setup(rule(0.9), 0.2, 0)
        }),
        (
            "`rule` is AdamW with betas 0.9 and 0.999, eps 1e-8 on rank 0 and AdamW with betas 0.8",
            &|| setup(rule(0.8), 0.1, 0),
        ),
        ("`rule` is AdamW with betas 0.9 and 0.999, eps 1e-8 on rank 0 and Adam with", &|| {
            setup(adam(), 0.1, 0)
        }),
        ("`schedule` is constant after 0 steps of warm-up on rank 0 and constant after 1", &|| {
            setup(rule(0.9), 0.1, 1)
        }),
    ];
    for (of, other) in others {
        for error in world::run(3, |comm| {
            let optimizer = if comm.rank() == Rank(1) { other() } else { setup(rule(0.9), 0.1, 0) };
            let (specs, options) = (trial.specs.clone(), trial.options.clone());
            let order = trial.order();
            Engine::new(specs, order, options, optimizer, comm, &mut |_, _| ()).err()
        }) {
            let told = error.expect("rank 1 differs").to_string();
            assert!(told.starts_with(of) && told.contains(" on rank 1;"), "{told}");
        }
    }
}

/// Another parameter, values of another shape, or another call, on one of the ranks. Where all
/// refuse before anything travels, they may go on.
#[test]
fn access_that_differs_is_refused_on_all_ranks() {
    type Act = fn(&mut Engine) -> Result<(), EngineError>;
    const ONE: GradView<'_> = GradView::F32(&[1.0]);
    const TWO: GradView<'_> = GradView::F32(&[1.0, 2.0]);
    let one_gradient: Act = |engine| engine.full_grad(ParamId(0)).map(drop);
    let wrong: [(Act, Act); 8] = [
        (one_gradient, |engine| engine.full_grad(ParamId(1)).map(drop)),
        (one_gradient, |engine| engine.full_grad(ParamId(9)).map(drop)),
        (one_gradient, |engine| engine.full_grads(Scope::DataParallel).map(drop)),
        (one_gradient, |engine| engine.full_param(ParamId(0)).map(drop)),
        (
            |engine| engine.set_full_grad(ParamId(0), ONE),
            |engine| engine.set_full_grad(ParamId(0), TWO),
        ),
        (
            |engine| engine.set_full_param(ParamId(0), ONE),
            |engine| engine.set_full_param(ParamId(0), TWO),
        ),
        (
            |engine| engine.full_state(ParamId(0), "momentum_buffer").map(drop),
            |engine| engine.full_state(ParamId(0), "exp_avg").map(drop),
        ),
        (
            |engine| engine.full_state(ParamId(0), "momentum_buffer").map(drop),
            |engine| engine.set_full_state(ParamId(0), "momentum_buffer", ONE),
        ),
    ];
    let mut trial = Trial { ranks: 3, ..two_units(F32, |_, _| vec![vec![1.0]]) };
    trial.rule = Rule::Sgd { momentum: 0.5 };
    for (index, (usual, other)) in wrong.into_iter().enumerate() {
        for odd in 0..3 {
            each_stage(&trial, |trial| {
                println!("case {index}, rank {odd} differs");
                for (error, grad) in each_rank(trial, |engine| {
                    trial.micro_batch(engine, 0, 0).unwrap();
                    let act = if rank_of(engine) == odd { other } else { usual };
                    (act(engine).err(), full_grad(engine, 0))
                }) {
                    let error = error.expect("it is refused");
                    assert!(!matches!(error, EngineError::Comm(_)), "{error:?}");
                    assert_eq!(grad, [1.0]);
                }
            });
        }
    }
}

#[test]
fn a_step_beside_a_read_is_refused_on_all_ranks() {
    let trial = Trial { ranks: 3, ..two_units(F32, |_, _| vec![vec![1.0]]) };
    each_stage(&trial, |trial| {
        for error in each_rank(trial, |engine| {
            trial.micro_batch(engine, 0, 0).unwrap();
            match rank_of(engine) {
                1 => engine.step().map(drop).err(),
                _ => engine.grad_norms().map(drop).err(),
            }
        }) {
            assert!(error.is_some());
        }
    });
}
