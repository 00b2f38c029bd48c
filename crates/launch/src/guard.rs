//! A process that ends the ranks' process groups where this process is killed and cannot.
//!
//! A rank is tethered and dies with this process; its own children, such as the workers of a data
//! loader, are not. The guard reads a pipe whose end tells it that this process is gone.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;

/// Keeps the groups that run in `$groups`, each between blanks; POSIX, for any `/bin/sh`.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
groups=' '
while read -r word group; do
    case $word in
        runs) groups="$groups-$group " ;;
        ended) groups="${groups%% -$group *} ${groups#* -$group }" ;;
    esac
done
[ "$groups" = ' ' ] || kill -s KILL -- $groups
"#;

/// Ends with its pipe, and kills the groups that run then.
pub(crate) struct Guard {
    shell: Child,
    /// There until the guard is dropped.
    pipe: Option<ChildStdin>,
}

impl Guard {
    pub(crate) fn start() -> io::Result<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // What the terminal sends to this process's group does not reach it.
            .process_group(0)
            .spawn()?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }

    pub(crate) fn runs(&mut self, group: Pid) -> io::Result<()> {
        self.tell("runs", group)
    }

    pub(crate) fn ended(&mut self, group: Pid) -> io::Result<()> {
        self.tell("ended", group)
    }

    fn tell(&mut self, word: &str, group: Pid) -> io::Result<()> {
        let line = format!("{word} {}\n", group.as_raw_nonzero());
        self.pipe.as_mut().map_or(Ok(()), |pipe| pipe.write_all(line.as_bytes()))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        // It ends with the pipe; who waits in vain for it has lost nothing.
        let _ended = self.shell.wait();
    }
}
