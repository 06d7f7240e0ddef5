//! What docs/development.md says of comments, which rustfmt leaves as they are.

use super::layers::{sources, src};
use std::fs;
use std::path::Path;

const WIDTH: usize = 120;

/// Whether the line is a comment that could end earlier: no row of a table, no picture, no address alone.
fn is_too_long(line: &str) -> bool {
    let text = line.trim_start();
    let is_fixed = text.contains(" | ") || text.contains('►') || text.contains("](");
    text.starts_with("//") && !is_fixed && line.chars().count() > WIDTH
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn comments_end_at_column_120() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
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
