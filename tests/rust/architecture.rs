//! What ARCHITECTURE.md says of unsafe code: these layers and files have none.

use std::fs;
use std::path::{Path, PathBuf};

/// ARCHITECTURE.md names each of them.
const SAFE: &[&str] = &["src/scope", "src/task", "src/thread.rs", "src/request.rs", "src/python/asyncio"];

fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).expect("a folder of sources");
    entries.flat_map(|entry| sources(&entry.expect("an entry").path())).collect()
}

/// Whether a line of code, without its comment, has the keyword.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.split(|character: char| !character.is_alphanumeric() && character != '_').any(|word| word == "unsafe")
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn the_safe_layers_have_no_unsafe_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    for name in SAFE {
        assert!(architecture.contains(&format!("`{name}`")), "ARCHITECTURE.md does not name {name}");
        for path in sources(&root.join(name)) {
            let text = fs::read_to_string(&path).expect("a readable source");
            let found = text.lines().position(is_unsafe).map(|line| line + 1);
            assert_eq!(found, None, "{} has unsafe code in this line; see ARCHITECTURE.md", path.display());
        }
    }
}

#[test]
fn this_test_sees_unsafe_code_and_not_the_word() {
    assert!(is_unsafe("    unsafe { f() }"));
    assert!(is_unsafe("pub unsafe fn f();"));
    assert!(!is_unsafe("#![deny(unsafe_code)] // unsafe"));
}
