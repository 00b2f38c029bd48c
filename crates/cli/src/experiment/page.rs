//! The page: results between two marks, and around them words that people write.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CliError;

/// What results lie between.
const BEGIN: &str = "<!-- Results: written by the command that they name. -->";
const END: &str = "<!-- End of the results. -->";

/// A page that is to be written.
#[derive(Debug)]
pub(super) struct Page {
    path: PathBuf,
    before: String,
    after: String,
}

impl Page {
    /// Reads the words around the results, if the page is there already; else `title` is all that
    /// there is.
    pub(super) fn open(path: &Path, title: &str) -> Result<Self, CliError> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                format!("# {title}\n\n{BEGIN}\n{END}\n")
            }
            text => text.map_err(CliError::path("read", path))?,
        };
        let parts = text.split_once(BEGIN).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(END)?;
            Some((before.to_owned(), after.to_owned()))
        });
        let Some((before, after)) = parts else {
            let why = format!("it has no place for results, from `{BEGIN}` to `{END}`");
            return Err(CliError::path("replace", path)(io::Error::other(why)));
        };
        Ok(Self { path: path.into(), before, after })
    }

    /// Writes the page with these results.
    pub(super) fn write(&self, results: &str) -> Result<(), CliError> {
        let Self { path, before, after } = self;
        let text = format!("{before}{BEGIN}\n\n{}\n\n{END}{after}", results.trim());
        fs::write(path, text).map_err(CliError::path("write", path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_replaced_and_the_words_around_them_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        Page::open(&path, "Title").unwrap().write("first").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("# Title\n") && text.contains("\n\nfirst\n\n"), "{text}");
        fs::write(&path, text.replace("# Title", "# Other\n\nWords.") + "More words.\n").unwrap();
        Page::open(&path, "Title").unwrap().write("second").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let expected = format!("# Other\n\nWords.\n\n{BEGIN}\n\nsecond\n\n{END}\nMore words.\n");
        assert_eq!(text, expected);
    }

    #[test]
    fn a_page_without_a_place_for_results_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        fs::write(&path, format!("{END}{BEGIN}")).unwrap();
        let error = Page::open(&path, "Title").unwrap_err();
        assert!(error.to_string().contains("no place for results"), "{error}");
    }
}
