//! Update rules with a fault, around one that works.

use oxizero_core::DType;
use oxizero_device::{Buffer, View, ViewMut, kernels};
use oxizero_optim::{Gradient, Hyper, Optimizer, Weights};

/// What a rule does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleFault {
    /// It counts one update too many.
    WrongStep,
    /// It forgets the clip factor.
    Unclipped,
    /// It divides in bf16.
    NarrowDivision,
    /// It forgets the weight decay.
    NoDecay,
    /// It leaves the model weights as they were.
    StaleModel,
}

/// A rule with a fault.
#[derive(Debug)]
pub(super) struct FaultyRule {
    pub(super) inner: Box<dyn Optimizer>,
    pub(super) fault: RuleFault,
}

impl Optimizer for FaultyRule {
    fn description(&self) -> String {
        format!("{} with a fault", self.inner.description())
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.inner.state_names()
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        match self.fault {
            RuleFault::WrongStep => self.inner.update(hyper, step + 1, grad, weights),
            RuleFault::Unclipped => {
                self.inner.update(hyper, step, Gradient { factor: 1.0, ..grad }, weights);
            }
            RuleFault::NoDecay => {
                self.inner.update(Hyper { weight_decay: 0.0, ..hyper }, step, grad, weights);
            }
            RuleFault::NarrowDivision => {
                let quotients = narrow_quotients(grad.values, grad.divisor);
                let grad = Gradient { values: quotients.view(), divisor: 1.0, ..grad };
                self.inner.update(hyper, step, grad, weights);
            }
            RuleFault::StaleModel => {
                self.inner.update(hyper, step, grad, Weights { model: None, ..weights });
            }
        }
    }
}

fn narrow_quotients(values: View<'_>, divisor: f32) -> Buffer {
    let mut wide = vec![0.0; values.numel().0];
    kernels::cast(values, ViewMut::F32(&mut wide));
    wide.iter_mut().for_each(|value| *value /= divisor);
    let mut narrow = Buffer::heap(values.numel(), DType::Bf16);
    kernels::cast(View::F32(&wide), narrow.view_mut());
    narrow
}
