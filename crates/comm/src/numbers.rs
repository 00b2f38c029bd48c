//! Numbers that ranks tell each other.

use crate::{CommError, Communicator};

/// Every rank's numbers, equally many on each, in rank order.
pub(crate) fn exchange<C: Communicator + ?Sized>(
    comm: &C,
    label: &str,
    own: impl IntoIterator<Item = usize>,
) -> Result<Vec<Vec<usize>>, CommError> {
    let told = comm.exchange(label, &to_bytes(own))?;
    Ok(told.iter().map(|bytes| from_bytes(bytes)).collect())
}

/// Numbers as bytes, eight each.
pub(crate) fn to_bytes(numbers: impl IntoIterator<Item = usize>) -> Vec<u8> {
    numbers.into_iter().flat_map(|number| (number as u64).to_le_bytes()).collect()
}

/// The numbers that bytes are.
pub(crate) fn from_bytes(bytes: &[u8]) -> Vec<usize> {
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|number| u64::from_le_bytes(*number) as usize).collect()
}
