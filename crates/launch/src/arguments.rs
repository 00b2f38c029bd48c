//! The words of `oxizero launch`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

pub(crate) const HELP: &str = "\
Starts a script as several ranks of this machine, with the environment that torchrun sets

Usage: oxizero launch -n <N> [OPTIONS] <SCRIPT.py> [ARGUMENTS]
       oxizero launch -n <N> [OPTIONS] -m <MODULE> [ARGUMENTS]
       oxizero launch -n <N> [OPTIONS] -- <COMMAND> [ARGUMENTS]

Options:
  -n, --ranks <N>        Ranks to start
      --prefix           Write each line of output with its rank in front
      --grace <SECONDS>  How long a rank has to end itself once told to [default: 5]
  -h, --help             Print help

Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, unless
it is set, OMP_NUM_THREADS in its environment, and nothing on its standard input. When a rank fails,
the others are ended, and the command ends with that rank's exit code. Ctrl-C is passed on to the
ranks; a second one ends them at once.
";

const USAGE: &str = "usage: oxizero launch -n <N> [OPTIONS] <SCRIPT.py> [ARGUMENTS]; see --help";

/// What to start, and how often.
#[derive(Debug, PartialEq)]
pub(crate) struct Launch {
    pub(crate) ranks: usize,
    pub(crate) prefix: bool,
    pub(crate) grace: Duration,
    pub(crate) program: Program,
    /// What the program is given.
    pub(crate) arguments: Vec<OsString>,
}

/// What each rank runs.
#[derive(Debug, PartialEq)]
pub(crate) enum Program {
    /// A file of Python.
    Script(OsString),
    /// A module of Python.
    Module(OsString),
    /// Anything else.
    Command(OsString),
}

/// Reads the words after `launch`; `None` if they ask for help.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Option<Launch>, String> {
    read(words.into_iter()).map_err(|why| format!("{why}\n{USAGE}"))
}

fn read(mut words: impl Iterator<Item = OsString>) -> Result<Option<Launch>, String> {
    let (mut ranks, mut prefix, mut grace) = (None, false, Duration::from_secs(5));
    let program = loop {
        let word = words.next().ok_or("there is nothing to start; name a script")?;
        let (option, inline) = split(&word);
        let mut value = || inline.clone().or_else(|| words.next()).ok_or(missing(&option));
        match option.as_str() {
            "-h" | "--help" => return Ok(None),
            "-n" | "--ranks" => ranks = Some(positive(&option, &value()?)?),
            "--grace" => grace = seconds(&option, &value()?)?,
            "--prefix" if inline.is_none() => prefix = true,
            "-m" => break Program::Module(value()?),
            "--" => {
                break Program::Command(words.next().ok_or("there is no command after `--`")?);
            }
            unknown if unknown.starts_with('-') => {
                return Err(format!(
                    "option `{unknown}` is unknown; options of the script come after it"
                ));
            }
            _ => break Program::Script(script(word)?),
        }
    };
    let ranks = ranks.ok_or("the number of ranks is missing; write -n and a number")?;
    Ok(Some(Launch { ranks, prefix, grace, program, arguments: words.collect() }))
}

/// An option, and the value that hangs on it: with `=`, or as in `-n2`.
fn split(word: &OsStr) -> (String, Option<OsString>) {
    let text = word.to_string_lossy();
    let hanging = match text.strip_prefix("-n") {
        Some(value) if !value.is_empty() => Some(("-n", value)),
        _ => text.split_once('=').filter(|_| text.starts_with("--")),
    };
    match hanging {
        Some((option, value)) => (option.into(), Some(value.into())),
        None => (text.into_owned(), None),
    }
}

fn missing(option: &str) -> String {
    format!("{option} wants a value")
}

fn positive(option: &str, value: &OsStr) -> Result<usize, String> {
    let number = value.to_str().and_then(|text| text.parse().ok()).filter(|number| *number > 0);
    number.ok_or_else(|| format!("{option} {}: not a number of 1 or more", value.display()))
}

fn seconds(option: &str, value: &OsStr) -> Result<Duration, String> {
    let seconds = value.to_str().and_then(|text| text.parse().ok());
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("{option} {}: not a number of seconds", value.display()))
}

/// A script is named as one and is there: what a shell would have said of each rank.
fn script(word: OsString) -> Result<OsString, String> {
    let shown = word.display();
    let path = Path::new(&word);
    if path.extension() != Some(OsStr::new("py")) {
        return Err(format!(
            "`{shown}` is no Python script (*.py); write `-m` before a module, and `--` before \
             another command"
        ));
    }
    if path.is_file() { Ok(word) } else { Err(format!("there is no file `{shown}`")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str) -> Result<Option<Launch>, String> {
        parse(words.split_whitespace().map(OsString::from))
    }

    fn launch(words: &str) -> Launch {
        parsed(words).unwrap().unwrap()
    }

    #[test]
    fn options_end_where_the_program_begins() {
        let launched = launch("-n 2 --prefix --grace=0.5 -m package.train -n 3 --lr 1 -- x");
        assert_eq!((launched.ranks, launched.prefix), (2, true));
        assert_eq!(launched.grace, Duration::from_millis(500));
        assert_eq!(launched.program, Program::Module("package.train".into()));
        assert_eq!(launched.arguments, ["-n", "3", "--lr", "1", "--", "x"]);
        let launched = launch("--ranks=3 -- sh -c true");
        assert_eq!(launched.program, Program::Command("sh".into()));
        assert_eq!(launched.arguments, ["-c", "true"]);
        let launched = launch("-n2 -m package -n3");
        assert_eq!((launched.ranks, launched.program), (2, Program::Module("package".into())));
        assert_eq!(launched.arguments, ["-n3"]);
        assert_eq!(parsed("-n 2 --help"), Ok(None));
        let after = launch("-n 2 -- train --help");
        assert_eq!(after.arguments, ["--help"]);
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_write() {
        for (words, said) in [
            ("", "there is nothing to start"),
            ("-n", "-n wants a value"),
            ("-n 0 -m x", "-n 0: not a number of 1 or more"),
            ("-n two -m x", "-n two: not a number"),
            ("-n0 -m x", "-n 0: not a number of 1 or more"),
            ("-m x", "write -n and a number"),
            ("-n 2 --", "no command after `--`"),
            ("-n 2 --grace -1 -m x", "--grace -1: not a number of seconds"),
            ("-n 2 --lr 3 train.py", "option `--lr` is unknown; options of the script come after"),
            ("-n 2 absent.py", "there is no file `absent.py`"),
            ("-n 2 ./train", "`./train` is no Python script (*.py); write `-m`"),
        ] {
            let error = parsed(words).unwrap_err();
            assert!(error.contains(said), "{words}: {error}");
            assert!(error.contains("usage: oxizero launch"), "{error}");
        }
    }
}
