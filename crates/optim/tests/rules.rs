//! What the rules promise besides their formulas.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should fail")]

use oxizero_device::{View, ViewMut};
use oxizero_optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Gradient, Hyper, Lion, LionOptions, MomentOptions,
    Momentum, Optimizer, Sgd, Weights,
};
use proptest::prelude::*;

const PLAIN: Hyper = Hyper { lr: 1.0, weight_decay: 0.0 };

/// One parameter of one element, without model weights beside the master.
struct Element {
    weight: f32,
    states: Vec<f32>,
    step: u64,
}

impl Element {
    fn new(optimizer: &dyn Optimizer, weight: f32) -> Self {
        Self {
            weight,
            states: vec![optimizer.initial_state(); optimizer.state_names().len()],
            step: 0,
        }
    }

    fn update(&mut self, optimizer: &dyn Optimizer, hyper: Hyper, grad: f32) {
        self.update_scaled(optimizer, hyper, (grad, 1.0, 1.0));
    }

    /// Takes value, divisor and clip factor.
    fn update_scaled(
        &mut self,
        optimizer: &dyn Optimizer,
        hyper: Hyper,
        (value, divisor, factor): (f32, f32, f32),
    ) {
        self.step += 1;
        let grad = Gradient { values: View::F32(&[value]), divisor, factor };
        let mut states: Vec<_> = self.states.chunks_mut(1).map(ViewMut::F32).collect();
        let master = ViewMut::F32(std::slice::from_mut(&mut self.weight));
        let weights = Weights { master, states: &mut states, model: None };
        optimizer.update(hyper, self.step, grad, weights);
    }
}

fn sgd() -> Sgd {
    Sgd::new(Momentum::None).unwrap()
}

fn every_rule() -> Vec<Box<dyn Optimizer>> {
    vec![
        Box::new(Adam::new(MomentOptions::default()).unwrap()),
        Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        Box::new(Lion::new(LionOptions::default()).unwrap()),
        Box::new(Adagrad::new(AdagradOptions::default()).unwrap()),
        Box::new(sgd()),
        Box::new(Sgd::new(Momentum::Classical(0.9)).unwrap()),
        Box::new(Sgd::new(Momentum::Nesterov(0.9)).unwrap()),
    ]
}

/// Adam as its paper has it, in f64, with no zero but zero.
struct Textbook {
    weight: f64,
    first: f64,
    second: f64,
    step: i32,
}

impl Textbook {
    fn update(&mut self, options: MomentOptions, hyper: Hyper, grad: f32) {
        let MomentOptions { beta1, beta2, eps } = options;
        let grad = f64::from(grad);
        self.step += 1;
        self.weight -= hyper.lr * hyper.weight_decay * self.weight;
        self.first = beta1 * self.first + (1.0 - beta1) * grad;
        self.second = beta2 * self.second + (1.0 - beta2) * grad * grad;
        let first = self.first / (1.0 - beta1.powi(self.step));
        let second = self.second / (1.0 - beta2.powi(self.step));
        self.weight -= hyper.lr * first / (second.sqrt() + eps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Tolerance: a step is at most a few learning rates, each a dozen roundings of 2^-24.
    #[test]
    fn adamw_agrees_with_its_paper(
        grads in prop::collection::vec(-1.0_f32..1.0, 1..50), weight in -2.0_f32..2.0,
    ) {
        let options = MomentOptions::default();
        let optimizer = AdamW::new(options).unwrap();
        let hyper = Hyper { lr: 0.01, weight_decay: 0.1 };
        let mut element = Element::new(&optimizer, weight);
        let mut book = Textbook { weight: f64::from(weight), first: 0.0, second: 0.0, step: 0 };
        for grad in grads {
            element.update(&optimizer, hyper, grad);
            book.update(options, hyper, grad);
            let error = (f64::from(element.weight) - book.weight).abs();
            prop_assert!(error < 2.0e-5, "{} is not {}", element.weight, book.weight);
        }
    }

    /// Steps that are far from their learning rate show what is lost by taking numbers for zero.
    #[test]
    fn what_counts_as_zero_would_not_have_moved_a_weight(
        exponents in prop::collection::vec(-149..-20, 1..12), scale in 1.0_f64..2.0,
    ) {
        let options = MomentOptions { eps: 2.0_f64.powi(-50), ..MomentOptions::default() };
        let optimizer = AdamW::new(options).unwrap();
        let mut element = Element::new(&optimizer, 0.0);
        let mut book = Textbook { weight: 0.0, first: 0.0, second: 0.0, step: 0 };
        for (exponent, taken) in exponents.into_iter().zip(1..) {
            let grad = (scale * 2.0_f64.powi(exponent)) as f32;
            element.update(&optimizer, PLAIN, grad);
            book.update(options, PLAIN, grad);
            let error = (f64::from(element.weight) - book.weight).abs();
            prop_assert!(error < f64::from(taken) * 2.0_f64.powi(-8), "{error} after {taken}");
        }
    }

    #[test]
    fn states_are_never_denormal(
        grads in prop::collection::vec((-149..10, -2.0_f64..2.0), 1..20), decay in 0.0..0.1_f64,
    ) {
        for optimizer in every_rule() {
            let mut element = Element::new(&*optimizer, 1.0);
            let hyper = Hyper { lr: 0.001, weight_decay: decay };
            for (exponent, scale) in &grads {
                element.update(&*optimizer, hyper, (scale * 2.0_f64.powi(*exponent)) as f32);
                prop_assert!(element.states.iter().all(|state| !state.is_subnormal()));
            }
        }
    }
}

#[test]
fn moments_of_an_element_without_gradients_end_at_zero() {
    let rules = every_rule();
    for optimizer in rules.iter().filter(|rule| rule.state_names() != ["sum"]) {
        let mut element = Element::new(&**optimizer, 1.0);
        element.update(&**optimizer, PLAIN, 1.0);
        for _ in 0..100_000 {
            element.update(&**optimizer, PLAIN, 0.0);
            assert!(element.states.iter().all(|state| !state.is_subnormal()));
        }
        assert!(element.states.iter().all(|state| state.to_bits() == 0), "{:?}", element.states);
    }
}

#[test]
fn adams_first_step_is_the_learning_rate_whatever_the_gradient() {
    for grad in [1.0e-3, 1.0, 1.0e6] {
        let optimizer = Adam::new(MomentOptions::default()).unwrap();
        let mut element = Element::new(&optimizer, 0.0);
        element.update(&optimizer, Hyper { lr: 0.25, weight_decay: 0.0 }, grad);
        assert!((element.weight + 0.25).abs() < 1.0e-5, "{}", element.weight);
    }
}

#[test]
fn a_gradient_is_divided_then_multiplied() {
    let moved = |value, divisor, factor| {
        let mut element = Element::new(&sgd(), 0.0);
        element.update_scaled(&sgd(), PLAIN, (value, divisor, factor));
        -element.weight
    };
    assert_eq!(moved(3.0, 3.0, 1.0), 1.0);
    for count in 1..100_u8 {
        let count = f32::from(count);
        assert_eq!(moved(7.0, count, 1.0), 7.0 / count);
        assert_eq!(moved(7.0, count, 0.3), 7.0 / count * 0.3);
    }
}

#[test]
fn a_gradient_counts_as_zero_by_its_size_after_division_and_clipping() {
    let moved = |value, divisor, factor| {
        let mut element = Element::new(&sgd(), 0.0);
        element.update_scaled(&sgd(), PLAIN, (value, divisor, factor));
        element.weight != 0.0
    };
    let tiny = 2.0_f32.powi(-100);
    assert!(moved(tiny, 1.0, 1.0) && !moved(tiny / 2.0, 1.0, 1.0));
    assert!(moved(tiny * 8.0, 8.0, 1.0) && !moved(tiny * 4.0, 8.0, 1.0));
    assert!(moved(tiny * 4.0, 1.0, 0.25) && !moved(tiny * 2.0, 1.0, 0.25));
    assert!(moved(tiny * 16.0, 8.0, 0.5) && !moved(tiny * 8.0, 8.0, 0.5));
    assert!(!moved(1.0, 1.0, 0.0));
}

#[test]
fn a_nan_is_not_taken_for_zero() {
    for optimizer in every_rule() {
        let mut element = Element::new(&*optimizer, 1.0);
        element.update(&*optimizer, PLAIN, f32::NAN);
        assert!(element.weight.is_nan());
    }
}

#[test]
#[should_panic(expected = "the gradient's length")]
fn a_gradient_of_another_length_is_refused() {
    let grad = Gradient { values: View::F32(&[1.0, 2.0]), divisor: 1.0, factor: 1.0 };
    sgd().update(
        PLAIN,
        1,
        grad,
        Weights { master: ViewMut::F32(&mut [0.0]), states: &mut [], model: None },
    );
}

#[test]
#[should_panic(expected = "one state is given for each")]
fn missing_states_are_refused() {
    let optimizer = AdamW::new(MomentOptions::default()).unwrap();
    let grad = Gradient { values: View::F32(&[1.0]), divisor: 1.0, factor: 1.0 };
    optimizer.update(
        PLAIN,
        1,
        grad,
        Weights { master: ViewMut::F32(&mut [0.0]), states: &mut [], model: None },
    );
}
