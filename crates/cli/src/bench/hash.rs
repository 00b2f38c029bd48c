//! Hashes of what a bench computed, SHA-256.

use oxizero_comm::Communicator;
use sha2::{Digest, Sha256};

use crate::rank::RankError;

/// Of the pieces, one after the other.
pub(crate) fn of<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut hash = Sha256::new();
    pieces.into_iter().for_each(|piece| hash.update(piece));
    hash.finalize().to_vec()
}

/// `hash` in hexadecimal, where all ranks have the same of `what`; else an error.
pub(crate) fn same(hash: &[u8], what: &str, comm: &dyn Communicator) -> Result<String, RankError> {
    let told = comm.exchange(what, hash)?;
    match told.iter().position(|other| other != hash) {
        Some(rank) => Err(RankError::Contents(format!("{what} differs from rank {rank}'s"))),
        None => Ok(hex(hash)),
    }
}

/// The hash of all ranks' hashes, in rank order, in hexadecimal.
pub(crate) fn joined(hash: &[u8], comm: &dyn Communicator) -> Result<String, RankError> {
    let told = comm.exchange("all hashes", hash)?;
    Ok(hex(&of(told.iter().map(Vec::as_slice))))
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
