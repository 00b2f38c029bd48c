//! Torch's streams, which order what a device does later.

use std::sync::Arc;

use oxizero::comm::{Mark, Streams};
use pyo3::prelude::*;

use super::device::ok;

/// `oxizero.torch_backend.Streams`.
#[derive(Clone)]
pub(crate) struct TorchStreams(Arc<Py<PyAny>>);

/// An event of torch's.
struct Event {
    event: Py<PyAny>,
    streams: TorchStreams,
}

impl TorchStreams {
    pub(crate) fn new(streams: Py<PyAny>) -> Self {
        Self(Arc::new(streams))
    }

    /// The calling thread lets go of memory, on which its stream may still be at work.
    pub(super) fn let_go(&self, tensor: &Py<PyAny>) {
        // An interpreter that ends has let go of everything.
        Python::try_attach(|py| self.0.bind(py).call_method1("let_go", (tensor,)).map(drop));
    }
}

impl Streams for TorchStreams {
    fn begin(&self) {
        Python::attach(|py| ok(self.0.bind(py).call_method0("begin").map(drop)));
    }

    fn mark(&self) -> Box<dyn Mark> {
        let event = Python::attach(|py| ok(self.0.bind(py).call_method0("mark")).unbind());
        Box::new(Event { event, streams: self.clone() })
    }
}

impl Mark for Event {
    fn wait(self: Box<Self>) {
        Python::attach(|py| {
            ok(self.streams.0.bind(py).call_method1("wait", (&self.event,)).map(drop));
        });
    }
}
