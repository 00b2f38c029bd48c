//! A whole model's gradients, as named views of one flat copy for each dtype.

use std::ops::Range;

use oxizero_core::{ParamId, ParamSpec};
use oxizero_device::{Buffer, View, ViewMut};

use crate::EngineError;

/// By parameter, in their order: the norm of its gradient; `None` for a frozen one.
pub type GradNorms = Vec<Option<f64>>;

/// The whole gradients of a model's parameters on one rank: a copy, which the engine does not
/// change. Hand it back edited with [`Engine::set_full_grads`](crate::Engine::set_full_grads), or
/// to be filled anew with [`Engine::full_grads_into`](crate::Engine::full_grads_into).
#[derive(Debug, Default)]
pub struct ModelGrads {
    names: Vec<String>,
    flats: Vec<Buffer>,
    /// By parameter: the flat copy that holds it, and where; `None` for a frozen one.
    places: Vec<Option<(usize, Range<usize>)>>,
}

impl ModelGrads {
    pub(crate) fn new(specs: &[ParamSpec]) -> Self {
        let names = specs.iter().map(|spec| spec.name.clone()).collect();
        Self { names, flats: Vec::new(), places: vec![None; specs.len()] }
    }

    /// The memory alone.
    pub(crate) fn into_flats(self) -> Vec<Buffer> {
        self.flats
    }

    pub(crate) fn add(&mut self, flat: Buffer) -> usize {
        self.flats.push(flat);
        self.flats.len() - 1
    }

    pub(crate) fn place(&mut self, param: ParamId, flat: usize, elements: Range<usize>) {
        self.places[param.0] = Some((flat, elements));
    }

    /// A parameter's gradient, row-major; `None` for a frozen one, and for an index that the engine
    /// was never given.
    pub fn get(&self, param: ParamId) -> Option<View<'_>> {
        let (flat, elements) = self.places.get(param.0)?.as_ref()?;
        Some(self.flats[*flat].range(elements.clone()))
    }

    /// The same, for writing.
    pub fn get_mut(&mut self, param: ParamId) -> Option<ViewMut<'_>> {
        let (flat, elements) = self.places.get(param.0)?.as_ref()?;
        Some(self.flats[*flat].range_mut(elements.clone()))
    }

    /// The parameter with this name, or an error that names it.
    pub fn param(&self, name: &str) -> Result<ParamId, EngineError> {
        let index = self.names.iter().position(|known| known == name);
        index.map(ParamId).ok_or_else(|| EngineError::Param {
            param: name.into(),
            problem: "the engine was never given it".into(),
        })
    }

    /// Every gradient, in the order of the parameters.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, View<'_>)> {
        let params = (0..self.places.len()).map(ParamId);
        params.filter_map(|param| Some((param, self.get(param)?)))
    }
}
