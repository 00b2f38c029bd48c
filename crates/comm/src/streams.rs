//! Work that a device does after the call that asks for it has returned.

/// A device's streams, of which each thread has one: what a thread asks for is done in the order in
/// which it asks. What two threads ask for is ordered by marks alone.
///
/// What an operation owns is freed where its handle is waited for, after the mark, or was allocated
/// on the communication thread and is freed there. Memory that is freed elsewhere nevertheless, as
/// after an error, is the device's own to keep until the work on it is done.
pub trait Streams: Send + Sync {
    /// Gives the calling thread, a communication thread, a stream of its own; called once, before
    /// anything else on it.
    fn begin(&self);

    /// Marks what the calling thread has asked the device for so far.
    fn mark(&self) -> Box<dyn Mark>;
}

/// A place in a stream.
pub trait Mark: Send {
    /// What the calling thread asks the device for from here on is begun when all before the mark
    /// is done. Returns at once.
    fn wait(self: Box<Self>);
}
