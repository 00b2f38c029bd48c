//! A whole model's gradients, as named views of one flat copy for each process group and dtype.

use std::fmt;
use std::ops::Range;

use oxizero_comm::OwnShard;
use oxizero_core::{Bytes, DType, Numel, ParamId, ParamSpec, Rank, WorldSize};
use oxizero_device::{Buffer, Storage, View, ViewMut};

use crate::EngineError;

/// By parameter, in their order: the norm of its gradient; `None` for a frozen one.
pub type GradNorms = Vec<Option<f64>>;

/// Which tensors a whole gradient is that of, where the mesh holds tensors in parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Those that this rank's [`ParamSpec`]s describe: a tensor-parallel part, this rank's expert.
    #[default]
    DataParallel,
    /// The same on all ranks: parts are put together, and tensors of ranks' own are stacked along
    /// new first dimensions.
    Global,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DataParallel => "data-parallel",
            Self::Global => "global",
        })
    }
}

/// The whole gradients of a model's parameters on one rank: a copy, which the engine does not
/// change. Hand it back edited with [`Engine::set_full_grads`](crate::Engine::set_full_grads), or
/// to be filled anew with [`Engine::full_grads_into`](crate::Engine::full_grads_into).
#[derive(Debug, Default)]
pub struct ModelGrads {
    scope: Scope,
    params: Vec<Named>,
    flats: Vec<Buffer>,
    /// By parameter: the flat copy that holds it, and where; `None` for a frozen one.
    places: Vec<Option<(usize, Range<usize>)>>,
}

#[derive(Debug)]
struct Named {
    /// All that it has.
    names: Vec<String>,
    shape: Vec<usize>,
    /// Some rank used it in the window, or the caller was given its gradient for writing.
    used: bool,
}

impl ModelGrads {
    /// Without gradients; `shape` is that which a parameter's has, `used` whether a rank used it.
    pub(crate) fn new(
        scope: Scope,
        specs: &[ParamSpec],
        shape: impl Fn(&ParamSpec) -> Vec<usize>,
        used: impl Fn(ParamId) -> bool,
    ) -> Self {
        let named = |(index, spec): (usize, &ParamSpec)| Named {
            names: spec.names().map(String::from).collect(),
            shape: shape(spec),
            used: used(ParamId(index)),
        };
        let params = specs.iter().enumerate().map(named).collect();
        Self { scope, params, flats: Vec::new(), places: vec![None; specs.len()] }
    }

    /// Which tensors the gradients are those of.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// A parameter's gradient, row-major; `None` for a frozen one, and for an index that the engine
    /// was never given.
    pub fn get(&self, param: ParamId) -> Option<View<'_>> {
        let (flat, elements) = self.places.get(param.0)?.as_ref()?;
        Some(self.flats[*flat].range(elements.clone()))
    }

    /// The same, for writing. A parameter that nobody used counts as used from then on.
    pub fn get_mut(&mut self, param: ParamId) -> Option<ViewMut<'_>> {
        let (flat, elements) = self.places.get(param.0)?.as_ref()?;
        self.params[param.0].used = true;
        Some(self.flats[*flat].range_mut(elements.clone()))
    }

    /// The name of a parameter; `None` for an index that the engine was never given.
    pub fn name(&self, param: ParamId) -> Option<&str> {
        self.params.get(param.0).and_then(|param| param.names.first()).map(String::as_str)
    }

    /// The shape of a parameter's gradient, frozen ones' too; `None` for an index that the engine
    /// was never given.
    pub fn shape(&self, param: ParamId) -> Option<&[usize]> {
        self.params.get(param.0).map(|param| param.shape.as_slice())
    }

    /// The parameter with this name, one of several if it is tied, or an error that names it.
    pub fn param(&self, name: &str) -> Result<ParamId, EngineError> {
        let has = |known: &Named| known.names.iter().any(|known| known == name);
        param_named(name, self.params.iter().position(has))
    }

    /// Every gradient, in the order of the parameters.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, View<'_>)> {
        let params = (0..self.places.len()).map(ParamId);
        params.filter_map(|param| Some((param, self.get(param)?)))
    }

    /// The bytes that all gradients take.
    pub fn bytes(&self) -> Bytes {
        self.flats.iter().map(Buffer::len).sum()
    }

    /// Whether an optimizer is to see the gradient.
    pub(crate) fn is_used(&self, param: ParamId) -> bool {
        self.params[param.0].used
    }

    /// The memory alone.
    pub(crate) fn into_memory(self) -> Memory {
        Memory(self.flats)
    }

    pub(crate) fn add(&mut self, flat: Buffer) -> usize {
        self.flats.push(flat);
        self.flats.len() - 1
    }

    pub(crate) fn place(&mut self, param: ParamId, flat: usize, elements: Range<usize>) {
        self.places[param.0] = Some((flat, elements));
    }

    /// Frees what follows the last parameter in each flat copy.
    pub(crate) fn trim(&mut self) {
        for (index, flat) in self.flats.iter_mut().enumerate() {
            let places = self.places.iter().flatten().filter(|(holder, _)| *holder == index);
            let end = places.map(|(_, elements)| elements.end).max().unwrap_or(0);
            if end < flat.numel().0 {
                *flat = Buffer::copy_of(flat.range(0..end));
            }
        }
    }

    /// The stretches of flat copies that hold `params`, nothing else lying between them, as they
    /// are gathered from so many ranks; and the elements of all ranks' together.
    pub(crate) fn stretches(&self, params: &[ParamId], ranks: WorldSize) -> (Vec<Stretch>, Numel) {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (flat, at) in params.iter().filter_map(|param| self.places[param.0].as_ref()) {
            match stretches.iter_mut().find(|stretch| stretch.flat == *flat) {
                Some(stretch) => {
                    let own = &stretch.own;
                    stretch.own = own.start.min(at.start)..own.end.max(at.end);
                }
                None => stretches.push(Stretch { flat: *flat, own: at.clone(), gathered: 0 }),
            }
        }
        let mut end = 0;
        for stretch in &mut stretches {
            stretch.gathered = end;
            end += stretch.own.len() * ranks.get();
        }
        (stretches, Numel(end))
    }

    /// Where the elements of `param` that rank `part` holds lie, once these stretches are gathered.
    pub(crate) fn gathered(
        &self,
        param: ParamId,
        part: Rank,
        stretches: &[Stretch],
    ) -> Range<usize> {
        let (flat, at) = self.places[param.0].as_ref().expect("its bucket was gathered");
        let stretch = stretches.iter().find(|stretch| stretch.flat == *flat);
        let Stretch { own, gathered, .. } = stretch.expect("made of the same parameters");
        let start = gathered + part.0 * own.len() + at.start - own.start;
        start..start + at.len()
    }
}

/// The parameter that was found under a name.
pub(crate) fn param_named(name: &str, found: Option<usize>) -> Result<ParamId, EngineError> {
    found.map(ParamId).ok_or_else(|| EngineError::UnknownParam { name: name.into() })
}

/// Consecutive elements of a flat copy that are gathered from several ranks.
#[derive(Debug)]
pub(crate) struct Stretch {
    flat: usize,
    own: Range<usize>,
    /// Where the first rank's lie then; the others' follow.
    gathered: usize,
}

impl Stretch {
    /// Lends it to a collective.
    pub(crate) fn shard(&self, grads: &mut ModelGrads) -> OwnShard {
        OwnShard { buffer: grads.flats[self.flat].take(), own: self.own.clone() }
    }

    /// Takes back what was lent.
    pub(crate) fn give_back(&self, shard: OwnShard, grads: &mut ModelGrads) {
        grads.flats[self.flat] = shard.buffer;
    }
}

/// Flat copies whose memory may serve again.
pub(crate) struct Memory(Vec<Buffer>);

impl Memory {
    /// A buffer whose elements are to be overwritten.
    pub(crate) fn take(&mut self, numel: Numel, dtype: DType, storage: &Storage) -> Buffer {
        let fits =
            |flat: &Buffer| flat.dtype() == dtype && flat.numel() == numel && storage.holds(flat);
        match self.0.iter().position(fits) {
            Some(index) => self.0.swap_remove(index),
            None => storage.buffer(numel, dtype),
        }
    }
}
