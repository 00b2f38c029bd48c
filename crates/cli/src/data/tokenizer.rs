//! A `tokenizer.json`, as it lies beside models on the Hugging Face hub.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::corpus::hex;
use super::files::read_file;
use crate::error::CliError;

/// How tokenizers call the token that ends a document. No file says which of its tokens that is;
/// the first of these that it has is taken.
const ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]"];

/// Documents that are read at once, so that what the library keeps of each is soon gone.
const DOCUMENTS: usize = 256;

/// The file's content, and what tells it from others.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenizerFile {
    /// The path that the user gave.
    pub(crate) path: String,
    /// Of the content.
    pub(crate) sha256: String,
    /// The content.
    json: String,
}

impl TokenizerFile {
    /// Reads a file, and refuses one that is no tokenizer's.
    pub(crate) fn read(path: &Path) -> Result<Self, CliError> {
        let bytes = read_file(path)?;
        let mut hash = Sha256::new();
        hash.update(&bytes);
        let name = path.display().to_string();
        let json = String::from_utf8(bytes).map_err(|_| refused(&name, "it is no UTF-8 text"))?;
        Ok(Self { path: name, sha256: hex(hash), json })
    }

    /// The tokenizer.
    pub(crate) fn open(&self) -> Result<Tokenizer, CliError> {
        let made = tokenizers::Tokenizer::from_bytes(&self.json);
        let mut inner = made.map_err(|why| refused(&self.path, why))?;
        // A file may ask for sequences of a fixed length, which are made otherwise here.
        inner.with_truncation(None).map_err(|why| refused(&self.path, why))?;
        inner.with_padding(None);
        let end = ENDS.iter().find_map(|end| inner.token_to_id(end));
        Ok(Tokenizer { inner, end, path: self.path.clone() })
    }
}

impl fmt::Debug for TokenizerFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenizerFile({}, sha256 {})", self.path, self.sha256)
    }
}

/// From text to tokens and back.
pub(crate) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    end: Option<u32>,
    path: String,
}

impl Tokenizer {
    /// A number above every token's.
    pub(crate) fn vocab_size(&self) -> usize {
        let numbers = self.inner.get_vocab(true).into_values();
        numbers.max().map_or(0, |number| number as usize + 1)
    }

    /// The tokens of documents, each followed by the token for an end, if there is one. No other
    /// is added.
    pub(crate) fn encode(&self, documents: &[&[u8]]) -> Result<Vec<u32>, CliError> {
        let mut tokens = Vec::new();
        for documents in documents.chunks(DOCUMENTS) {
            let texts = documents.iter().map(|text| std::str::from_utf8(text));
            let texts: Vec<_> = texts.collect::<Result<_, _>>().map_err(|why| self.failed(why))?;
            let encodings = self.inner.encode_batch_fast(texts, false);
            for encoding in encodings.map_err(|why| self.failed(why))? {
                tokens.extend_from_slice(encoding.get_ids());
                tokens.extend(self.end);
            }
        }
        Ok(tokens)
    }

    /// The text of tokens.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, CliError> {
        self.inner.decode(tokens, false).map_err(|why| self.failed(why))
    }

    fn failed(&self, why: impl fmt::Display) -> CliError {
        CliError::Data(format!("`{}` cannot read the text: {why}", self.path))
    }
}

fn refused(path: &str, why: impl fmt::Display) -> CliError {
    CliError::Data(format!("`{path}` is no tokenizer: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = r#"{
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
            "stride": 0},
        "padding": null, "normalizer": null,
        "added_tokens": [{"id": 4, "content": "<eos>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "to": 1, "be": 2, "or": 9},
            "unk_token": "?"}
    }"#;

    fn tokenizer(json: &str) -> Result<Tokenizer, CliError> {
        let (path, sha256) = ("t.json".into(), String::new());
        TokenizerFile { path, sha256, json: json.into() }.open()
    }

    #[test]
    fn documents_end_and_are_not_cut() {
        let tokenizer = tokenizer(WORDS).unwrap();
        assert_eq!(tokenizer.vocab_size(), 10);
        let tokens = tokenizer.encode(&[b"to be or not", b"", b"be"]).unwrap();
        assert_eq!(tokens, [1, 2, 9, 0, 4, 4, 2, 4]);
        assert_eq!(tokenizer.decode(&tokens[..4]).unwrap(), "to be or ?");
    }

    #[test]
    fn without_a_token_for_an_end_documents_follow_each_other() {
        let tokenizer = tokenizer(&WORDS.replace("<eos>", "<mask>")).unwrap();
        assert_eq!(tokenizer.encode(&[b"to", b"be"]).unwrap(), [1, 2]);
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_by_its_path() {
        for json in ["", "{}", "[1]", &WORDS.replace("WordLevel", "Oracle")] {
            let Err(error) = tokenizer(json) else { panic!("{json} was taken") };
            assert!(error.to_string().contains("`t.json` is no tokenizer"), "{error}");
        }
    }
}
