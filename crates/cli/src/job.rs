//! What every rank of a run is given: the configuration, the text, where results go.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use oxizero_core::Config;
use serde::{Deserialize, Serialize};

use crate::data::{Corpus, Tokenized, TokenizerFile};

/// A run, ready to start.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Job {
    /// Validated.
    pub(crate) config: Config,
    /// The run's folder; it exists.
    pub(crate) folder: PathBuf,
    /// Whether output is for programs.
    pub(crate) json: bool,
    /// The folder of the checkpoint to go on from, if there is one.
    pub(crate) resume: Option<PathBuf>,
    /// The files with the weights to start from, if there are some.
    pub(crate) init: Option<PathBuf>,
    /// Where what each rank does is to be written, if anywhere.
    pub(crate) trace: Option<PathBuf>,
    /// The text, longer than a sequence on both sides of the split.
    pub(crate) corpus: Corpus,
}

/// Tokens that are copied at once on their way.
const TOKENS_AT_ONCE: usize = 1 << 16;

/// What precedes the text on the way to a rank's process.
#[derive(Serialize, Deserialize)]
struct Header {
    config: String,
    folder: PathBuf,
    json: bool,
    resume: Option<PathBuf>,
    init: Option<PathBuf>,
    trace: Option<PathBuf>,
    description: String,
    train_bytes: usize,
    validation_bytes: usize,
    tokenized: Option<TokenizedHeader>,
}

#[derive(Serialize, Deserialize)]
struct TokenizedHeader {
    tokenizer: TokenizerFile,
    train_tokens: usize,
    validation_tokens: usize,
}

impl Job {
    /// Writes the job for [`receive`](Self::receive). The text itself is sent, not its place, so
    /// that ranks cannot see different files.
    pub(crate) fn send(&self, to: &mut dyn Write) -> io::Result<()> {
        let header = Header {
            config: self.config.to_toml(),
            folder: self.folder.clone(),
            json: self.json,
            resume: self.resume.clone(),
            init: self.init.clone(),
            trace: self.trace.clone(),
            description: self.corpus.description.clone(),
            train_bytes: self.corpus.train.len(),
            validation_bytes: self.corpus.validation.len(),
            tokenized: self.corpus.tokenized.as_ref().map(|tokenized| TokenizedHeader {
                tokenizer: tokenized.tokenizer.clone(),
                train_tokens: tokenized.train.len(),
                validation_tokens: tokenized.validation.len(),
            }),
        };
        let header = serde_json::to_vec(&header)?;
        to.write_all(&(header.len() as u64).to_le_bytes())?;
        to.write_all(&header)?;
        to.write_all(&self.corpus.train)?;
        to.write_all(&self.corpus.validation)?;
        let Some(Tokenized { train, validation, .. }) = &self.corpus.tokenized else {
            return Ok(());
        };
        write_tokens(to, train)?;
        write_tokens(to, validation)
    }

    /// Reads what [`send`](Self::send) wrote.
    pub(crate) fn receive(from: &mut dyn Read) -> io::Result<Self> {
        let mut length = [0; 8];
        from.read_exact(&mut length)?;
        let header: Header = serde_json::from_slice(&read(from, u64::from_le_bytes(length))?)?;
        let config = Config::from_toml(&header.config).map_err(io::Error::other)?;
        let corpus = Corpus {
            train: read(from, header.train_bytes as u64)?,
            validation: read(from, header.validation_bytes as u64)?,
            tokenized: header.tokenized.map(|header| receive_tokens(from, header)).transpose()?,
            description: header.description,
        };
        let Header { folder, json, resume, init, trace, .. } = header;
        Ok(Self { config, folder, json, resume, init, trace, corpus })
    }
}

fn write_tokens(to: &mut dyn Write, tokens: &[u32]) -> io::Result<()> {
    tokens.chunks(TOKENS_AT_ONCE).try_for_each(|tokens| {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        to.write_all(&bytes)
    })
}

fn receive_tokens(from: &mut dyn Read, header: TokenizedHeader) -> io::Result<Tokenized> {
    let mut tokens = |count: usize| {
        let bytes = read(from, count as u64 * 4)?;
        let tokens = bytes.as_chunks::<4>().0.iter().map(|token| u32::from_le_bytes(*token));
        Ok::<_, io::Error>(tokens.collect())
    };
    let (train, validation) = (tokens(header.train_tokens)?, tokens(header.validation_tokens)?);
    Ok(Tokenized { tokenizer: header.tokenizer, train, validation })
}

/// Exactly `bytes` bytes, without trusting the number before they have come.
fn read(from: &mut dyn Read, bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    from.take(bytes).read_to_end(&mut content)?;
    match content.len() as u64 == bytes {
        true => Ok(content),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_arrives_as_it_was_sent_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        std::fs::write(&path, "{}").unwrap();
        let tokenizer = TokenizerFile::read(&path).unwrap();
        let tokenized = Tokenized { tokenizer, train: vec![0, 70_000], validation: vec![1 << 31] };
        for tokenized in [None, Some(tokenized)] {
            sent_and_received(tokenized);
        }
    }

    fn sent_and_received(tokenized: Option<Tokenized>) {
        let corpus = Corpus {
            train: b"to be\0or not".to_vec(),
            validation: b"to be\n".to_vec(),
            tokenized,
            description: "\"Hamlet\"\nin part".into(),
        };
        let folder = PathBuf::from("runs/a b");
        let resume = Some("runs/1/checkpoints/step-7".into());
        let (init, trace) = (Some("model.safetensors".into()), Some("t.json".into()));
        let config = Config::default();
        let job = Job { config, folder, json: true, resume, init, trace, corpus };
        let mut sent = Vec::new();
        job.send(&mut sent).unwrap();
        assert_eq!(Job::receive(&mut sent.as_slice()).unwrap(), job);
        for end in 0..sent.len() {
            Job::receive(&mut &sent[..end]).unwrap_err();
        }
    }
}
