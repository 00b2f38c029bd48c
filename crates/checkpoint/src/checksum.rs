//! Checksums of blocks of bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use twox_hash::XxHash3_64;

/// The 64-bit XXH3 of some bytes; 16 hexadecimal digits in text.
///
/// It is computed faster than memory is copied, so that nobody wants to switch it off, and what
/// was damaged by accident passes once in 2^64. It does not withstand somebody who makes files
/// that agree with their checksums, who could as well write another manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum(u64);

impl Checksum {
    /// That of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(bytes))
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for Checksum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_right = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let parsed = is_right.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        parsed.map(Self).ok_or_else(|| "a checksum is not 16 hexadecimal digits".into())
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_function() {
        // From the reference implementation, xxHash 0.8.
        assert_eq!(Checksum::of(b"").to_string(), "2d06800538d394c2");
        for text in ["2d06800538d394c", "2d06800538d394c22", "+d06800538d394c2", "zz"] {
            assert!(text.parse::<Checksum>().is_err(), "{text}");
        }
        assert_eq!("2d06800538d394c2".parse(), Ok(Checksum::of(b"")));
    }
}
