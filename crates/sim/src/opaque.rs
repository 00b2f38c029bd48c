//! A device that the host cannot look into: what an engine on one must do without, and the reads
//! that it makes.
//!
//! The memory is the host's, behind a lock, and whatever is asked for is computed by the host's
//! kernels; so an engine on it gives the same bits, and one that touches the memory by itself
//! panics.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oxizero::Backend;
use oxizero_comm::library::{Library, LibraryError, communicator};
use oxizero_comm::{CommError, Communicator, DEFAULT_DEADLINE};
use oxizero_core::{Bytes, DType, ProcessGroup, Rank};
use oxizero_device::kernels::{self, Combine, Measure};
use oxizero_device::{
    Buffer, Device, DeviceMemory, DeviceView, DeviceViewMut, Region, Storage, View, ViewMut,
};
use oxizero_optim::{Gradient, Hyper, Optimizer, Weights};

/// The device. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Opaque {
    reads: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Memory {
    device: Opaque,
    region: Mutex<Region>,
}

impl Opaque {
    /// An engine's back end on this device; the ranks meet over `comm`.
    pub fn backend(&self, comm: Box<dyn Communicator>) -> Backend {
        let members = ProcessGroup::world(comm.world_size());
        let library = Moved { comm, members, device: self.clone() };
        let storage = Storage::Device(Arc::new(self.clone()));
        Backend { storage, communicator: communicator(library), observer: None }
    }

    /// How often the host read something of it so far.
    pub fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }

    fn count_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }
}

impl DeviceMemory for Memory {
    fn bytes(&self) -> Bytes {
        lock(&self.region).len()
    }

    fn device(&self) -> &dyn Device {
        &self.device
    }
}

impl Device for Opaque {
    fn alloc(&self, bytes: Bytes) -> Box<dyn DeviceMemory> {
        let region = Mutex::new(Region::heap(bytes));
        Box::new(Memory { device: self.clone(), region })
    }

    fn read(&self, source: DeviceView<'_>, target: ViewMut<'_>) {
        self.count_read();
        kernels::cast(load(source).view(), target);
    }

    fn write(&self, source: View<'_>, target: DeviceViewMut<'_>) {
        store(&Buffer::copy_of(source), target);
    }

    fn fill(&self, target: DeviceViewMut<'_>, value: f32) {
        on_host(target, |target| kernels::fill(target, value));
    }

    fn cast(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>) {
        on_host(target, |target| kernels::cast(load(source).view(), target));
    }

    fn adopt(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>) {
        on_host(target, |target| kernels::adopt(load(source).view(), target));
    }

    fn tree_sum(&self, inputs: &[DeviceView<'_>], target: DeviceViewMut<'_>, combine: Combine) {
        let inputs: Vec<_> = inputs.iter().map(|input| load(*input)).collect();
        let inputs: Vec<_> = inputs.iter().map(Buffer::view).collect();
        on_host(target, |target| kernels::tree_sum(&inputs, target, combine));
    }

    fn divide(&self, grad: DeviceViewMut<'_>, divisor: f32) {
        on_host(grad, |grad| kernels::divide(grad, divisor));
    }

    fn measure(
        &self,
        grads: &[DeviceView<'_>],
        (divisor, measure): (f32, Measure),
        weights: &[DeviceView<'_>],
    ) -> (Vec<f64>, Vec<u64>) {
        self.count_read();
        let on_host = |views: &[DeviceView<'_>]| views.iter().map(|view| load(*view)).collect();
        let (grads, weights): (Vec<_>, Vec<_>) = (on_host(grads), on_host(weights));
        let grads: Vec<_> = grads.iter().map(Buffer::view).collect();
        let weights: Vec<_> = weights.iter().map(Buffer::view).collect();
        let (measured, sums) = kernels::measure_with(&weights, (&grads, divisor, measure));
        (measured.iter().map(|measured| measured.size).collect(), sums)
    }
}

/// Makes a rule of the host one of the device.
#[derive(Debug)]
pub struct OnOpaque(pub Box<dyn Optimizer>);

impl Optimizer for OnOpaque {
    fn description(&self) -> String {
        self.0.description()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.0.state_names()
    }

    fn initial_state(&self) -> f32 {
        self.0.initial_state()
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        let Weights { master, states, model } = weights;
        let values = load(on_device(grad.values));
        let grad = Gradient { values: values.view(), ..grad };
        let mut new_master = load(on_device(master.as_view()));
        let mut new_model = model.as_ref().map(|model| load(on_device(model.as_view())));
        let mut new_states: Vec<_> =
            states.iter().map(|state| load(on_device(state.as_view()))).collect();
        let mut views: Vec<_> = new_states.iter_mut().map(Buffer::view_mut).collect();
        let weights = Weights {
            master: new_master.view_mut(),
            states: &mut views,
            model: new_model.as_mut().map(Buffer::view_mut),
        };
        self.0.update(hyper, step, grad, weights);
        kernels::cast(new_master.view(), master);
        for (new, state) in new_states.iter().zip(states) {
            kernels::cast(new.view(), state.reborrow());
        }
        if let (Some(new), Some(model)) = (new_model, model) {
            kernels::cast(new.view(), model);
        }
    }
}

/// Moves the device's memory over another communicator, which is the library.
struct Moved {
    comm: Box<dyn Communicator>,
    members: ProcessGroup,
    device: Opaque,
}

impl Moved {
    /// Every member's elements, in their order.
    fn all(&self, own: &Buffer) -> Result<Vec<Vec<u8>>, LibraryError> {
        self.exchange(own.region().bytes())
    }
}

impl Library for Moved {
    fn name(&self) -> &'static str {
        "the simulated library"
    }

    fn members(&self) -> &ProcessGroup {
        &self.members
    }

    fn rank(&self) -> Rank {
        self.comm.rank()
    }

    fn deadline(&self) -> Duration {
        DEFAULT_DEADLINE
    }

    /// So little that most of what is summed passes in pieces.
    fn scratch(&self) -> Bytes {
        Bytes(100)
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, LibraryError> {
        Ok(Region::on_device(self.device.alloc(bytes)))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, LibraryError> {
        self.comm.exchange(self.name(), bytes).map_err(said)
    }

    fn all_to_all(
        &self,
        source: View<'_>,
        elements: Range<usize>,
        target: ViewMut<'_>,
    ) -> Result<(), LibraryError> {
        let own = load(on_device(source));
        let (size, len) = (own.dtype().size(), own.len().0 / self.members.size().get());
        let first = self.rank().0 * len;
        let part = first + elements.start * size..first + elements.end * size;
        let parts = self.all(&own)?.iter().flat_map(|all| all[part.clone()].to_vec()).collect();
        put(parts, target);
        Ok(())
    }

    fn all_gather(&self, shard: Option<View<'_>>, full: ViewMut<'_>) -> Result<(), LibraryError> {
        let numel = full.as_view().numel().0 / self.members.size().get();
        let own = self.rank().0 * numel..(self.rank().0 + 1) * numel;
        let shard = shard.unwrap_or_else(|| full.as_view().range(own));
        let shards = self.all(&load(on_device(shard)))?.concat();
        put(shards, full);
        Ok(())
    }

    fn broadcast(&self, buffer: ViewMut<'_>, root: Rank) -> Result<(), LibraryError> {
        let roots = self.all(&load(on_device(buffer.as_view())))?.swap_remove(root.0);
        put(roots, buffer);
        Ok(())
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, LibraryError> {
        let comm = self.comm.split(group).map_err(said)?;
        Ok(Self { comm, members: group.clone(), device: self.device.clone() })
    }

    fn abort(&self, why: &str) {
        self.comm.abort(why);
    }
}

fn said(error: CommError) -> LibraryError {
    match error {
        CommError::PeerDead { rank, .. } => LibraryError::Dead(rank),
        CommError::Timeout { rank, .. } => LibraryError::Late(rank),
        CommError::Aborted { rank, why } => LibraryError::Aborted(rank, why),
        other => LibraryError::Failed(other.to_string()),
    }
}

fn on_device(view: View<'_>) -> DeviceView<'_> {
    match view {
        View::Device(view) => view,
        other => panic!("{} elements of the host on a device", other.numel()),
    }
}

fn memory(view: DeviceView<'_>) -> MutexGuard<'_, Region> {
    let memory: &dyn Any = view.memory();
    lock(&memory.downcast_ref::<Memory>().expect("memory of this device").region)
}

/// The elements, on the host.
fn load(view: DeviceView<'_>) -> Buffer {
    let region = memory(view);
    Buffer::copy_of(View::of_bytes(region.bytes(), view.dtype()).range(view.elements()))
}

fn store(values: &Buffer, target: DeviceViewMut<'_>) {
    let (mut region, view) = (memory(target.as_view()), target.as_view());
    let target = ViewMut::of_bytes(region.bytes_mut(), view.dtype()).range(view.elements());
    kernels::cast(values.view(), target);
}

/// Overwrites the elements with these bytes.
fn put(bytes: Vec<u8>, target: ViewMut<'_>) {
    let ViewMut::Device(target) = target else { panic!("the host's elements on a device") };
    let dtype = target.as_view().dtype();
    let mut region = Region::heap(Bytes(bytes.len()));
    region.bytes_mut().copy_from_slice(&bytes);
    store(&Buffer::new(region, dtype), target);
}

fn on_host(target: DeviceViewMut<'_>, deed: impl FnOnce(ViewMut<'_>)) {
    let mut values = load(target.as_view());
    deed(values.view_mut());
    store(&values, target);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Host values on a device, where the engine's memory is one's.
pub(crate) fn given(storage: &Storage, values: &[f32]) -> Option<Buffer> {
    match storage {
        Storage::Host => None,
        Storage::Device(_) => {
            let mut given = storage.buffer(View::F32(values).numel(), DType::F32);
            kernels::cast(View::F32(values), given.view_mut());
            Some(given)
        }
    }
}
