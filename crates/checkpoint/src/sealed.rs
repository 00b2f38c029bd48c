//! JSON with a checksum of itself.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::Checksum;

/// Raised when readers of the last one would misread what is written.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: &'a str,
    version: u32,
    /// Of the content's text.
    checksum: Checksum,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// The text of `content`, to be known again as `format`.
pub(crate) fn seal<T: Serialize>(format: &str, content: &T) -> Result<Vec<u8>, serde_json::Error> {
    let content = serde_json::value::to_raw_value(content)?;
    let checksum = Checksum::of(content.get().as_bytes());
    let mut text =
        serde_json::to_vec(&Envelope { format, version: VERSION, checksum, content: &content })?;
    text.push(b'\n');
    Ok(text)
}

/// What [`seal`] was given, or why this is not that.
pub(crate) fn unseal<T: DeserializeOwned>(format: &str, text: &[u8]) -> Result<T, String> {
    let envelope: Envelope<'_> =
        serde_json::from_slice(text).map_err(|error| format!("is no {format}: {error}"))?;
    if envelope.format != format {
        return Err(format!("is a `{}`, not a {format}", envelope.format));
    }
    if envelope.version != VERSION {
        let version = envelope.version;
        return Err(format!("has version {version} of the format; this program reads {VERSION}"));
    }
    let content = envelope.content.get();
    if Checksum::of(content.as_bytes()) != envelope.checksum {
        return Err("was changed since it was written: its checksum is another".into());
    }
    serde_json::from_str(content).map_err(|error| format!("is no {format}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_to_the_bit() {
        let numbers = [0.1, 1e-300, 5e-324, 0.30000000000000004, 6.02214076e23, -0.0, 1.0 / 3.0];
        let text = seal("test", &numbers).unwrap();
        let found: [f64; 7] = unseal("test", &text).unwrap();
        assert_eq!(found.map(f64::to_bits), numbers.map(f64::to_bits));
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let text = seal("test", &[12, 345]).unwrap();
        for at in 0..text.len() {
            for to in 0..=255 {
                let mut changed = text.clone();
                changed[at] = to;
                match unseal::<[u32; 2]>("test", &changed) {
                    Ok(found) => assert_eq!(found, [12, 345]),
                    Err(problem) => assert!(!problem.is_empty()),
                }
            }
        }
        let newer = String::from_utf8(text).unwrap().replace("\"version\":1", "\"version\":2");
        let problem = unseal::<[u32; 2]>("test", newer.as_bytes()).unwrap_err();
        assert!(problem.contains("version 2"), "{problem}");
        assert!(unseal::<[u32; 2]>("other", newer.as_bytes()).unwrap_err().contains("`test`"));
    }
}
