//! What docs/development.md says of comments, which rustfmt leaves as they are.

use super::layers::{sources, src};
use std::fs;
use std::path::{Path, PathBuf};

const WIDTH: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).into()
}

/// Whether the line is a comment that could end earlier: no row of a table, no picture, no address alone.
fn is_too_long(line: &str) -> bool {
    let text = line.trim_start();
    let is_fixed = text.contains(" | ") || text.contains('►') || text.contains("](");
    text.starts_with("//") && !is_fixed && line.chars().count() > WIDTH
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn comments_end_at_column_120() {
    let tests = root().join("tests");
    for path in [src(), tests].iter().flat_map(|folder| sources(folder)) {
        let text = fs::read_to_string(&path).expect("a readable source");
        let found = text.lines().position(is_too_long).map(|line| line + 1);
        assert_eq!(found, None, "{}: the comment in this line goes past column {WIDTH}", path.display());
    }
}

#[test]
fn this_test_sees_a_comment_that_is_too_long() {
    assert!(is_too_long(&format!("    /// {}", "word ".repeat(24))));
    assert!(!is_too_long(&format!("    let text = {:?};", "word ".repeat(24))));
}

/// What a safety comment may not consist of: it has to say why the step is sound, and not that somebody said so, or
/// that the reader should look elsewhere.
const NO_PROOFS: [&str; 10] = [
    "live",
    "live blocks",
    "as above",
    "as for this function",
    "this function's contract",
    "by contract",
    "attached, by contract",
    "the caller's promise",
    "the caller's promises",
    "alone again",
];

/// The line of a safety comment that proves nothing.
fn without_proof(text: &str) -> Option<usize> {
    let said =
        |line: &str| line.trim_start().strip_prefix("// SAFETY: ").map(|said| said.trim_end_matches('.').to_owned());
    text.lines().position(|line| {
        said(line).is_some_and(|said| NO_PROOFS.contains(&said.as_str()) || said.split_whitespace().count() < 2)
    })
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn safety_comments_prove_their_step() {
    for path in ["src", "tests", "benches"].iter().flat_map(|folder| sources(&root().join(folder))) {
        let text = fs::read_to_string(&path).expect("a readable source");
        let found = without_proof(&text).map(|line| line + 1);
        assert_eq!(found, None, "{}: the safety comment in this line says of no fact why it holds", path.display());
    }
}

#[test]
fn this_test_sees_a_safety_comment_without_a_proof() {
    assert_eq!(without_proof("fn f() {\n    // SAFETY: live.\n"), Some(1));
    assert_eq!(without_proof("    // SAFETY: this function's contract.\n"), Some(0));
    assert_eq!(
        without_proof("    // SAFETY: `first` made the block, and it is released once (this function's contract).\n"),
        None
    );
}
