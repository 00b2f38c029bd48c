//! Drives a chain of segments: walks it forward and backward, and makes the engine's calls.

use oxizero_core::{ConfigError, LossScale, ParamId, Placement, Random, UnitId};

use crate::segment::{Draw, GradSink, Input, OutputGrad, Segment};
use crate::{Engine, EngineError, GradIn, GradView};

/// A model: segments in forward order, each with the unit that holds its weights. Two segments may
/// name one unit: a head that is tied to the embedding. The last segment's output is the loss.
pub struct Chain<S> {
    links: Vec<Link<S>>,
}

/// One segment of a chain.
pub struct Link<S> {
    /// Whose weights the segment reads.
    pub unit: UnitId,
    /// The segment.
    pub segment: S,
}

/// What forward keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Every segment's tape.
    Never,
    /// Every segment's input; backward runs forward again, a segment at a time.
    Always,
}

impl<S: Segment> Chain<S> {
    /// A chain of these segments.
    ///
    /// # Panics
    ///
    /// If there are none.
    pub fn new(links: Vec<Link<S>>) -> Self {
        assert!(!links.is_empty(), "a chain without segments");
        Self { links }
    }

    /// The segments.
    pub fn links(&self) -> &[Link<S>] {
        &self.links
    }

    /// The order in which forward uses the units, for [`Engine::new`].
    pub fn order(&self) -> Vec<UnitId> {
        self.links.iter().map(|link| link.unit).collect()
    }

    /// Runs one micro-batch forward and backward, and returns its loss. `seed` decides random
    /// draws; give every rank and micro-batch its own. The caller then calls [`Engine::step`].
    pub fn train(
        &self,
        engine: &mut Engine,
        batch: &S::Batch,
        recompute: Recompute,
        seed: u64,
    ) -> Result<S::Value, EngineError> {
        let loss = match recompute {
            Recompute::Never => self.train_with_tapes(engine, batch, seed)?,
            Recompute::Always => self.train_again(engine, batch, seed)?,
        };
        engine.backward_end()?;
        Ok(loss)
    }

    /// The loss of one batch, without random draws and without gradients.
    pub fn evaluate(&self, engine: &mut Engine, batch: &S::Batch) -> Result<S::Value, EngineError> {
        engine.beside_the_step(|engine| {
            let mut value = None;
            for link in &self.links {
                value = Some(infer(engine, link, batch, value, Draw { seed: None })?);
            }
            Ok(value.expect("a chain has segments"))
        })
    }

    fn ends(&self) -> (&Link<S>, &[Link<S>]) {
        self.links.split_last().expect("new() refuses an empty chain")
    }

    fn train_with_tapes(
        &self,
        engine: &mut Engine,
        batch: &S::Batch,
        seed: u64,
    ) -> Result<S::Value, EngineError> {
        if engine.options().stage.model() == Placement::Sharded {
            // Each tape would keep its segment's gathered weights alive until backward.
            return Err(EngineError::Config(ConfigError::Conflict {
                first: "stage = 3".into(),
                second: "recompute = never".into(),
                advice: "tapes keep every gathered weight; use recompute = always, or stage 2"
                    .into(),
            }));
        }
        let (mut value, mut tapes) = (None, Vec::with_capacity(self.links.len()));
        for (index, link) in self.links.iter().enumerate() {
            engine.pre_forward(link.unit)?;
            let weights = engine.unit_weights(link.unit)?;
            let draw = draw(seed, index);
            let input = Input { weights: &weights, batch, value, draw };
            let (output, tape) = link.segment.forward(input);
            engine.post_forward(link.unit)?;
            tapes.push(tape);
            value = Some(output);
        }
        let mut grad = Some(OutputGrad::Loss(engine.loss_scale()));
        for (link, tape) in self.links.iter().zip(tapes).rev() {
            engine.pre_backward(link.unit)?;
            grad = backward(engine, link, tape, grad)?;
            engine.post_backward(link.unit)?;
        }
        Ok(value.expect("a chain has segments"))
    }

    /// Keeps only segment inputs. The last segment runs forward once, in backward.
    fn train_again(
        &self,
        engine: &mut Engine,
        batch: &S::Batch,
        seed: u64,
    ) -> Result<S::Value, EngineError> {
        let (_, links) = self.ends();
        let mut inputs = vec![None];
        for (index, link) in links.iter().enumerate() {
            let value = inputs[index].clone();
            inputs.push(Some(infer(engine, link, batch, value, draw(seed, index))?));
        }
        let (mut loss, mut grad) = (None, Some(OutputGrad::Loss(engine.loss_scale())));
        for (index, link) in self.links.iter().enumerate().rev() {
            engine.pre_backward(link.unit)?;
            let weights = engine.unit_weights(link.unit)?;
            let value = inputs.pop().expect("one input a segment");
            let input = Input { weights: &weights, batch, value, draw: draw(seed, index) };
            let (output, tape) = link.segment.forward(input);
            drop(weights);
            loss.get_or_insert(output);
            grad = backward(engine, link, tape, grad)?;
            engine.post_backward(link.unit)?;
        }
        Ok(loss.expect("a chain has segments"))
    }
}

fn infer<S: Segment>(
    engine: &mut Engine,
    link: &Link<S>,
    batch: &S::Batch,
    value: Option<S::Value>,
    draw: Draw,
) -> Result<S::Value, EngineError> {
    engine.pre_forward(link.unit)?;
    let weights = engine.unit_weights(link.unit)?;
    let output = link.segment.infer(Input { weights: &weights, batch, value, draw });
    drop(weights);
    engine.post_forward(link.unit)?;
    Ok(output)
}

/// Segments before one that returned no gradient have none to give.
fn backward<S: Segment>(
    engine: &mut Engine,
    link: &Link<S>,
    tape: S::Tape,
    grad: Option<OutputGrad<S::Value>>,
) -> Result<Option<OutputGrad<S::Value>>, EngineError> {
    let Some(grad) = grad else { return Ok(None) };
    let input = link.segment.backward(tape, grad, &mut Sink::new(engine, link.unit)?)?;
    Ok(input.map(OutputGrad::Value))
}

fn draw(seed: u64, segment: usize) -> Draw {
    Draw { seed: Some(Random::for_path(seed, &[segment as u64]).next_u64()) }
}

/// Hands a segment's gradients to the engine.
struct Sink<'a> {
    engine: &'a mut Engine,
    params: Vec<ParamId>,
    loss_scale: LossScale,
}

impl<'a> Sink<'a> {
    fn new(engine: &'a mut Engine, unit: UnitId) -> Result<Self, EngineError> {
        let params = engine.unit_params(unit)?.to_vec();
        let loss_scale = engine.loss_scale();
        Ok(Self { engine, params, loss_scale })
    }
}

impl GradSink for Sink<'_> {
    fn grad(&mut self, index: usize, grad: GradView<'_>) -> Result<(), EngineError> {
        let count = self.params.len();
        let param = self.params.get(index).copied();
        let param = param.ok_or(EngineError::Unknown { what: "parameter", index, count })?;
        let grad = GradIn { values: grad, loss_scale: self.loss_scale };
        self.engine.grad_ready(param, grad)
    }
}
