//! Burn modules as segments: the same numbers as burn alone, in the engine's memory.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use std::collections::HashMap;
use std::sync::Mutex;

use burn::backend::Flex;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Gradients, Tensor};
use common::mlp::{Batch, Plain, SMALL, Size};
use common::{Grads, Weights, infer, keep, recompute, scalar, values};
use oxizero_burn::{BurnError, Context, Layer, Model, ModelBuilder, Source};
use oxizero_core::{DType, OptimGroup, UnitId};

/// Loss and gradients of the model by burn alone, by parameter name.
fn plain_burn(plain: Plain, batch: &Batch) -> (f32, HashMap<String, Vec<f32>>) {
    let context = Context { batch, draw: common::draw(Some(1), 0) };
    let mut value = plain.embed.start(&context);
    for block in &plain.blocks {
        value = block.run(&context, value);
    }
    let loss = plain.head.run(&context, value);
    let mut collect = Collect { grads: loss.backward(), path: Vec::new(), found: HashMap::new() };
    collect.module("ends", &plain.head);
    for (index, block) in plain.blocks.iter().enumerate() {
        collect.module(&format!("block.{index}"), block);
    }
    (scalar(loss.inner()), collect.found)
}

struct Collect {
    grads: Gradients,
    path: Vec<String>,
    found: HashMap<String, Vec<f32>>,
}

impl Collect {
    fn module(&mut self, prefix: &str, module: &impl Module) {
        self.path = vec![prefix.into()];
        module.visit(self);
    }
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = param.grad_remove(&mut self.grads).unwrap();
        self.found.insert(self.path.join("."), values(grad));
    }
}

fn assert_same(model: &Model<Batch>, grads: &Grads, expected: &HashMap<String, Vec<f32>>) {
    assert_eq!(model.specs.len(), expected.len());
    for spec in &model.specs {
        let grad = grads.named(&model.specs, &spec.name).unwrap();
        let expected = &expected[&spec.name];
        assert!(expected.iter().any(|value| value.abs() > 1e-3), "{} is trivial", spec.name);
        assert!(grad == expected, "{} differs", spec.name);
    }
}

#[test]
fn gradients_are_burns_own_to_the_bit() {
    let batch = SMALL.batch();
    let plain = Plain::new(&SMALL, 3);
    let model = SMALL.model(DType::F32, DType::F32);
    let weights = plain.weights(&model);
    let (expected_loss, expected) = plain_burn(plain, &batch);
    for (loss, grads) in [keep(&model, &weights, &batch, 1), recompute(&model, &weights, &batch, 1)]
    {
        assert_eq!(loss, expected_loss);
        assert_same(&model, &grads, &expected);
    }
}

#[test]
fn narrow_weights_are_widened_and_their_gradients_are_wide() {
    let batch = SMALL.batch();
    let wide = SMALL.model(DType::F32, DType::F32);
    let narrow = SMALL.model(DType::Bf16, DType::F32);
    let narrow_weights = Plain::new(&SMALL, 3).weights(&narrow);
    let rounded = |spec: &oxizero_core::ParamSpec, target: &mut [f32]| {
        let unit = &narrow_weights.0[spec.unit.0];
        let mut members = narrow.specs.iter().filter(|other| other.unit == spec.unit);
        let index = members.position(|other| other.name == spec.name).unwrap();
        let oxizero::GradView::Bf16(values) = unit.params[index].view() else { panic!() };
        target.iter_mut().zip(values).for_each(|(t, v)| *t = v.to_f32());
    };
    let wide_weights = Weights::new(&wide.specs, rounded);
    let (wide_loss, wide_grads) = keep(&wide, &wide_weights, &batch, 1);
    let (loss, grads) = recompute(&narrow, &narrow_weights, &batch, 1);
    assert_eq!(loss, wide_loss);
    assert!(grads.sums == wide_grads.sums);
    assert!(grads.log.iter().all(|(_, _, dtype)| *dtype == DType::F32));
}

#[test]
fn a_bf16_model_computes_in_bf16() {
    let batch = SMALL.batch();
    let model = SMALL.model(DType::Bf16, DType::Bf16);
    let weights = Plain::new(&SMALL, 3).weights(&model);
    let (loss, grads) = keep(&model, &weights, &batch, 1);
    let (loss_again, grads_again) = recompute(&model, &weights, &batch, 1);
    assert_eq!(loss, loss_again);
    assert!(grads.sums == grads_again.sums);
    assert!(grads.log.iter().all(|(_, _, dtype)| *dtype == DType::Bf16));
}

#[test]
fn gradients_come_last_segment_first_in_declared_order() {
    let model = SMALL.model(DType::F32, DType::F32);
    let weights = Plain::new(&SMALL, 3).weights(&model);
    let (_, grads) = keep(&model, &weights, &SMALL.batch(), 1);
    let order: Vec<_> = grads.log.iter().map(|(unit, index, _)| (*unit, *index)).collect();
    let block = |unit| (0..6).map(move |index| (unit, index));
    // Unit 0 is the table (0) and the head's norm (1, 2); the head visits its norm first.
    let head = [(0, 1), (0, 2), (0, 0)];
    let expected: Vec<_> =
        head.into_iter().chain((1..=3).rev().flat_map(block)).chain([(0, 0)]).collect();
    assert_eq!(order, expected);
}

#[test]
fn specs_say_name_unit_group_and_contributions() {
    let model = SMALL.model(DType::Bf16, DType::F32);
    let said: Vec<_> = model.specs[..4]
        .iter()
        .map(|spec| (spec.name.as_str(), spec.unit.0, spec.group.0, spec.contributions))
        .collect();
    let expected = [
        ("ends.wte.weight", 0, 0, 2),
        ("ends.norm.gamma", 0, 1, 1),
        ("ends.norm.beta", 0, 1, 1),
        ("block.0.norm.gamma", 1, 1, 1),
    ];
    assert_eq!(said, expected);
    assert_eq!(model.specs[0].shape, [97, 64]);
    assert!(model.specs.iter().all(|spec| spec.dtype == DType::Bf16));
    let units: Vec<_> = model.chain.iter().map(|(unit, _)| unit.0).collect();
    assert_eq!(units, [0, 1, 2, 3, 0]);
}

#[test]
fn a_frozen_parameter_gets_no_gradient_and_changes_no_other() {
    let batch = SMALL.batch();
    let model = SMALL.model(DType::F32, DType::F32);
    let mut weights = Plain::new(&SMALL, 3).weights(&model);
    let (_, all) = keep(&model, &weights, &batch, 1);
    weights.0[2].params[2].trainable = false;
    let (_, grads) = recompute(&model, &weights, &batch, 1);
    assert!(!grads.log.iter().any(|(unit, index, _)| (*unit, *index) == (2, 2)));
    assert_eq!(grads.log.len(), all.log.len() - 1);
    for (unit, (some, all)) in grads.sums.iter().zip(&all.sums).enumerate() {
        for (index, (some, all)) in some.iter().zip(all).enumerate() {
            assert!((unit, index) == (2, 2) || some == all);
        }
    }
}

#[test]
fn a_wholly_frozen_model_is_run_without_error() {
    let model = SMALL.model(DType::F32, DType::F32);
    let mut weights = Plain::new(&SMALL, 3).weights(&model);
    weights.0.iter_mut().flat_map(|unit| &mut unit.params).for_each(|p| p.trainable = false);
    let (_, grads) = recompute(&model, &weights, &SMALL.batch(), 1);
    assert!(grads.log.is_empty());
}

/// Notes where its weight lies.
#[derive(Module, Debug)]
struct Witness {
    weight: Param<Tensor<2>>,
    empty: Param<Tensor<2>>,
}

/// A parameter that must never be initialised.
fn never<const D: usize>(shape: [usize; D]) -> Param<Tensor<D>> {
    let init = |_: &Device, _| panic!("a template was initialised");
    Param::uninitialized(ParamId::new(), init, Device::flex(), true, shape.into())
}

impl Source<Mutex<Vec<usize>>> for Witness {
    fn start(&self, context: &Context<'_, Mutex<Vec<usize>>>) -> Tensor<3> {
        for tensor in [&self.weight, &self.empty] {
            let raw = tensor.val().inner().try_into_primitive::<Flex>().unwrap();
            context.batch.lock().unwrap().push(raw.bytes().as_ptr() as usize);
        }
        (self.weight.val() * 2.0).sum().reshape([1, 1, 1])
    }
}

#[test]
fn weights_are_the_engines_memory_and_templates_stay_empty() {
    let module = Witness { weight: never([3, 5]), empty: never([0, 8]) };
    for dtype in [DType::F32, DType::Bf16] {
        let model = ModelBuilder::new(dtype, dtype, &Device::flex())
            .source(UnitId(0), "", module.clone())
            .build()
            .unwrap();
        let weights = Weights::new(&model.specs, |_, values| values.fill(1.5));
        let seen = Mutex::new(Vec::new());
        infer(&model, &weights, &seen, None);
        infer(&model, &weights, &seen, Some(1));
        let (loss, grads) = keep(&model, &weights, &seen, 1);
        assert_eq!(loss, 45.0);
        assert_eq!(grads.sums, [vec![vec![2.0; 15]]]);
        let bucket = &weights.0[0].params[0].bucket;
        let start = bucket.region().start().addr().get();
        let seen = seen.into_inner().unwrap();
        assert_eq!(seen.len(), 6);
        assert!(seen.iter().step_by(2).all(|address| *address == start));
        assert_eq!(bucket.view().range(0..15).bytes(), weights.0[0].params[0].view().bytes());
        assert!(weights.0[0].params[0].view().bytes().chunks(dtype.size()).all(|element| {
            element == if dtype == DType::F32 { &[0, 0, 0xC0, 0x3F][..] } else { &[0xC0, 0x3F] }
        }));
    }
    assert!(!module.weight.is_initialized() && !module.empty.is_initialized());
}

/// Uses one parameter under two names.
#[derive(Module, Debug)]
struct Twice {
    first: Param<Tensor<1>>,
    second: Param<Tensor<1>>,
}

impl Source<[f32; 2]> for Twice {
    fn start(&self, context: &Context<'_, [f32; 2]>) -> Tensor<3> {
        let [a, b] = *context.batch;
        (self.first.val() * a + self.second.val() * b).sum().reshape([1, 1, 1])
    }
}

#[test]
fn a_parameter_used_twice_in_a_module_is_one_parameter() {
    let weight = never([1]);
    let module = Twice { first: weight.clone(), second: weight };
    let model = ModelBuilder::new(DType::F32, DType::F32, &Device::flex())
        .source(UnitId(0), "m", module)
        .build()
        .unwrap();
    assert_eq!(model.specs.len(), 1);
    assert_eq!((model.specs[0].name.as_str(), model.specs[0].contributions), ("m.first", 2));
    let weights = Weights::new(&model.specs, |_, values| values.fill(10.0));
    let (loss, grads) = keep(&model, &weights, &[1.0, 2.0], 1);
    assert_eq!((loss, &grads.sums[0][0]), (30.0, &vec![3.0]));
    assert_eq!(grads.log.len(), 2);
}

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
}

impl Layer<Batch> for Normed {
    fn run(&self, _: &Context<'_, Batch>, input: Tensor<3>) -> Tensor<3> {
        self.norm.forward(input)
    }
}

#[test]
fn running_statistics_are_refused() {
    let device = Device::flex();
    let module = Normed { norm: BatchNormConfig::new(4).init(&device) };
    let built = ModelBuilder::<Batch>::new(DType::F32, DType::F32, &device)
        .layer(UnitId(0), "", module)
        .build();
    let Err(BurnError::NotTrained { name }) = built else { panic!("{built:?}") };
    assert_eq!(name, "norm.running_mean");
}

#[test]
fn a_tie_across_units_or_shapes_is_refused() {
    let device = Device::flex();
    let builder = |second: UnitId, size: Size| {
        let built = ModelBuilder::<Batch>::new(DType::F32, DType::F32, &device)
            .source(UnitId(0), "ends", SMALL.embed(&device))
            .source(second, "ends", size.embed(&device))
            .build();
        built.unwrap_err().to_string()
    };
    let error = builder(UnitId(1), SMALL);
    assert!(error.contains("`ends.wte.weight` is used in unit 0 and in unit 1"), "{error}");
    let error = builder(UnitId(0), Size { hidden: 8, ..SMALL });
    assert!(error.contains("[97, 64]") && error.contains("[97, 8]"), "{error}");
}

#[test]
fn specs_are_adjusted_before_they_are_fixed() {
    let model = ModelBuilder::<Batch>::new(DType::Bf16, DType::F32, &Device::flex())
        .adjust(|spec| {
            spec.trainable = !spec.name.ends_with("bias");
            spec.dtype = if spec.name.contains("norm") { DType::F32 } else { spec.dtype };
            spec.group = OptimGroup(7);
        })
        .layer(UnitId(0), "", SMALL.mlp(&Device::flex()))
        .build()
        .unwrap();
    let said: Vec<_> = model.specs.iter().map(|spec| (spec.trainable, spec.dtype)).collect();
    let (norm, weight, bias) = ((true, DType::F32), (true, DType::Bf16), (false, DType::Bf16));
    assert_eq!(said, [norm, norm, weight, bias, weight, bias]);
    assert!(model.specs.iter().all(|spec| spec.group == OptimGroup(7)));
}

#[test]
fn a_module_that_is_no_chain_trains_as_one_segment() {
    let device = Device::flex();
    let loss = |linear: &Linear, context: &Context<'_, Tensor<3>>| {
        linear.forward(context.batch.clone()).mean()
    };
    let linear = LinearConfig::new(2, 4).init(&device);
    let model = ModelBuilder::new(DType::F32, DType::F32, &device).whole(linear, loss).unwrap();
    let names: Vec<_> = model.specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!((names, model.chain.len()), (vec!["weight", "bias"], 1));
    let weights = Weights::new(&model.specs, |_, values| values.fill(0.5));
    let input = Tensor::<1>::from_floats([1.0, 3.0, 5.0, 7.0], &device).reshape([1, 2, 2]);
    let (loss, grads) = keep(&model, &weights, &input, 1);
    assert_eq!(loss, 4.5); // the mean of 0.5 * (1 + 3) + 0.5 and 0.5 * (5 + 7) + 0.5
    assert_eq!(grads.sums[0][1], [0.25; 4]);
    assert_eq!(grads.sums[0][0], [0.75, 0.75, 0.75, 0.75, 1.25, 1.25, 1.25, 1.25]);
}

#[test]
fn gradients_do_not_depend_on_the_number_of_threads() {
    // Large enough that burn splits products, sums and activations over threads.
    let size = Size { hidden: 128, vocabulary: 512, blocks: 1, batch: [8, 256] };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let model = size.model(DType::F32, DType::F32);
            let weights = Weights::new(&model.specs, |spec, values| {
                let mut random = oxizero_core::Random::new(spec.name.len() as u64);
                values.fill_with(|| 0.1 * random.normal());
            });
            let (loss, grads) = keep(&model, &weights, &size.batch(), 1);
            (loss, grads.sums)
        })
    };
    let one = run(1);
    assert!(run(2) == one);
    assert!(run(5) == one);
}
