//! Padding is never stored or read: engines whose padding is NaN show it. And what a front-end
//! refuses of a checkpoint is not loaded.

use std::thread;

use oxizero_checkpoint::{Checkpoint, RunFolder};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{DType, ParamId, ParamSpec, Precision, Rank, Stage, UnitId, WorldSize};
use oxizero_device::View;
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

use super::{LoadOptions, SaveOptions};
use crate::bucket::Bucket;
use crate::{Engine, EngineError, EngineOptions, GroupOptions, OptimizerSetup};

const NUMELS: [usize; 4] = [5, 0, 17, 1];

fn engine(stage: Stage, model: DType, comm: Box<dyn Communicator>) -> Engine {
    let spec = |(index, numel): (usize, &usize)| ParamSpec {
        trainable: index != 3,
        ..ParamSpec::new(format!("p{index}"), &[*numel], model, UnitId(0))
    };
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let specs = NUMELS.iter().enumerate().map(spec).collect();
    let options = EngineOptions::new(stage, Precision::of_model(model));
    let mut initial = |param: ParamId, weights: &mut [f32]| weights.fill(1.0 + param.0 as f32);
    let mut engine = Engine::new(specs, vec![], options, optimizer, comm, &mut initial).unwrap();
    engine.buckets.iter_mut().for_each(Bucket::poison_padding);
    engine
}

fn in_world(ranks: usize, rank: impl Fn(Box<dyn Communicator>) + Sync) {
    thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(ranks).unwrap()) {
            scope.spawn(|| rank(comm));
        }
    });
}

#[test]
fn padding_of_nan_is_neither_stored_nor_loaded() {
    for (stage, model) in Stage::ALL.into_iter().zip([DType::F32, DType::Bf16].into_iter().cycle())
    {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        in_world(3, |comm| {
            engine(stage, model, comm).save(&run, &SaveOptions::default()).map(drop).unwrap();
        });
        let mut checkpoint = run.open(None).unwrap();
        for tensor in 0..checkpoint.manifest().tensors.len() {
            let is_nan = |bytes: &[u8]| bytes[bytes.len() - 1] & 0x7f == 0x7f;
            let size = checkpoint.manifest().tensors[tensor].element_bytes();
            let bytes = checkpoint.read_whole(tensor).unwrap();
            assert!(!bytes.chunks(size).any(is_nan), "{stage:?}");
        }
        in_world(2, |comm| {
            let mut engine = engine(stage, model, comm);
            engine.load(&run, None, LoadOptions::default()).unwrap();
            for param in (0..3).map(ParamId) {
                let found = engine.full_param(param).unwrap().unwrap();
                let expected = vec![1.0 + param.0 as f32; NUMELS[param.0]];
                assert_eq!(found.f32(), expected, "{stage:?}");
                let moment = engine.full_state(param, "exp_avg").unwrap().unwrap();
                assert_eq!(moment.f32(), vec![0.0; NUMELS[param.0]]);
            }
        });
    }
}

#[test]
fn what_one_rank_refuses_is_loaded_on_none() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    in_world(2, |comm| {
        let rank = comm.rank();
        let mut engine = engine(Stage::Zero2, DType::F32, comm);
        assert_eq!(engine.latest_checkpoint(&run).unwrap(), None);
        let options = SaveOptions { name: Some("first".into()), ..SaveOptions::default() };
        engine.save(&run, &options).unwrap();
        // Rank 0 alone looks.
        let own = RunFolder::new(folder.path().join(if rank == Rank(0) { "" } else { "none" }));
        assert_eq!(engine.latest_checkpoint(&own).unwrap().as_deref(), Some("first"));
        engine.set_full_param(ParamId(0), View::F32(&[7.0; 5])).unwrap();
        let refuse = |_: &mut Checkpoint| match rank {
            Rank(1) => Err(EngineError::NotReady),
            _ => Ok(()),
        };
        let loaded = engine.load_checked(&run, None, LoadOptions::default(), &mut { refuse });
        match loaded.unwrap_err() {
            EngineError::NotReady => assert_eq!(rank, Rank(1)),
            error => {
                assert!(matches!(error, EngineError::PeerRefused { rank: Rank(1) }), "{error}");
            }
        }
        let kept = engine.full_param(ParamId(0)).unwrap().unwrap();
        assert_eq!(kept.f32(), [7.0; 5]);
        engine.load(&run, None, LoadOptions::default()).unwrap();
        let loaded = engine.full_param(ParamId(0)).unwrap().unwrap();
        assert_eq!(loaded.f32(), [1.0; 5]);
    });
}
