//! The values that burn's own initialisers give.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

/// Every parameter of `module` by name, with the values that burn initialises it to, in f32 and
/// row-major order.
///
/// The module is initialised by this, and dropped: hand in one that no template was cloned from.
pub fn initial_values(prefix: &str, module: impl Module) -> Vec<(String, Vec<f32>)> {
    let path = if prefix.is_empty() { Vec::new() } else { vec![prefix.to_string()] };
    let mut values = Values { path, found: Vec::new() };
    module.visit(&mut values);
    values.found
}

struct Values {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().inner().cast(DType::F32).into_data();
        let values = data.try_into_vec().expect("the tensor was cast to f32");
        self.found.push((self.path.join("."), values));
    }
}
