//! Who is told what an engine does, and when.

use std::sync::Arc;

use oxizero_core::{BucketId, UnitId};

/// Is told what an engine does, on the thread that does it, while it does it: what takes long there
/// makes the engine slow. Of one thread, what began last ends first.
pub trait Observer: Send + Sync {
    /// It begins now, on this thread.
    fn begin(&self, span: Span);

    /// It ends now, on the thread where it began.
    fn end(&self, span: Span);

    /// A window has ended: a good time to write down what was seen, for a process may end without
    /// dropping its observers.
    fn window_ended(&self) {}
}

/// Something that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Span {
    /// A unit runs forward, from `pre_forward` to `post_forward`.
    Forward(UnitId),
    /// A backward pass, from its first event or gradient to `backward_end`.
    BackwardPass,
    /// A unit runs backward, from `pre_backward` to `post_backward`.
    Backward(UnitId),
    /// A bucket's gradients are cast, sent and summed.
    Reduce(BucketId),
    /// A bucket's full weights are gathered.
    Gather(BucketId),
    /// A bucket's weights and states are updated.
    Update(BucketId),
    /// A bucket's updated weights are made known to all ranks.
    Publish(BucketId),
    /// All ranks tell each other a few bytes.
    Exchange,
    /// The caller's thread waits for what is done to a bucket on another.
    Wait(BucketId),
}

/// The observer, if there is one: where there is none, nothing is done.
#[derive(Clone, Default)]
pub(crate) struct Observed(Option<Arc<dyn Observer>>);

/// Something that is observed where it is done, if there is an observer.
#[derive(Default)]
pub(crate) struct Observation(Option<(Arc<dyn Observer>, Span)>);

impl Observed {
    pub(crate) fn by(observer: Option<Arc<dyn Observer>>) -> Self {
        Self(observer)
    }

    pub(crate) fn begin(&self, span: Span) {
        if let Some(observer) = &self.0 {
            observer.begin(span);
        }
    }

    pub(crate) fn end(&self, span: Span) {
        if let Some(observer) = &self.0 {
            observer.end(span);
        }
    }

    pub(crate) fn window_ended(&self) {
        if let Some(observer) = &self.0 {
            observer.window_ended();
        }
    }

    /// To be taken to where it is done.
    pub(crate) fn of(&self, span: Span) -> Observation {
        Observation(self.0.clone().map(|observer| (observer, span)))
    }
}

impl Observation {
    /// Does it.
    pub(crate) fn during<T>(self, deed: impl FnOnce() -> T) -> T {
        let Some((observer, span)) = self.0 else { return deed() };
        observer.begin(span);
        let result = deed();
        observer.end(span);
        result
    }
}
