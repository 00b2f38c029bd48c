//! Whole gradients may be read into the memory of an earlier window's, which then shows nothing of
//! it.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::{
    Engine, EngineOptions, GradIn, GradView, GroupOptions, ModelGrads, OptimizerSetup, Scope,
};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{DType, LossScale, ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize};
use oxizero_optim::{LrSchedule, Momentum, Sgd};

/// An f32 model whose parameters have so many elements.
fn engine(stage: Stage, numels: &[usize], comm: Box<dyn Communicator>) -> Engine {
    let spec = |(index, numel): (usize, &usize)| {
        ParamSpec::new(format!("p{index}"), &[*numel], DType::F32, UnitId(0))
    };
    let specs = numels.iter().enumerate().map(spec).collect();
    let options = EngineOptions::new(stage, Precision::of_model(DType::F32));
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 0.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap()
}

/// A window in which the elements of parameter `p` are `value + p`; parameter 0 gives none.
fn backward(engine: &mut Engine, numels: &[usize], value: f32) {
    for (index, numel) in numels.iter().enumerate().skip(1) {
        let values = vec![value + index as f32; *numel];
        let grad = GradIn { values: GradView::F32(&values), loss_scale: LossScale::ONE };
        engine.grad_ready(ParamId(index), grad).unwrap();
    }
    engine.backward_end().unwrap();
}

fn values(grads: &ModelGrads) -> Vec<Vec<f32>> {
    let f32 = |view| match view {
        GradView::F32(values) => values.to_vec(),
        _ => panic!("gradients accumulate in f32"),
    };
    grads.iter().map(|(_, view)| f32(view)).collect()
}

#[test]
fn gradients_in_old_memory_are_those_in_fresh_memory() {
    let numels = [[5, 7, 100], [3, 1, 9]];
    for stage in Stage::ALL {
        thread::scope(|scope| {
            for comm in threads::group(WorldSize::new(2).unwrap()) {
                scope.spawn(move || {
                    let other = comm.split(&oxizero_core::ProcessGroup::world(comm.world_size()));
                    let other = engine(stage, &numels[1], other.unwrap());
                    let first = engine(stage, &numels[0], comm);
                    let mut grads = ModelGrads::default();
                    let mut starts = vec![];
                    // The second model's are of another size, and take memory of their own.
                    for (value, (mut engine, numels)) in
                        [10.0, 20.0].into_iter().zip([(first, numels[0]), (other, numels[1])])
                    {
                        for value in [value, value + 5.0] {
                            backward(&mut engine, &numels, value);
                            engine.full_grads_into(Scope::DataParallel, &mut grads).unwrap();
                            starts.push(start(&grads));
                            let expected = numels.iter().enumerate().map(|(index, numel)| {
                                let value = if index == 0 { 0.0 } else { value + index as f32 };
                                vec![value; *numel]
                            });
                            assert_eq!(values(&grads), expected.collect::<Vec<_>>(), "{stage:?}");
                            assert_eq!(
                                values(&engine.full_grads(Scope::DataParallel).unwrap()),
                                values(&grads)
                            );
                            engine.discard_window().unwrap();
                        }
                    }
                    assert!(starts[0] == starts[1] && starts[2] == starts[3], "{starts:?}");
                });
            }
        });
    }
}

/// Where the memory of the first gradient lies.
fn start(grads: &ModelGrads) -> usize {
    let GradView::F32(values) = grads.get(ParamId(0)).unwrap() else { panic!("not f32") };
    values.as_ptr().addr()
}
