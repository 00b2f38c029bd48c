//! What the processes of a test's world are started with.

/// What the processes of a world are started with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    Shared,
    /// Replicas are each process's own.
    Private,
    /// Operations run on a thread of their own.
    Overlapped,
}

/// Names a process's setting in its environment.
pub(crate) const SETTING: &str = "OXIZERO_TEST_SETTING";

/// Whether this process was started so.
pub(crate) fn is_set(setting: Setting) -> bool {
    std::env::var(SETTING).unwrap() == format!("{setting:?}")
}
