//! Documents, split into text to train on and text to validate on.

use std::path::Path;

use oxizero_core::{Bytes, Config, Random};
use sha2::{Digest, Sha256};

use super::batches::Text;
use super::files::TextFiles;
use super::sources;
use super::tokenizer::TokenizerFile;
use crate::error::CliError;

/// Ends every document, and occurs in none.
const SEPARATOR: u8 = 0;
/// Fewer files than this are too coarse to split by; they are cut into documents first.
const FILES_MIN: usize = 20;
/// How many documents a few files are cut into, about.
const PIECES: usize = 100;
/// The purpose of the split's random draws.
const SPLIT: u64 = u64::from_be_bytes(*b"split   ");

/// All the text of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Corpus {
    /// Documents to train on, each followed by a zero byte.
    pub(crate) train: Vec<u8>,
    /// Documents to validate on, each followed by a zero byte.
    pub(crate) validation: Vec<u8>,
    /// The same as tokens, unless they are the bytes.
    pub(crate) tokenized: Option<Tokenized>,
    /// What the text is: its origin, size, hash.
    pub(crate) description: String,
}

/// A text as a tokenizer reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tokenized {
    /// What made the tokens.
    pub(crate) tokenizer: TokenizerFile,
    /// Documents to train on, each followed by the tokenizer's token for an end, if it has one.
    pub(crate) train: Vec<u32>,
    /// Documents to validate on, likewise.
    pub(crate) validation: Vec<u32>,
}

impl Corpus {
    /// Reads and splits what `config.data` names.
    pub(crate) fn load(config: &Config) -> Result<Self, CliError> {
        let (texts, origin) = match &config.data.path {
            Some(path) => named(path)?,
            None => (sources::read()?, "the Rust sources of this build".to_owned()),
        };
        let description = describe(&texts, &origin);
        let documents = documents(&texts);
        let fraction = config.data.validation_fraction;
        let (train, validation) = split(documents, fraction, config.train.seed);
        let tokenized = config.data.tokenizer.as_deref();
        let tokenized = tokenized.map(|path| tokenized_by(path, [&train, &validation], config));
        let tokenized = tokenized.transpose()?;
        let corpus = Self { train, validation, tokenized, description };
        corpus.check_length(texts.iter().map(Vec::len).sum(), config)?;
        Ok(corpus)
    }

    /// What to train on.
    pub(crate) fn train_text(&self) -> Text<'_> {
        match &self.tokenized {
            None => Text::Bytes(&self.train),
            Some(tokenized) => Text::Tokens(&tokenized.train),
        }
    }

    /// What to validate on.
    pub(crate) fn validation_text(&self) -> Text<'_> {
        match &self.tokenized {
            None => Text::Bytes(&self.validation),
            Some(tokenized) => Text::Tokens(&tokenized.validation),
        }
    }

    /// The text of tokens that a model made.
    pub(crate) fn text_of(&self, tokens: &[usize]) -> Result<String, CliError> {
        let Some(tokenized) = &self.tokenized else {
            let shown = |token: &usize| match u8::try_from(*token) {
                Ok(SEPARATOR) => b'\n',
                Ok(byte) => byte,
                Err(_) => b'?', // a vocabulary may be larger than the bytes
            };
            let bytes: Vec<u8> = tokens.iter().map(shown).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        };
        let tokens: Vec<u32> = tokens.iter().map(|token| *token as u32).collect();
        tokenized.tokenizer.open()?.decode(&tokens)
    }

    /// Refuses text, of so many bytes before it was split, in which no sequence and its next byte
    /// fit.
    fn check_length(&self, bytes: usize, config: &Config) -> Result<(), CliError> {
        let (context, fraction) = (config.model.context, config.data.validation_fraction);
        if self.train_text().len().min(self.validation_text().len()) > context {
            return Ok(());
        }
        if let Some(Tokenized { train, validation, .. }) = &self.tokenized {
            return Err(CliError::Data(format!(
                "a text of {} tokens to train on and {} to validate on is too short: each must \
                 have the {} tokens of a sequence (model.context = {context}, and the token to \
                 predict); give more text, another data.validation_fraction or a shorter context",
                train.len(),
                validation.len(),
                context + 1,
            )));
        }
        let needed = ((context + 1) as f64 / fraction.min(1.0 - fraction)).ceil();
        Err(CliError::Data(format!(
            "a text of {bytes} bytes is too short: a part of it, data.validation_fraction = \
             {fraction}, is to validate on, the rest is to train on, and each must have the {} \
             bytes of a sequence (model.context = {context}, and the byte to predict); give about \
             {needed} bytes or more, another fraction or a shorter context",
            context + 1,
        )))
    }
}

/// The two sides of the split as tokens, which must be in the model's vocabulary.
fn tokenized_by(
    path: &str,
    [train, validation]: [&[u8]; 2],
    config: &Config,
) -> Result<Tokenized, CliError> {
    let file = TokenizerFile::read(Path::new(path))?;
    let tokenizer = file.open()?;
    let (needed, vocab_size) = (tokenizer.vocab_size(), config.model.vocab_size);
    if needed > vocab_size {
        return Err(CliError::Data(format!(
            "`{path}` makes tokens up to {}, and the model's are up to {} (model.vocab_size = \
             {vocab_size}); {needed} or more would work",
            needed.saturating_sub(1),
            vocab_size - 1,
        )));
    }
    let encode = |text: &[u8]| {
        let documents = text.split_inclusive(|byte| *byte == SEPARATOR);
        let documents: Vec<_> =
            documents.map(|text| text.strip_suffix(&[SEPARATOR]).unwrap_or(text)).collect();
        tokenizer.encode(&documents)
    };
    let (train, validation) = (encode(train)?, encode(validation)?);
    Ok(Tokenized { train, validation, tokenizer: file })
}

/// The texts under the path that the user gave, and how to call them.
fn named(path: &str) -> Result<(Vec<Vec<u8>>, String), CliError> {
    let TextFiles { texts, skipped, left_out } = TextFiles::read(Path::new(path))?;
    let mut without = Vec::new();
    if skipped > 0 {
        without.push(format!("{} no UTF-8 text", count(skipped, "file that is", "files that are")));
    }
    if left_out > 0 {
        let what = count(left_out, "hidden file, cache or run", "hidden files, caches and runs");
        without.push(what);
    }
    let without = match without.is_empty() {
        true => String::new(),
        false => format!(" without {}", without.join(" and ")),
    };
    if texts.is_empty() {
        return Err(CliError::Data(format!("there is no text in `{path}`{without}")));
    }
    Ok((texts, format!("`{path}`{without}")))
}

fn count(number: usize, one: &str, several: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {several}") }
}

fn describe(texts: &[Vec<u8>], origin: &str) -> String {
    let mut hash = Sha256::new();
    let mut bytes = 0;
    for text in texts {
        hash.update(text);
        hash.update([SEPARATOR]);
        bytes += text.len();
    }
    let hash = hex(hash);
    let files = count(texts.len(), "file", "files");
    format!("{origin}: {files}, {}, sha256 {hash}", Bytes(bytes))
}

/// A hash as text.
pub(super) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file is a document, unless there are few files.
fn documents(texts: &[Vec<u8>]) -> Vec<&[u8]> {
    if texts.len() >= FILES_MIN {
        return texts.iter().map(Vec::as_slice).collect();
    }
    let total: usize = texts.iter().map(Vec::len).sum();
    texts.iter().flat_map(|text| pieces(text, total.div_ceil(PIECES))).collect()
}

/// Cuts `text` into pieces of at least `bytes_min` bytes (but the last), each up to the end of a
/// paragraph if one ends soon enough, else of a line, else wherever a character ends.
fn pieces(text: &[u8], bytes_min: usize) -> Vec<&[u8]> {
    let (mut rest, mut pieces) = (text, Vec::new());
    while rest.len() > bytes_min {
        let near = &rest[..rest.len().min(2 * bytes_min)];
        let from = bytes_min.saturating_sub(1);
        let after = |mark: &[u8]| {
            let found = near[from..].windows(mark.len()).position(|window| window == mark);
            found.map(|place| from + place + mark.len())
        };
        let is_start = |byte: &u8| byte & 0b1100_0000 != 0b1000_0000; // of a UTF-8 character
        let character = || rest[bytes_min..].iter().position(is_start).map(|n| bytes_min + n);
        let end = after(b"\n\n").or_else(|| after(b"\n")).or_else(character);
        let (piece, others) = rest.split_at(end.unwrap_or(rest.len()));
        pieces.push(piece);
        rest = others;
    }
    if !rest.is_empty() {
        pieces.push(rest);
    }
    pieces
}

/// Shuffles the documents, and keeps about `fraction` of their bytes for validation: every
/// document in turn that still fits, or the smallest where none does.
fn split(mut documents: Vec<&[u8]>, fraction: f64, seed: u64) -> (Vec<u8>, Vec<u8>) {
    Random::for_path(seed, &[SPLIT]).shuffle(&mut documents);
    let total: usize = documents.iter().map(|document| document.len() + 1).sum();
    let budget = (total as f64 * fraction) as usize;
    let smallest = documents.iter().map(|document| document.len() + 1).min().unwrap_or(0);
    let budget = budget.max(smallest);
    let (mut train, mut validation) = (Vec::with_capacity(total), Vec::with_capacity(budget));
    for document in documents {
        let fits = validation.len() + document.len() < budget;
        let into = if fits { &mut validation } else { &mut train };
        into.extend_from_slice(document);
        into.push(SEPARATOR);
    }
    (train, validation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_tile_the_text_and_end_at_paragraphs() {
        let text = "one\ntwo\n\nthree\nfour\n\nfive\n".repeat(9);
        for bytes_min in 1..60 {
            let pieces = pieces(text.as_bytes(), bytes_min);
            assert_eq!(pieces.concat(), text.as_bytes());
            let inner = &pieces[..pieces.len() - 1];
            assert!(inner.iter().all(|piece| piece.len() >= bytes_min));
            if bytes_min > 12 {
                assert!(inner.iter().all(|piece| piece.ends_with(b"\n\n")));
            }
        }
    }

    #[test]
    fn a_text_without_lines_is_cut_between_characters() {
        let text = "äöü€".repeat(50);
        for piece in pieces(text.as_bytes(), 7) {
            assert!(std::str::from_utf8(piece).is_ok());
        }
    }

    #[test]
    fn the_split_loses_nothing_and_follows_the_seed() {
        let texts: Vec<Vec<u8>> = (1..200).map(|n| vec![b'a' + n % 26; n.into()]).collect();
        let documents: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
        let total: usize = texts.iter().map(|text| text.len() + 1).sum();
        let (train, validation) = split(documents.clone(), 0.1, 7);
        assert_eq!(train.len() + validation.len(), total);
        let share = validation.len() as f64 / total as f64;
        assert!((0.09..=0.1).contains(&share), "{share}");
        assert_eq!(split(documents.clone(), 0.1, 7), (train.clone(), validation));
        assert_ne!(split(documents, 0.1, 8).0, train);
    }

    #[test]
    fn one_document_larger_than_the_budget_does_not_empty_either_side() {
        let (large, small) = (vec![b'x'; 1000], vec![b'y'; 10]);
        for seed in 0..10 {
            let (train, validation) = split(vec![&large, &small], 0.001, seed);
            assert_eq!((train.len(), validation.len()), (1001, 11));
        }
    }
}
