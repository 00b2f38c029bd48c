//! A burn module with its type hidden: scanned, bound to weights, run, drained of gradients.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Tensor};
use oxizero::segment::GradSink;
use oxizero::{EngineError, UnitWeights};
use oxizero_core::DType;

use super::{BurnError, Context, lend};

/// A module and what it does, with both types hidden.
pub(crate) trait Template<B>: Send {
    /// Every use of a parameter, in the order in which burn visits them.
    fn uses(&self) -> Result<Vec<Use>, BurnError>;
    /// The same module over the engine's weights.
    fn bind(&self, binding: &Binding<'_>) -> Box<dyn Template<B>>;
    /// Runs forward.
    fn run(&self, context: &Context<'_, B>, input: Option<Tensor<3>>) -> Tensor<3>;
    /// Moves the gradients of a bound module out of burn, one at a time.
    fn drain(
        &self,
        grads: &mut Gradients,
        slots: &[usize],
        sink: &mut dyn GradSink,
    ) -> Result<(), EngineError>;
}

/// One use of a parameter in a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// The path of the parameter in the module, such as `self_attn.q_proj.weight`; of a parameter
    /// that the module uses twice, the first.
    pub(crate) name: String,
    /// The parameter's shape.
    pub(crate) shape: Vec<usize>,
}

/// What a module's parameters are bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding<'a> {
    /// The unit's weights.
    pub(crate) weights: &'a UnitWeights,
    /// For each use of a parameter, its index in the unit.
    pub(crate) slots: &'a [usize],
    /// The dtype to compute in.
    pub(crate) compute: DType,
    /// Where to compute.
    pub(crate) device: &'a Device,
    /// How much of autodiff is switched on.
    pub(crate) tape: TapeMode,
}

/// How much of burn's autodiff is switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TapeMode {
    /// Plain tensors: burn may choose fused kernels, whose last bits differ.
    Off,
    /// Autodiff's kernels, and nothing recorded.
    Untracked,
    /// Autodiff's kernels, recorded for backward.
    Tracked,
}

/// The template of `module`, which `run` runs.
pub(crate) fn template<B, M, R>(module: M, run: R) -> Box<dyn Template<B>>
where
    M: Module + 'static,
    R: Fn(&M, &Context<'_, B>, Option<Tensor<3>>) -> Tensor<3> + Clone + Send + 'static,
{
    Box::new(Typed { module, run })
}

struct Typed<M, R> {
    module: M,
    run: R,
}

impl<B, M, R> Template<B> for Typed<M, R>
where
    M: Module + 'static,
    R: Fn(&M, &Context<'_, B>, Option<Tensor<3>>) -> Tensor<3> + Clone + Send + 'static,
{
    fn uses(&self) -> Result<Vec<Use>, BurnError> {
        let mut scan = Scan { path: Vec::new(), uses: Vec::new(), untrained: None };
        self.module.visit(&mut scan);
        match scan.untrained {
            Some(name) => Err(BurnError::NotTrained { name }),
            None => Ok(scan.uses.into_iter().map(|(_, used)| used).collect()),
        }
    }

    fn bind(&self, binding: &Binding<'_>) -> Box<dyn Template<B>> {
        let mut bind = Bind { binding, visited: 0 };
        let module = self.module.clone().map(&mut bind);
        Box::new(Self { module, run: self.run.clone() })
    }

    fn run(&self, context: &Context<'_, B>, input: Option<Tensor<3>>) -> Tensor<3> {
        (self.run)(&self.module, context, input)
    }

    fn drain(
        &self,
        grads: &mut Gradients,
        slots: &[usize],
        sink: &mut dyn GradSink,
    ) -> Result<(), EngineError> {
        let mut drain = Drain { grads, slots, sink, visited: 0, result: Ok(()) };
        self.module.visit(&mut drain);
        drain.result
    }
}

/// Reads names and shapes, and initialises nothing.
struct Scan {
    path: Vec<String>,
    uses: Vec<(ParamId, Use)>,
    untrained: Option<String>,
}

impl ModuleVisitor for Scan {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = self.path.join(".");
        // burn shows running statistics as parameters that want no gradient. What it will only
        // initialise later is a true parameter; what has a value says whether it wants one.
        if param.is_initialized() && !param.clone().train().is_require_grad() {
            self.untrained.get_or_insert(name);
            return;
        }
        let same = self.uses.iter().find(|(id, _)| *id == param.id);
        let name = same.map_or(name, |(_, first)| first.name.clone());
        self.uses.push((param.id, Use { name, shape: param.lazy_shape().to_vec() }));
    }
}

/// Replaces every parameter by the engine's weights, widened where the layer computes in another
/// dtype.
struct Bind<'a> {
    binding: &'a Binding<'a>,
    visited: usize,
}

impl ModuleMapper for Bind<'_> {
    fn map_float<const D: usize>(&mut self, old: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Binding { weights, slots, compute, device, tape } = *self.binding;
        let weights = &weights.params[slots[self.visited]];
        self.visited += 1;
        let mut tensor = lend::lend::<D>(weights, device);
        if weights.dtype() != compute {
            // Before the tensor becomes a leaf, so that its gradient has the wide dtype too.
            tensor = tensor.cast(lend::burn_dtype(compute));
        }
        if tape != TapeMode::Off {
            let track = tape == TapeMode::Tracked && weights.trainable;
            tensor = tensor.autodiff().set_require_grad(track);
        }
        Param::initialized(old.id, tensor)
    }
}

struct Drain<'a> {
    grads: &'a mut Gradients,
    slots: &'a [usize],
    sink: &'a mut dyn GradSink,
    visited: usize,
    result: Result<(), EngineError>,
}

impl ModuleVisitor for Drain<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = self.slots[self.visited];
        self.visited += 1;
        let grad = param.grad_remove(self.grads);
        if let (Some(grad), Ok(())) = (grad, &self.result) {
            self.result = lend::read(grad, |view| self.sink.grad(slot, view));
        }
    }
}
