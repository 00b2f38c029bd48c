//! What an engine runs on, and how one is made of it.

use std::sync::Arc;

use oxizero_comm::{Communicator, Traffic};
use oxizero_core::{LossScaler, ParamId, ParamSpec, Schedule, UnitId};
use oxizero_device::{Storage, ViewMut};

use crate::boundary::Boundary;
use crate::flight::UnderWay;
use crate::groups::Groups;
use crate::hyper::HyperParams;
use crate::ledger::Ledger;
use crate::observer::{Observed, Observer};
use crate::options::{EngineOptions, OptimizerSetup};
use crate::window::{Window, WindowState};
use crate::written::Written;
use crate::{Engine, EngineError, facts, setup};

/// Where an engine's memory lies and is computed on, how it reaches the other ranks, and who is
/// told what it does. The engine is the same on all.
pub struct Backend {
    /// Where buffers are made that do not travel by themselves.
    pub storage: Storage,
    /// Reaches the other ranks; the memory that it allocates lies in the same storage.
    /// Where its operations run on a thread of their own, as [`overlapped`] ones do, reductions and
    /// gathers run beside the caller's work.
    ///
    /// [`overlapped`]: oxizero_comm::overlapped()
    pub communicator: Box<dyn Communicator>,
    /// Is told what is done, and when; nobody costs nothing.
    pub observer: Option<Arc<dyn Observer>>,
}

impl Backend {
    /// The host, with ranks on its machine.
    pub fn host(communicator: Box<dyn Communicator>) -> Self {
        Self { storage: Storage::Host, communicator, observer: None }
    }
}

impl Engine {
    /// Makes this rank's part of the engine; a collective call.
    ///
    /// `order` is the order in which forward uses the units (a tied unit occurs twice). It may be
    /// empty: buckets are then reduced as their gradients are complete. `initial` writes a
    /// parameter's initial f32 weights; it is called on rank 0 alone, whose weights are broadcast.
    /// In a mesh, where ranks hold different weights, it is called on the first rank of those that
    /// hold the same.
    pub fn new(
        specs: Vec<ParamSpec>,
        order: Vec<UnitId>,
        options: EngineOptions,
        optimizer: OptimizerSetup,
        comm: Box<dyn Communicator>,
        initial: &mut dyn FnMut(ParamId, &mut [f32]),
    ) -> Result<Self, EngineError> {
        let mut write = |param, weights: ViewMut<'_>| match weights {
            ViewMut::F32(weights) => initial(param, weights),
            other => unreachable!("the host's f32 weights are {:?}", other.as_view()),
        };
        Self::on_backend(specs, order, options, optimizer, Backend::host(comm), &mut write)
    }

    /// The same on any [`Backend`], where `initial` is given the f32 weights that it is to write
    /// where they lie.
    pub fn on_backend(
        specs: Vec<ParamSpec>,
        order: Vec<UnitId>,
        options: EngineOptions,
        optimizer: OptimizerSetup,
        backend: Backend,
        initial: &mut dyn FnMut(ParamId, ViewMut<'_>),
    ) -> Result<Self, EngineError> {
        let Backend { storage, communicator: comm, observer } = backend;
        setup::check_environment()?;
        let mesh = options.mesh_of(comm.world_size())?;
        setup::check(&specs, &order, &options, &optimizer, &mesh)?;
        let scaler = LossScaler::new(options.loss_scaling)?;
        facts::agree(&specs, &order, &options, &optimizer, &*comm)?;
        let groups = Groups::new(comm, Observed::by(observer), mesh, &specs)?;
        let buckets = setup::buckets(&specs, (&options, &optimizer), &groups, &storage, initial)?;
        let bucket_specs: Vec<_> = buckets.iter().map(|bucket| bucket.spec().clone()).collect();
        let mut engine = Self {
            schedule: Schedule::new(options.stage, &bucket_specs, order.clone()),
            units: setup::units(&specs, &order),
            params: setup::params(&specs, &buckets),
            missing: setup::expected(&specs, &buckets),
            awaits_end: vec![false; buckets.len()],
            under_way: UnderWay::default(),
            groups,
            storage,
            options,
            hyper: HyperParams::new(optimizer),
            specs,
            order,
            buckets,
            window: Window::new(WindowState::Empty),
            boundary: Boundary::Counted,
            next_sync: None,
            scaler,
            applied_steps: 0,
            ledger: Ledger::default(),
            written: Written::default(),
            failed: None,
            half_loaded: false,
            in_flight: None,
            step_start: Traffic::default(),
            step_traffic: Traffic::default(),
        };
        engine.step_start = engine.groups.traffic();
        engine.ledger = Ledger::start(engine.memory(), setup::initial_bytes(&engine.buckets));
        Ok(engine)
    }
}
