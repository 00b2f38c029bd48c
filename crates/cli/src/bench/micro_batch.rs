//! A micro-batch without the model's arithmetic.

use oxizero::{Engine, EngineError, GradIn, GradView};
use oxizero_core::{LossScale, Numel, ParamId, ParamSpec, UnitId};

/// The events of a model whose units are used one after the other, each once.
#[derive(Debug)]
pub(crate) struct MicroBatch {
    /// By unit.
    units: Vec<Vec<Given>>,
}

/// A parameter whose gradient is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    pub(crate) param: ParamId,
    pub(crate) numel: Numel,
    /// Elements of the unit before it.
    pub(crate) start: usize,
}

impl Given {
    /// Where it lies among the elements of its unit.
    pub(crate) fn in_unit(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.numel.0
    }
}

impl MicroBatch {
    /// Of a model whose units count from 0.
    pub(crate) fn new(specs: &[ParamSpec]) -> Self {
        let count = specs.iter().map(|spec| spec.unit.0 + 1).max().unwrap_or(0);
        let mut units: Vec<Vec<Given>> = vec![Vec::new(); count];
        for (index, spec) in specs.iter().enumerate() {
            let unit = &mut units[spec.unit.0];
            let start = unit.last().map_or(0, |given| given.in_unit().end);
            unit.push(Given { param: ParamId(index), numel: spec.numel(), start });
        }
        Self { units }
    }

    /// The order in which forward uses the units.
    pub(crate) fn order(&self) -> Vec<UnitId> {
        self.units().collect()
    }

    fn units(&self) -> impl DoubleEndedIterator<Item = UnitId> + use<> {
        (0..self.units.len()).map(UnitId)
    }

    /// Runs it; `gradient` says what a parameter's is.
    pub(crate) fn run<'a>(
        &self,
        engine: &mut Engine,
        gradient: impl Fn(&Given) -> GradView<'a>,
    ) -> Result<(), EngineError> {
        for unit in self.units() {
            engine.pre_forward(unit)?;
            engine.post_forward(unit)?;
        }
        for unit in self.units().rev() {
            engine.pre_backward(unit)?;
            for given in &self.units[unit.0] {
                let grad = GradIn { values: gradient(given), loss_scale: LossScale::ONE };
                engine.grad_ready(given.param, grad)?;
            }
            engine.post_backward(unit)?;
        }
        engine.backward_end()
    }
}
