//! A model as the engine wants it: parameter specs in order, and a chain of segments.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use oxizero::chain::{Chain, Link};
use oxizero_core::{DType, OptimGroup, ParamSpec, UnitId};

use super::block::Block;
use super::template::{Template, Use, template};
use super::{BurnError, Context, Layer, Source};

/// A model: what the engine must know of it, and what it runs.
#[derive(Debug)]
pub struct Model<B> {
    /// Every parameter, unit by unit.
    pub specs: Vec<ParamSpec>,
    /// The segments in forward order, each with the unit that holds its parameters.
    pub chain: Vec<(UnitId, Block<B>)>,
}

impl<B> Model<B> {
    /// What [`Engine::new`](oxizero::Engine::new) takes, and what then trains with it.
    pub fn into_chain(self) -> (Vec<ParamSpec>, Chain<Block<B>>) {
        let link = |(unit, segment)| Link { unit, segment };
        (self.specs, Chain::new(self.chain.into_iter().map(link).collect()))
    }
}

/// Puts a [`Model`] together, segment by segment.
///
/// Modules are templates: their structure is read, their values are not, and what burn would
/// initialise later it never does. Parameters are named by a prefix and their path in the module.
/// Two segments that use the same name share the parameter, and must name the same unit.
pub struct ModelBuilder<B> {
    dtype: DType,
    compute: DType,
    device: Device,
    adjust: Box<dyn Fn(&mut ParamSpec)>,
    pieces: Vec<Piece<B>>,
}

struct Piece<B> {
    unit: UnitId,
    prefix: String,
    template: Box<dyn Template<B>>,
}

impl<B: 'static> ModelBuilder<B> {
    /// A model whose weights are of `dtype`, computed in `compute` on `device`.
    ///
    /// Where the two differ, weights are widened a segment at a time, and gradients are of
    /// `compute`.
    pub fn new(dtype: DType, compute: DType, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self { dtype, compute, device, adjust: Box::new(decay_matrices), pieces: Vec::new() }
    }

    /// Decides what a spec says beyond name, shape and unit: dtype, optimizer group, frozen or
    /// not. [`decay_matrices`] does where nothing else is asked for.
    pub fn adjust(mut self, adjust: impl Fn(&mut ParamSpec) + 'static) -> Self {
        self.adjust = Box::new(adjust);
        self
    }

    /// Adds the first segment.
    pub fn source(self, unit: UnitId, prefix: &str, module: impl Source<B>) -> Self {
        self.piece(unit, prefix, template(module, |module, context, _| module.start(context)))
    }

    /// Adds a segment after the others.
    pub fn layer(self, unit: UnitId, prefix: &str, module: impl Layer<B>) -> Self {
        let run = |module: &_, context: &Context<'_, B>, input: Option<Tensor<3>>| {
            Layer::run(module, context, input.expect("a layer follows a source"))
        };
        self.piece(unit, prefix, template(module, run))
    }

    /// A model that is no chain, as a single segment of one unit; `loss` is its mean loss.
    ///
    /// All its weights and gradients exist together, so that stage 3 saves nothing here.
    pub fn whole<M: Module + 'static>(
        self,
        module: M,
        loss: impl Fn(&M, &Context<'_, B>) -> Tensor<1> + Clone + Send + 'static,
    ) -> Result<Model<B>, BurnError> {
        let run = move |module: &M, context: &Context<'_, B>, _| {
            loss(module, context).reshape([1_usize, 1, 1])
        };
        self.piece(UnitId(0), "", template(module, run)).build()
    }

    /// Reads every parameter's name and shape.
    pub fn build(self) -> Result<Model<B>, BurnError> {
        let uses: Vec<Vec<Use>> =
            self.pieces.iter().map(named_uses).collect::<Result<_, BurnError>>()?;
        let mut specs = self.specs(&uses)?;
        specs.sort_by_key(|spec| spec.unit); // stable: in a unit, the order of first use
        let slots = slots(&specs);
        let Self { compute, device, pieces, .. } = self;
        let block = |(piece, uses): (Piece<B>, Vec<Use>)| {
            let slots = uses.iter().map(|used| slots[&used.name]).collect();
            let (template, device) = (piece.template, device.clone());
            (piece.unit, Block { template, slots, compute, device })
        };
        Ok(Model { specs, chain: pieces.into_iter().zip(uses).map(block).collect() })
    }

    fn piece(mut self, unit: UnitId, prefix: &str, template: Box<dyn Template<B>>) -> Self {
        self.pieces.push(Piece { unit, prefix: prefix.into(), template });
        self
    }

    /// One spec a name, in the order of first use.
    fn specs(&self, uses: &[Vec<Use>]) -> Result<Vec<ParamSpec>, BurnError> {
        let mut specs: Vec<ParamSpec> = Vec::new();
        let mut index_of = HashMap::new();
        for (piece, uses) in self.pieces.iter().zip(uses) {
            for Use { name, shape } in uses {
                let Some(index) = index_of.get(name) else {
                    index_of.insert(name, specs.len());
                    let mut spec = ParamSpec::new(name, shape, self.dtype, piece.unit);
                    (self.adjust)(&mut spec);
                    specs.push(spec);
                    continue;
                };
                let spec: &mut ParamSpec = &mut specs[*index];
                tie(spec, piece.unit, shape)?;
                spec.contributions += 1;
            }
        }
        Ok(specs)
    }
}

/// Weight decay (optimizer group 0) for matrices; none (group 1) for vectors such as the weights
/// of norms.
pub fn decay_matrices(spec: &mut ParamSpec) {
    spec.group = OptimGroup(if spec.shape.len() >= 2 { 0 } else { 1 });
}

fn named_uses<B>(piece: &Piece<B>) -> Result<Vec<Use>, BurnError> {
    let named = |used: Use| match piece.prefix.as_str() {
        "" => used,
        prefix => Use { name: format!("{prefix}.{}", used.name), ..used },
    };
    Ok(piece.template.uses()?.into_iter().map(named).collect())
}

fn tie(spec: &ParamSpec, unit: UnitId, shape: &[usize]) -> Result<(), BurnError> {
    let name = spec.name.clone();
    if spec.unit != unit {
        return Err(BurnError::TiedAcrossUnits { name, first: spec.unit, second: unit });
    }
    if spec.shape != shape {
        let (first, second) = (spec.shape.clone(), shape.to_vec());
        return Err(BurnError::TiedShapes { name, first, second });
    }
    Ok(())
}

/// Each parameter's index in its unit.
fn slots(specs: &[ParamSpec]) -> HashMap<String, usize> {
    let mut slots = HashMap::new();
    for unit in specs.chunk_by(|a, b| a.unit == b.unit) {
        slots.extend(unit.iter().enumerate().map(|(slot, spec)| (spec.name.clone(), slot)));
    }
    slots
}

impl<B> std::fmt::Debug for ModelBuilder<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelBuilder({} segments)", self.pieces.len())
    }
}
