//! Text in: which files, which bytes, and which of them train.
//!
//! Tokens are bytes, or what a tokenizer makes of them. Everything here depends on the files'
//! content, their relative paths and the seed alone, so that every machine draws the same batches
//! from the same text.

mod batches;
mod corpus;
mod entropy;
mod files;
mod sources;
mod tokenizer;

pub(crate) use batches::{Batches, evaluation_batches};
pub(crate) use corpus::{Corpus, Tokenized};
pub(crate) use entropy::{bigram_entropy, bits_per_byte};
pub(crate) use files::read_file;
pub(crate) use tokenizer::TokenizerFile;
