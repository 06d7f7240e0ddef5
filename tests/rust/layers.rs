//! The layers of ARCHITECTURE.md: each folder of `src/` uses those below it and the leaves, nothing above. This test
//! reads the sources, for the compiler would let any module use any other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From the top to the bottom; those in one line stand beside each other and know nothing of one another.
const LAYERS: &[&[&str]] = &[
    &["python"],
    &["capi"],
    &["tower", "tune"],
    &["task", "thread", "request", "metrics", "rayon"],
    &["room"],
    &["memory"],
    &["whole"],
    &["scope"],
    &["handler"],
    &["strategy"],
    &["source"],
];
/// Open to all; they import no layer.
const LEAVES: &[&str] = &[
    "answer",
    "counters",
    "error",
    "layout",
    "os",
    "random",
    "recording",
    "settings",
    "survived",
    "sync",
    "trace",
    "unattributed",
];

pub(super) fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

pub(super) fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The module of `src/` that a file belongs to: its folder, or its own name.
fn module_of(path: &Path) -> String {
    let inside = path.strip_prefix(src()).expect("a source");
    let first = inside.components().next().expect("a name").as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// The code without its comments: docs may name whatever they like.
fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The modules of the crate that a text names by a path: `crate::scope::..`, `use crate::{scope, ..}`,
/// `use crate::{handler::{..}, ..}`.
fn modules_named(text: &str) -> BTreeSet<String> {
    let code = without_comments(text);
    let mut named = BTreeSet::new();
    for (start, prefix) in code.match_indices("crate::") {
        let before = code[..start].chars().next_back();
        if before.is_some_and(|character| character.is_alphanumeric() || character == '_' || character == ':') {
            continue; // `$crate::` is ours too; `some_crate::` is not
        }
        let rest = &code[start + prefix.len()..];
        if let Some(group) = rest.strip_prefix('{') {
            named.extend(heads_of_group(group));
        } else {
            named.insert(head(rest));
        }
    }
    named
}

/// The first segments of `a::b, c::{d, e}, f}`.
fn heads_of_group(group: &str) -> Vec<String> {
    let mut heads = vec![head(group.trim_start())];
    let mut depth = 0;
    for (position, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(head(group[position + 1..].trim_start())),
            _ => {}
        }
    }
    heads.retain(|head| !head.is_empty());
    heads
}

fn head(path: &str) -> String {
    path.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

fn rank(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Why `from` may not use `to`; nothing where it may.
fn objection(from: &str, to: &str) -> Option<&'static str> {
    if from == "lib" || from == to || LEAVES.contains(&to) {
        return None;
    }
    let Some(below) = rank(to) else {
        return Some("names something that is neither a layer nor a leaf: say from which layer it comes");
    };
    match rank(from) {
        None => Some("is a leaf, and a leaf imports no layer"),
        Some(above) if above < below => None,
        Some(above) if above == below => Some("stands beside it"),
        Some(_) => Some("stands below it"),
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn each_layer_uses_only_those_below_it() {
    let mut broken = Vec::new();
    let files = sources(&src());
    assert!(files.len() > 20, "the sources were not found");
    for path in &files {
        let module = module_of(path);
        assert!(
            module == "lib" || rank(&module).is_some() || LEAVES.contains(&module.as_str()),
            "{} belongs to no layer: give '{module}' its place in tests/rust/layers.rs",
            path.display()
        );
        let text = fs::read_to_string(path).expect("a readable source");
        for named in modules_named(&text) {
            if let Some(objection) = objection(&module, &named) {
                broken.push(format!("{}: '{module}' uses '{named}', but {objection}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "the order of the layers is broken:\n{}", broken.join("\n"));
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn only_the_python_binding_knows_pyo3() {
    for path in sources(&src()) {
        if module_of(&path) == "python" {
            continue;
        }
        let code = without_comments(&fs::read_to_string(&path).expect("a readable source"));
        assert!(!code.contains("pyo3"), "{} names pyo3, which belongs to src/python", path.display());
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn only_the_task_layer_and_the_python_binding_know_tokio() {
    for path in sources(&src()) {
        let module = module_of(&path);
        let code = without_comments(&fs::read_to_string(&path).expect("a readable source"));
        let allowed = ["task", "python"].contains(&module.as_str());
        assert!(allowed || !code.contains("tokio::"), "{} names tokio", path.display());
    }
}

#[test]
fn this_test_reads_all_ways_to_name_a_module() {
    let named = |text| modules_named(text).into_iter().collect::<Vec<_>>();
    assert_eq!(named("use crate::scope::Context;"), ["scope"]);
    assert_eq!(named("use crate::{scope, handler::{Handler, register}, error::Error};"), ["error", "handler", "scope"]);
    assert_eq!(named("let h: crate::handler::Handler = crate::scope::current();"), ["handler", "scope"]);
    assert_eq!(named("// crate::python is only talked about\nuse other_crate::task;"), [""; 0]);
    assert_eq!(named("pub(crate) use crate::\n"), [""]);
}

#[test]
fn this_test_objects_to_each_step_upwards() {
    assert_eq!(objection("task", "scope"), None);
    assert_eq!(objection("handler", "error"), None);
    assert_eq!(objection("lib", "python"), None);
    assert_eq!(objection("scope", "memory"), Some("stands below it"));
    assert_eq!(objection("task", "thread"), Some("stands beside it"));
    assert_eq!(objection("error", "handler"), Some("is a leaf, and a leaf imports no layer"));
    assert!(objection("handler", "Handler").is_some(), "by way of lib.rs, past the layers");
}

/// What is made at its first use, by a lock that the next one waits for. A child of `fork` that was born in between
/// would wait for ever: `sync::Made` and `python::Imported` are there for that.
const WAITED_FOR: &[&str] = &["OnceLock<", "LazyLock<", "lazy_static!", "get_or_try_init(", ".import(py, \""];
/// Where one may stand, and why no fork falls into it.
const MAY_WAIT: &[(&str, &str)] = &[
    ("handler/table.rs", "loom's own, which does not fork"),
    ("room/loom_tests.rs", "loom's own, which does not fork"),
    ("python/exchange/mod.rs", "filled in one step, with a value that is there"),
    ("python/exchange/routes.rs", "filled in one step, with a value that is there"),
    ("python/imported.rs", "filled in one step, with a value that is there"),
    ("python/numpy.rs", "filled in one step, with a value that is there"),
    ("python/usm/queue.rs", "filled in one step, with a value that is there; SYCL is not used in a child of fork"),
    ("python/request/call.rs", "filled in one step, with a value that is there"),
    ("python/request/entering.rs", "filled in one step, with a value that is there"),
    ("python/request/current.rs", "filled in one step, with a value that is there"),
    ("python/scope_type.rs", "made while the module is imported, in one step that lets nobody else run"),
];

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn nothing_is_made_at_first_use_that_a_fork_could_catch_half_made() {
    for path in sources(&src()) {
        let name = path.strip_prefix(src()).expect("a source").to_string_lossy().into_owned();
        let code = without_comments(&fs::read_to_string(&path).expect("a source"));
        let found: Vec<_> = WAITED_FOR.iter().filter(|what| code.contains(**what)).collect();
        let allowed = MAY_WAIT.iter().any(|(file, _)| *file == name);
        assert!(found.is_empty() || allowed, "{name} has {found:?}: use sync::Made, or python::Imported");
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn each_name_in_these_lists_is_a_module_and_architecture_md_has_it() {
    let root = src().parent().expect("the crate's folder").to_owned();
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    for name in LAYERS.iter().copied().flatten().chain(LEAVES) {
        let is_there = src().join(name).is_dir() || src().join(format!("{name}.rs")).is_file();
        assert!(is_there, "src/ has no module {name}");
    }
    let leaves = architecture.lines().find(|line| line.trim_start().starts_with("leaves,")).expect("a line of leaves");
    let (_, named) = leaves.split_once(':').expect("a list");
    assert_eq!(named.trim().split(", ").collect::<Vec<_>>(), LEAVES, "ARCHITECTURE.md, line {leaves:?}");
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn documents_name_the_capsule_of_the_table_as_the_code_does() {
    let root = src().parent().expect("the crate's folder").to_owned();
    let code = fs::read_to_string(src().join("python/shared.rs")).expect("src/python/shared.rs");
    let (_, rest) = code.split_once("\"_table_").expect("the attribute's name");
    let version = head(rest);
    for document in ["ARCHITECTURE.md", "docs/decisions/0008-one-table-for-several-modules.md"] {
        let text = fs::read_to_string(root.join(document)).expect(document);
        for (position, _) in text.match_indices("_table_") {
            assert_eq!(
                head(&text[position + "_table_".len()..]),
                version,
                "{document} names another version of the table"
            );
        }
    }
}
