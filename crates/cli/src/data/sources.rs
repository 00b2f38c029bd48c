//! The text that needs no download: Rust sources that cargo put on this machine for this build.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::files::{List, read_file};
use crate::error::CliError;

/// Packages that every build of this command compiles, whatever the platform, and that people
/// wrote by hand. A fixed list, at the versions of Cargo.lock, is the same text on every machine;
/// whatever else lies in cargo's folder is not.
const PACKAGES: &[&str] = &[
    "burn-autodiff",
    "burn-backend",
    "burn-core",
    "burn-flex",
    "burn-nn",
    "burn-tensor",
    "bytes",
    "clap_builder",
    "half",
    "hashbrown",
    "memchr",
    "rand",
    "rayon",
    "rayon-core",
    "safetensors",
    "serde",
    "serde_core",
    "serde_json",
    "syn",
];

/// Larger files are tables that a program wrote.
const FILE_BYTES_MAX: u64 = 256 << 10;

const LOCK: &str = include_str!("../../../../Cargo.lock");

/// Every Rust file of [`PACKAGES`], in order of package and path.
pub(super) fn read() -> Result<Vec<Vec<u8>>, CliError> {
    let registries = registries();
    let mut texts = Vec::new();
    for name in PACKAGES {
        let package = format!("{name}-{}", version(name));
        let folder = registries.iter().map(|registry| registry.join(&package));
        let folder = folder.into_iter().find(|folder| folder.is_dir()).ok_or_else(|| {
            CliError::Data(format!(
                "there is no text to train on: cargo's folder has no sources of {package}; \
                 name a text file or folder with --data PATH"
            ))
        })?;
        for file in List::of(&folder, &is_hand_written)?.files {
            texts.push(read_file(&file)?);
        }
    }
    Ok(texts)
}

fn is_hand_written(path: &Path) -> bool {
    let small = || fs::metadata(path).is_ok_and(|metadata| metadata.len() <= FILE_BYTES_MAX);
    path.extension().is_some_and(|extension| extension == "rs") && small()
}

/// Where cargo unpacks packages: one folder a registry.
fn registries() -> Vec<PathBuf> {
    let Some(home) = cargo_home(std::env::var_os("CARGO_HOME")) else { return Vec::new() };
    let entries = fs::read_dir(home.join("registry/src")).into_iter().flatten();
    let mut folders: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// Cargo's folder, by the variable that may name it; as to cargo, an empty one is none.
fn cargo_home(variable: Option<OsString>) -> Option<PathBuf> {
    let named = variable.filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
}

/// The version in Cargo.lock; the last where there are several.
fn version(name: &str) -> &'static str {
    let entry = format!("name = \"{name}\"\nversion = \"");
    let version = LOCK.rsplit_once(&entry).and_then(|(_, after)| after.split('"').next());
    version.expect("every package of the list is in Cargo.lock; a test holds it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_names_no_folder() {
        assert_eq!(cargo_home(Some("/a".into())), Some("/a".into()));
        assert_eq!(cargo_home(Some("".into())), cargo_home(None));
    }

    #[test]
    fn every_package_is_in_the_lock_file() {
        for name in PACKAGES {
            let version = version(name);
            assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{name} {version}");
        }
    }
}
