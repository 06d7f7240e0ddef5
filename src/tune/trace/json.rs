//! Texts in JSON, as Python's `json.dumps` writes them: in ASCII.

/// Appends the text, in quotes.
pub(super) fn text(out: &mut Vec<u8>, parts: &[&str]) {
    out.push(b'"');
    for one in parts.iter().flat_map(|part| part.chars()) {
        match one {
            '"' => out.extend(b"\\\""),
            '\\' => out.extend(b"\\\\"),
            '\n' => out.extend(b"\\n"),
            '\r' => out.extend(b"\\r"),
            '\t' => out.extend(b"\\t"),
            '\u{8}' => out.extend(b"\\b"),
            '\u{c}' => out.extend(b"\\f"),
            ' '..='~' | '\u{7f}' => out.push(one as u8),
            _ => {
                for unit in one.encode_utf16(&mut [0; 2]) {
                    out.extend(format!("\\u{unit:04x}").bytes());
                }
            }
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    #[test]
    fn texts_are_ascii_without_control_characters() {
        let mut out = Vec::new();
        super::text(&mut out, &["a\"\\\u{1b}[1m\0\n", "\u{e9}\u{1f600}\u{7f}"]);
        assert_eq!(out, b"\"a\\\"\\\\\\u001b[1m\\u0000\\n\\u00e9\\ud83d\\ude00\x7f\"");
    }
}
