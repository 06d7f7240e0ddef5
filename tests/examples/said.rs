//! Holds an example to its first lines: what they say it prints is what it prints. Each example in Rust includes this
//! file for its test; the ones in Python are held by `tests/python/test_examples.py`.

use std::error::Error;

/// Runs an example and compares what it wrote with the `text` block in its own docs.
///
/// # Panics
/// Where the two differ, or the example failed.
pub(crate) fn check(source: &str, run: impl FnOnce(&mut Vec<u8>) -> Result<(), Box<dyn Error>>) {
    let mut written = Vec::new();
    run(&mut written).expect("the example succeeds");
    let written = String::from_utf8(written).expect("text");
    assert_eq!(written, said(source), "left: what it prints, right: what its first lines say");
}

/// The lines of the first block marked `text` in a file's docs.
fn said(source: &str) -> String {
    let docs =
        source.lines().map_while(|line| line.strip_prefix("//!")).map(|line| line.strip_prefix(' ').unwrap_or(line));
    let block = docs.skip_while(|line| *line != "```text").skip(1).take_while(|line| *line != "```");
    let said: String = block.flat_map(|line| [line, "\n"]).collect();
    assert!(!said.is_empty(), "the first lines of an example say what it prints, in a block marked `text`");
    said
}
