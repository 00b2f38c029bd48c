//! Stochastic gradient descent.

use crate::error::check;
use crate::pass::update_each;
use crate::tiny::{TINY, zero_below};
use crate::{Gradient, Hyper, OptimError, Optimizer, Weights};

/// What steps remember of the gradients before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Momentum {
    /// Nothing; no state is kept.
    #[default]
    None,
    /// Their decayed sum, multiplied by so much a step; in [0, 1).
    Classical(f64),
    /// The same, looked ahead by one step; in [0, 1).
    Nesterov(f64),
}

/// Stochastic gradient descent, as `torch.optim.SGD` with dampening 0; weight decay is an L2
/// penalty.
///
/// With gradient `g`, weight `p`, momentum `u` and its state `b` (`momentum_buffer`):
///
/// ```text
/// g = g + weight_decay * p
/// b = u * b + g
/// p = p - lr * g                           without momentum
/// p = p - lr * b                           classical
/// p = p - lr * (g + u * b)                 Nesterov
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    momentum: Momentum,
    keeps_buffer: bool,
}

impl Sgd {
    /// Refuses a momentum outside [0, 1). A momentum of 0 is none.
    pub fn new(momentum: Momentum) -> Result<Self, OptimError> {
        let momentum = match momentum {
            Momentum::None => Momentum::None,
            Momentum::Classical(value) | Momentum::Nesterov(value) => {
                check("momentum", value, (0.0..1.0).contains(&value), "0 <= momentum < 1")?;
                if value == 0.0 { Momentum::None } else { momentum }
            }
        };
        Ok(Self { momentum, keeps_buffer: momentum != Momentum::None })
    }

    /// The same rule, which keeps a `momentum_buffer` even without momentum, and then leaves it as
    /// it is: for an optimizer some of whose groups have a momentum.
    #[must_use]
    pub fn keeping_buffer(self) -> Self {
        Self { keeps_buffer: true, ..self }
    }
}

impl Optimizer for Sgd {
    fn description(&self) -> String {
        match self.momentum {
            Momentum::None if self.keeps_buffer => "SGD without momentum, but its buffer".into(),
            Momentum::None => "SGD without momentum".into(),
            Momentum::Classical(momentum) => format!("SGD with momentum {momentum:?}"),
            Momentum::Nesterov(momentum) => format!("SGD with Nesterov's momentum {momentum:?}"),
        }
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.keeps_buffer { &["momentum_buffer"] } else { &[] }
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        assert!(step > 0, "updates are counted from 1");
        let (lr, penalty) = (hyper.lr as f32, hyper.weight_decay as f32);
        match self.momentum {
            Momentum::None if self.keeps_buffer => update_each(
                grad,
                weights,
                #[inline(always)]
                |grad, weight, [buffer]| (weight - lr * penalised(penalty, grad, weight), [buffer]),
            ),
            Momentum::None => update_each(
                grad,
                weights,
                #[inline(always)]
                |grad, weight, []| (weight - lr * penalised(penalty, grad, weight), []),
            ),
            Momentum::Classical(momentum) => update_each(
                grad,
                weights,
                #[inline(always)]
                |grad, weight, [buffer]| {
                    let grad = penalised(penalty, grad, weight);
                    let buffer = remember(momentum as f32, buffer, grad);
                    (weight - lr * buffer, [buffer])
                },
            ),
            Momentum::Nesterov(momentum) => update_each(
                grad,
                weights,
                #[inline(always)]
                |grad, weight, [buffer]| {
                    let grad = penalised(penalty, grad, weight);
                    let buffer = remember(momentum as f32, buffer, grad);
                    (weight - lr * (grad + momentum as f32 * buffer), [buffer])
                },
            ),
        }
    }
}

/// The gradient with the L2 penalty.
#[inline(always)]
fn penalised(penalty: f32, grad: f32, weight: f32) -> f32 {
    zero_below(TINY, grad + penalty * weight)
}

#[inline(always)]
fn remember(momentum: f32, buffer: f32, grad: f32) -> f32 {
    zero_below(TINY, momentum * buffer + grad)
}

#[cfg(test)]
mod tests {
    use oxizero_core::DType;
    use proptest::prelude::*;

    use super::*;
    use crate::reference::{Case, any_case, config, flush};

    /// The gradient with the L2 penalty, as the documentation has it.
    fn penalised(hyper: Hyper, g: f32, p: f32) -> f32 {
        flush(2.0_f32.powi(-100), g + hyper.weight_decay as f32 * p)
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn blocks_follow_the_formula_bit_by_bit(case in any_case()) {
            let optimizer = Sgd::new(Momentum::None).unwrap();
            case.assert_follows(&optimizer, |hyper: Hyper, _, (g, p), []| {
                (p - hyper.lr as f32 * penalised(hyper, g, p), [])
            });
        }

        #[test]
        fn momentum_follows_the_formula_bit_by_bit(
            case in any_case(), momentum in 0.01..1.0, nesterov in any::<bool>(),
        ) {
            let kind = if nesterov { Momentum::Nesterov } else { Momentum::Classical };
            let optimizer = Sgd::new(kind(momentum)).unwrap();
            let u = momentum as f32;
            case.assert_follows(&optimizer, |hyper: Hyper, _, (g, p), [b]| {
                let g = penalised(hyper, g, p);
                let b = flush(2.0_f32.powi(-100), u * b + g);
                let direction = if nesterov { g + u * b } else { b };
                (p - hyper.lr as f32 * direction, [b])
            });
        }
    }

    #[test]
    fn a_master_moves_where_a_narrow_weight_would_stick() {
        let case = Case {
            hyper: Hyper { lr: 0.001, weight_decay: 0.0 },
            model_dtype: Some(DType::Bf16),
            ..Case::of(&[1.0], &[&[1.0][..]; 10])
        };
        let after = case.run(&Sgd::new(Momentum::None).unwrap());
        assert_eq!(after.master, [0.990_000_1]);
        assert_eq!(after.model, Some(vec![0.988_281_25]));
    }

    /// Two steps by hand; all numbers are exact.
    #[test]
    fn momentum_and_nesterov_differ_as_in_torch() {
        let case = Case {
            hyper: Hyper { lr: 0.5, weight_decay: 0.0 },
            ..Case::of(&[8.0], &[&[1.0], &[2.0]])
        };
        let run = |momentum| case.run(&Sgd::new(momentum).unwrap());
        assert_eq!(run(Momentum::None).master, [8.0 - 0.5 - 1.0]);
        let classical = run(Momentum::Classical(0.5));
        assert_eq!(classical.master, [8.0 - 0.5 * 1.0 - 0.5 * 2.5]);
        assert_eq!(classical.states, [[2.5]]);
        let nesterov = run(Momentum::Nesterov(0.5));
        assert_eq!(nesterov.master, [8.0 - 0.5 * 1.5 - 0.5 * 3.25]);
        assert_eq!(nesterov.states, [[2.5]]);
    }

    #[test]
    fn a_momentum_of_zero_keeps_no_state() {
        for momentum in [Momentum::Classical(0.0), Momentum::Nesterov(0.0), Momentum::None] {
            assert_eq!(Sgd::new(momentum).unwrap().state_names(), [""; 0]);
        }
    }

    #[test]
    fn a_buffer_that_is_kept_without_momentum_stays_as_it_is() {
        let case = Case::of(&[8.0], &[&[1.0], &[2.0]]);
        let plain = Sgd::new(Momentum::None).unwrap();
        let kept = case.run(&plain.keeping_buffer());
        assert_eq!(kept.master, case.run(&plain).master);
        assert_eq!(kept.states, [[0.0]]);
    }

    #[test]
    fn a_momentum_out_of_range_is_refused_by_name() {
        for value in [-0.5, 1.0, f64::NAN] {
            for momentum in [Momentum::Classical(value), Momentum::Nesterov(value)] {
                let error = Sgd::new(momentum).unwrap_err().to_string();
                assert!(error.starts_with("`momentum = "), "{error}");
            }
        }
    }
}
