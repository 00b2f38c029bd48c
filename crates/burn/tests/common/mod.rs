//! A stand-in for the engine, small enough to be seen to be right: weights rest in one buffer a
//! unit, and two drivers walk a chain.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

pub mod mlp;

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use oxizero::segment::{Draw, GradSink, Input, OutputGrad, Segment};
use oxizero::{EngineError, GradView, ParamWeights, UnitWeights};
use oxizero_burn::Model;
use oxizero_core::{DType, LossScale, Numel, ParamId, ParamSpec, UnitId};
use oxizero_device::{Buffer, ViewMut};

/// The weights of every unit.
pub struct Weights(pub Vec<UnitWeights>);

impl Weights {
    /// Fills each parameter by `fill`, rounded to the spec's dtype.
    pub fn new(specs: &[ParamSpec], fill: impl Fn(&ParamSpec, &mut [f32])) -> Self {
        let units = specs.iter().map(|spec| spec.unit.0 + 1).max().unwrap_or(0);
        Self((0..units).map(|unit| unit_weights(specs, UnitId(unit), &fill)).collect())
    }

    /// Other memory with the same weights.
    pub fn copy(&self, unit: UnitId) -> UnitWeights {
        let mut copy = self.0[unit.0].clone();
        for param in &mut copy.params {
            let mut bucket = Buffer::heap(param.bucket.numel(), param.bucket.dtype());
            bucket.region_mut().bytes_mut().copy_from_slice(param.bucket.region().bytes());
            param.bucket = Arc::new(bucket);
        }
        copy
    }
}

fn unit_weights(
    specs: &[ParamSpec],
    unit: UnitId,
    fill: &impl Fn(&ParamSpec, &mut [f32]),
) -> UnitWeights {
    let members = || specs.iter().enumerate().filter(|(_, spec)| spec.unit == unit);
    let dtype = members().next().map_or(DType::F32, |(_, spec)| spec.dtype);
    let padded = |spec: &ParamSpec| spec.numel().0.next_multiple_of(64);
    let numel = members().map(|(_, spec)| padded(spec)).sum();
    let mut bucket = Buffer::heap(Numel(numel), dtype);
    let mut start = 0;
    let mut ranges = Vec::new();
    for (_, spec) in members() {
        let range = start..start + spec.numel().0;
        let mut values = vec![0.0; range.len()];
        fill(spec, &mut values);
        write(bucket.range_mut(range.clone()), &values);
        ranges.push(range);
        start += padded(spec);
    }
    let bucket = Arc::new(bucket);
    let param = |((index, spec), elements): ((usize, &ParamSpec), _)| ParamWeights {
        param: ParamId(index),
        bucket: Arc::clone(&bucket),
        elements,
        shape: spec.shape.clone(),
        trainable: spec.trainable,
    };
    UnitWeights { unit, params: members().zip(ranges).map(param).collect() }
}

fn write(target: ViewMut<'_>, values: &[f32]) {
    match target {
        ViewMut::F32(target) => target.copy_from_slice(values),
        ViewMut::Bf16(target) => {
            target.iter_mut().zip(values).for_each(|(t, v)| *t = half::bf16::from_f32(*v));
        }
        ViewMut::F16(target) => {
            target.iter_mut().zip(values).for_each(|(t, v)| *t = half::f16::from_f32(*v));
        }
        ViewMut::Device(_) => unreachable!("burn's tensors lie on the host"),
    }
}

/// Sums gradients in f32, and remembers in which order they came.
#[derive(Default)]
pub struct Grads {
    /// By unit and index in it.
    pub sums: Vec<Vec<Vec<f32>>>,
    /// Every (unit, index, dtype), in the order in which they came.
    pub log: Vec<(usize, usize, DType)>,
    unit: usize,
}

impl Grads {
    fn of_unit(&mut self, unit: UnitId) -> &mut Self {
        self.unit = unit.0;
        self
    }

    /// The gradient of the parameter called `name`, if one came.
    pub fn named(&self, specs: &[ParamSpec], name: &str) -> Option<&Vec<f32>> {
        let spec = specs.iter().find(|spec| spec.name == name)?;
        let mut unit = specs.iter().filter(|other| other.unit == spec.unit);
        let index = unit.position(|other| other.name == name)?;
        self.sums.get(spec.unit.0)?.get(index)
    }
}

impl GradSink for Grads {
    fn grad(&mut self, index: usize, grad: GradView<'_>) -> Result<(), EngineError> {
        let values: Vec<f32> = match grad {
            GradView::F32(values) => values.to_vec(),
            GradView::Bf16(values) => values.iter().map(|v| v.to_f32()).collect(),
            GradView::F16(values) => values.iter().map(|v| v.to_f32()).collect(),
            GradView::Device(_) => unreachable!("burn's tensors lie on the host"),
        };
        self.log.push((self.unit, index, grad.dtype()));
        if self.sums.len() <= self.unit {
            self.sums.resize(self.unit + 1, Vec::new());
        }
        let unit = &mut self.sums[self.unit];
        if unit.len() <= index {
            unit.resize(index + 1, Vec::new());
        }
        match &mut unit[index] {
            sum if sum.is_empty() => *sum = values,
            sum => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
        }
        Ok(())
    }
}

/// Seeds one segment's draws.
pub fn draw(seed: Option<u64>, segment: usize) -> Draw {
    Draw { seed: seed.map(|seed| seed * 1000 + segment as u64) }
}

/// Runs forward alone.
pub fn infer<B>(model: &Model<B>, weights: &Weights, batch: &B, seed: Option<u64>) -> Tensor<3> {
    let mut value = None;
    for (index, (unit, segment)) in model.chain.iter().enumerate() {
        let weights = &weights.0[unit.0];
        value = Some(segment.infer(Input { weights, batch, value, draw: draw(seed, index) }));
    }
    value.unwrap()
}

/// One micro-batch with all tapes kept, as in stages 0 to 2. Returns the loss.
pub fn keep<B>(model: &Model<B>, weights: &Weights, batch: &B, seed: u64) -> (f32, Grads) {
    let (mut value, mut tapes) = (None, Vec::new());
    for (index, (unit, segment)) in model.chain.iter().enumerate() {
        let weights = &weights.0[unit.0];
        let input = Input { weights, batch, value, draw: draw(Some(seed), index) };
        let (output, tape) = segment.forward(input);
        tapes.push(tape);
        value = Some(output);
    }
    let loss = scalar(value.unwrap());
    let (mut grads, mut grad) = (Grads::default(), Some(OutputGrad::Loss(LossScale::ONE)));
    for ((unit, segment), tape) in model.chain.iter().zip(tapes).rev() {
        let input = segment.backward(tape, grad.unwrap(), grads.of_unit(*unit)).unwrap();
        grad = input.map(OutputGrad::Value);
    }
    assert!(grad.is_none());
    (loss, grads)
}

/// One micro-batch of which only segments' inputs are kept, as in stage 3: every use of a unit
/// sees its weights in other memory, which nothing refers to afterwards.
pub fn recompute<B>(model: &Model<B>, weights: &Weights, batch: &B, seed: u64) -> (f32, Grads) {
    let mut inputs = vec![None];
    let rest = model.chain.len() - 1;
    for (index, (unit, segment)) in model.chain[..rest].iter().enumerate() {
        let gathered = weights.copy(*unit);
        let value = inputs[index].clone();
        let input = Input { weights: &gathered, batch, value, draw: draw(Some(seed), index) };
        inputs.push(Some(segment.infer(input)));
        assert_released(gathered);
    }
    let (mut loss, mut grads) = (f32::NAN, Grads::default());
    let mut grad = Some(OutputGrad::Loss(LossScale::ONE));
    let chain = model.chain.iter().enumerate().zip(inputs);
    for ((index, (unit, segment)), value) in chain.rev() {
        let gathered = weights.copy(*unit);
        let input = Input { weights: &gathered, batch, value, draw: draw(Some(seed), index) };
        let (output, tape) = segment.forward(input);
        if index == rest {
            loss = scalar(output);
        }
        let input = segment.backward(tape, grad.unwrap(), grads.of_unit(*unit)).unwrap();
        grad = input.map(OutputGrad::Value);
        assert_released(gathered);
    }
    (loss, grads)
}

fn assert_released(gathered: UnitWeights) {
    for param in gathered.params {
        let ParamWeights { param, bucket, .. } = param;
        assert_eq!(Arc::strong_count(&bucket), 1, "{param:?} is still viewed");
    }
}

/// A loss as a number.
pub fn scalar(value: Tensor<3>) -> f32 {
    value.into_scalar::<f32>()
}

/// A tensor's elements.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

/// Token ids of any numbers.
pub fn ids(numbers: Vec<i64>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(numbers, shape), device)
}
