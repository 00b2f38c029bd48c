//! What must hold of the workspace's own text: sizes, arrows between crates, words, unsafe code.
//!
//! Each rule returns its violations as `path:line: what is wrong; what to do`, and the test shows
//! all of them at once. Function length, parameters and flags are clippy's (see `clippy.toml`).
#![expect(clippy::unwrap_used, reason = "a file that cannot be read fails the test")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Lines of a Rust file, beyond which it likely holds more than one noun.
const LINES_MAX: usize = 500;
/// Characters of a line.
const WIDTH_MAX: usize = 100;

/// Files that are longer, and how long: the numbers may only shrink.
const LONG_FILES: &[(&str, usize)] = &[];

/// Which crates of the workspace a crate may use, outside its tests. A new crate needs a row, and
/// the row needs ARCHITECTURE.md.
const ARROWS: &[(&str, &[&str])] = &[
    ("oxizero-core", &[]),
    ("oxizero-device", &["oxizero-core"]),
    ("oxizero-comm", &["oxizero-core", "oxizero-device"]),
    ("oxizero-optim", &["oxizero-core", "oxizero-device"]),
    ("oxizero-checkpoint", &["oxizero-core"]),
    ("oxizero", BELOW_ENGINE),
    ("oxizero-launch", &[]),
    ("oxizero-burn", ENGINE_AND_ABOVE),
    ("oxizero-sim", ENGINE_AND_ABOVE),
    ("oxizero-python", ENGINE_AND_LAUNCH),
    ("oxizero-cli", ALL),
];
const BELOW_ENGINE: &[&str] =
    &["oxizero-core", "oxizero-device", "oxizero-checkpoint", "oxizero-comm", "oxizero-optim"];
const ENGINE_AND_ABOVE: &[&str] = &[
    "oxizero-core",
    "oxizero-device",
    "oxizero-checkpoint",
    "oxizero-comm",
    "oxizero-optim",
    "oxizero",
];
const ENGINE_AND_LAUNCH: &[&str] = &[
    "oxizero-core",
    "oxizero-device",
    "oxizero-checkpoint",
    "oxizero-comm",
    "oxizero-optim",
    "oxizero",
    "oxizero-launch",
];
const ALL: &[&str] = &[
    "oxizero-core",
    "oxizero-device",
    "oxizero-checkpoint",
    "oxizero-comm",
    "oxizero-optim",
    "oxizero",
    "oxizero-burn",
    "oxizero-launch",
    "oxizero-sim",
];

/// What the sources under a path may not name, and why.
const UNKNOWN_TO: &[(&str, &[&str], &str)] = &[
    (
        "crates/core/src",
        &["std::fs", "std::net", "std::thread", "std::env", "std::process", "Instant"],
        "core has no effects",
    ),
    ("crates/device/src", &["Rank", "WorldSize", "Stage", "ParamId"], "device knows no ranks"),
    ("crates/comm/src", &["Stage", "BucketId", "ParamId"], "comm knows no training"),
    ("crates/optim/src", &["Rank", "WorldSize", "Stage"], "optim knows no ranks or stages"),
    (
        "crates/checkpoint/src",
        &["Rank", "WorldSize", "Stage", "BucketId", "Mesh"],
        "a checkpoint knows no world",
    ),
    ("crates/engine/src", &["burn", "clap", "std::env"], "the engine knows no front-end"),
    ("crates/sim/src/oracle", JUDGED, "the oracle shares no code with what it judges"),
    ("crates/sim/src/rounding.rs", JUDGED, "the oracle shares no code with what it judges"),
];
const JUDGED: &[&str] =
    &["oxizero", "oxizero_device", "oxizero_comm", "oxizero_optim", "half", "bytemuck"];

/// Crates without unsafe code, by their root file.
const SAFE_ROOTS: &[&str] = &[
    "crates/core/src/lib.rs",
    "crates/optim/src/lib.rs",
    "crates/checkpoint/src/lib.rs",
    "crates/engine/src/lib.rs",
    "crates/burn/src/lib.rs",
    "crates/cli/src/main.rs",
    "crates/sim/src/lib.rs",
];

/// The files that may hold unsafe code: each has one reason, and a safe face.
const UNSAFE_FILES: &[&str] = &[
    "crates/comm/src/shm/memory.rs",
    "crates/comm/src/shm/section.rs",
    "crates/device/src/region.rs",
    "crates/device/src/simd.rs",
    "crates/engine/tests/common/mod.rs",
    "crates/launch/src/tether.rs",
    "crates/python/src/tensor.rs",
];

/// Names of others' interfaces, which their users write, where they are spoken.
const FOREIGN_WORDS: &[(&str, &[&str])] = &[
    ("crates/core/src/deepspeed/", &["fp16_master_weights_and_grads"]),
    ("crates/python/src/gathered.rs", &["utils"]),
    ("python/", &["fp16_enabled", "util", "utils"]),
    ("bench/", &["utils"]),
    ("docs/pytorch.md", &["utils"]),
    ("README.md", &["utils"]),
];

/// This file names what the others may not.
const SELF: &str = "crates/core/tests/tidy.rs";

#[test]
fn the_workspace_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = texts(&root);
    let mut found = Vec::new();
    for file in &files {
        found.extend(sizes(file));
        found.extend(widths(file));
        found.extend(module_doc(file));
        if file.path != SELF {
            found.extend(words(file));
            found.extend(unsafe_code(file));
            found.extend(unknown_names(file));
        }
    }
    found.extend(arrows(&files));
    found.extend(lints(&files));
    found.extend(executables(&root));
    assert!(found.is_empty(), "{} violations:\n{}", found.len(), found.join("\n"));
}

/// A text file of the workspace.
struct Text {
    /// From the workspace's root.
    path: String,
    content: String,
}

impl Text {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.content.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Every text that people wrote: sources, manifests, documents, scripts.
fn texts(root: &Path) -> Vec<Text> {
    let mut open: Vec<PathBuf> = vec![root.to_path_buf()];
    let mut files = Vec::new();
    while let Some(path) = open.pop() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            let built = ["target", "t-", ".git", ".venv", "runs", "__pycache__"];
            if !built.iter().any(|prefix| name.starts_with(prefix)) {
                open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            continue;
        }
        let extension = path.extension().and_then(|extension| extension.to_str());
        let wanted = matches!(extension, Some("rs" | "toml" | "md" | "sh" | "py"));
        if wanted || ["test", "run"].contains(&name) {
            let relative = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            files.push(Text { path: relative, content: fs::read_to_string(&path).unwrap() });
        }
    }
    assert!(files.len() > 30, "only {} files under {}", files.len(), root.display());
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn sizes(file: &Text) -> Vec<String> {
    let lines = file.content.lines().count();
    let listed = LONG_FILES.iter().find(|(path, _)| *path == file.path).map(|(_, lines)| *lines);
    let max = listed.unwrap_or(LINES_MAX);
    let path = &file.path;
    if file.is_rust() && lines > max {
        return vec![format!("{path}:{lines}: more than {max} lines; split it by its nouns")];
    }
    if listed.is_some_and(|listed| lines < listed) {
        return vec![format!("{path}:{lines}: shorter than listed; lower its row in LONG_FILES")];
    }
    Vec::new()
}

fn widths(file: &Text) -> Vec<String> {
    let unbreakable =
        |line: &str| file.path.ends_with(".md") && (line.starts_with('|') || line.contains("://"));
    let wide = file.lines().filter(|(_, line)| line.chars().count() > WIDTH_MAX);
    let wide = wide.filter(|(_, line)| !unbreakable(line));
    wide.map(|(number, _)| format!("{}:{number}: wider than {WIDTH_MAX}; break it", file.path))
        .collect()
}

fn module_doc(file: &Text) -> Option<String> {
    let missing = file.is_rust() && !file.content.starts_with("//!");
    missing.then(|| format!("{}:1: no module doc; say what it holds and may not know", file.path))
}

/// The identifiers of a line, each with what stands before and after it.
fn identifiers(line: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    let inside = |c: char| c.is_ascii_alphanumeric() || c == '_';
    line.split(move |c| !inside(c)).filter(|word| !word.is_empty()).map(move |word| {
        let start = word.as_ptr().addr() - line.as_ptr().addr();
        (word, &line[..start], &line[start + word.len()..])
    })
}

fn words(file: &Text) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in file.lines() {
        let reasons = identifiers(line).filter_map(|(word, before, after)| {
            let foreign = FOREIGN_WORDS.iter().filter(|(at, _)| file.path.starts_with(at));
            if foreign.flat_map(|(_, words)| *words).any(|foreign| *foreign == word) {
                return None;
            }
            let advice = banned(word, before, after)?;
            Some(format!("{}:{number}: `{word}`; {advice}", file.path))
        });
        found.extend(reasons);
        let machine = ["/work/", "/root/", "/home/"].iter().find(|path| line.contains(**path));
        if let Some(path) = machine {
            found.push(format!("{}:{number}: `{path}` is one machine's path", file.path));
        }
    }
    found
}

/// Why a word may not stand where it stands, if it may not.
fn banned(word: &str, before: &str, after: &str) -> Option<&'static str> {
    let of_std = before.ends_with('.') || before.ends_with("::");
    if ["TODO", "FIXME", "XXX", "HACK"].contains(&word) {
        return Some("finish it, or open an issue");
    }
    if ["todo", "unimplemented", "dbg"].contains(&word) && after.starts_with("!(") {
        return Some("finish it");
    }
    if ["fp16_", "hp_", "lp_"].iter().any(|prefix| word.starts_with(prefix)) {
        return Some("a dtype is a value, not a prefix");
    }
    let has = |parts: &[&str]| word.split('_').any(|part| parts.contains(&part));
    if has(&["ipg"]) {
        return Some("the field says bucket");
    }
    if has(&["util", "utils"]) {
        return Some("name what it does");
    }
    if has(&["swap", "swaps"]) && !of_std {
        return Some("say fetch and stash, or exchange");
    }
    has(&["door", "doors"]).then_some("say front-end")
}

fn unsafe_code(file: &Text) -> Vec<String> {
    if !file.is_rust() {
        return Vec::new();
    }
    let path = &file.path;
    let mut found = Vec::new();
    if SAFE_ROOTS.contains(&path.as_str()) && !file.content.contains("#![forbid(unsafe_code)]") {
        found.push(format!("{path}:1: no `#![forbid(unsafe_code)]`; this crate is safe"));
    }
    if !UNSAFE_FILES.contains(&path.as_str()) {
        let used = code_lines(file)
            .filter(|(_, code)| identifiers(code).any(|(word, _, _)| word == "unsafe"));
        found.extend(used.map(|(number, _)| {
            format!("{path}:{number}: unsafe code; move it to a file of UNSAFE_FILES")
        }));
    }
    found
}

/// Lines without their comments.
fn code_lines(file: &Text) -> impl Iterator<Item = (usize, &str)> {
    file.lines().map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
}

fn unknown_names(file: &Text) -> Vec<String> {
    let mut found = Vec::new();
    for (_, names, why) in UNKNOWN_TO.iter().filter(|(at, ..)| file.path.starts_with(at)) {
        for (number, code) in code_lines(file) {
            let named = names.iter().filter(|name| match name.contains("::") {
                true => code.contains(**name),
                false => identifiers(code).any(|(word, ..)| word == **name),
            });
            found.extend(named.map(|name| format!("{}:{number}: `{name}`; {why}", file.path)));
        }
    }
    found
}

/// Crates use only what ARROWS allows, and every crate of the workspace has its row.
fn arrows(files: &[Text]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files.iter().filter(|file| is_manifest(file)) {
        let manifest: toml::Table = file.content.parse().unwrap();
        let name = manifest["package"]["name"].as_str().unwrap();
        let Some((_, allowed)) = ARROWS.iter().find(|(of, _)| *of == name) else {
            found.push(format!("{}:1: crate `{name}` has no row in ARROWS", file.path));
            continue;
        };
        let used = ["dependencies", "build-dependencies"].iter();
        let used = used.filter_map(|table| manifest.get(*table)?.as_table());
        let used: BTreeSet<&String> = used.flat_map(|table| table.keys()).collect();
        let ours = used.iter().filter(|used| ARROWS.iter().any(|(of, _)| of == *used));
        for used in ours.filter(|used| !allowed.contains(&used.as_str())) {
            found.push(format!("{}:1: {name} may not use {used}; see ARCHITECTURE.md", file.path));
        }
    }
    found
}

/// Of a crate of the workspace: fuzz targets have workspaces of their own.
fn is_manifest(file: &Text) -> bool {
    let is_manifest = file.path.starts_with("crates/") && file.path.ends_with("/Cargo.toml");
    is_manifest && !file.content.contains("\n[workspace]\n")
}

/// Public items are documented and functions are short because these lints stand.
fn lints(files: &[Text]) -> Vec<String> {
    let workspace = files.iter().find(|file| file.path == "Cargo.toml").expect("the workspace");
    let lints = ["missing_docs", "unsafe_code", "too_many_lines", "undocumented_unsafe_blocks"];
    let gone = lints.iter().filter(|lint| !workspace.content.contains(&format!("\n{lint} = \"")));
    let gone = gone.map(|lint| format!("Cargo.toml:1: the lint `{lint}` is gone; restore it"));
    let deaf = files
        .iter()
        .filter(|file| is_manifest(file) && !file.content.contains("[lints]\nworkspace = true"));
    let deaf = deaf.map(|file| format!("{}:1: add `[lints] workspace = true`", file.path));
    gone.chain(deaf).collect()
}

fn executables(root: &Path) -> Vec<String> {
    let runs = |path: &&&str| {
        let mode = fs::metadata(root.join(path)).map(|data| data.permissions().mode());
        mode.is_ok_and(|mode| mode & 0o111 == 0o111)
    };
    let scripts = [
        "test",
        ".ci/run",
        "bench/set-up.sh",
        "scripts/instructions.sh",
        "scripts/python-test.sh",
        "scripts/python-example.sh",
    ];
    let broken = scripts.iter().filter(|path| !runs(path));
    broken.map(|path| format!("{path}:1: missing or not executable; chmod 755")).collect()
}

#[test]
fn a_violation_of_each_rule_is_seen() {
    let text = |path: &str, content: &str| Text { path: path.into(), content: content.into() };
    let rust = |content: &str| text("crates/core/src/a.rs", content);
    assert_eq!(sizes(&rust(&"a\n".repeat(LINES_MAX + 1))).len(), 1);
    assert_eq!(widths(&rust(&"a".repeat(WIDTH_MAX + 1))).len(), 1);
    assert!(module_doc(&rust("use a;")).is_some());
    let sentences = [
        "// TODO: later",
        "todo!()",
        "let hp_grad = 1;",
        "let ipg_bucket = 1;",
        "mod utils;",
        "fn swap_out() {}",
        "// the front door",
        "cd /work/main",
    ];
    for sentence in sentences {
        assert_eq!(words(&rust(sentence)).len(), 1, "{sentence}");
    }
    let fine = "mem::swap(a, b); items.swap_remove(0); // help_me, outdoors, exploit";
    assert_eq!(words(&rust(fine)), [""; 0]);
    assert_eq!(unsafe_code(&rust("unsafe { } // unsafe")).len(), 1);
    assert_eq!(unsafe_code(&rust("#![expect(unsafe_code)] // unsafe")).len(), 0);
    assert_eq!(unsafe_code(&text("crates/core/src/lib.rs", "//! Words.")).len(), 1);
    assert_eq!(unknown_names(&rust("use std::fs;")).len(), 1);
    let manifest = "[package]\nname = \"oxizero-core\"\n[dependencies]\noxizero = \"1\"\n";
    let found = arrows(&[text("crates/core/Cargo.toml", manifest)]);
    assert!(found[0].contains("oxizero-core may not use oxizero"), "{found:?}");
    let bare = [text("Cargo.toml", ""), text("crates/core/Cargo.toml", manifest)];
    assert_eq!(lints(&bare).len(), 5);
}
