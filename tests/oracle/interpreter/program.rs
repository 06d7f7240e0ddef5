//! The text form of programs, as language.py writes it: `(with 0 2 [(look 0) (yield)])`.

use std::iter::Peekable;

/// A program: its nodes in preorder, which is also their place in the trace.
pub(crate) struct Program {
    pub(crate) nodes: Vec<Node>,
}

/// One step: a word, numbers, and bodies of other nodes.
pub(crate) struct Node {
    pub(crate) word: String,
    pub(crate) numbers: Vec<i64>,
    pub(crate) bodies: Vec<Vec<usize>>,
}

impl Program {
    /// Reads one line of text.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut tokens = tokens(text).peekable();
        let mut program = Self { nodes: Vec::new() };
        program.node(&mut tokens)?;
        match tokens.next() {
            None => Ok(program),
            Some(rest) => Err(format!("{rest:?} follows the program's end")),
        }
    }

    fn node<'a>(&mut self, tokens: &mut Peekable<impl Iterator<Item = &'a str>>) -> Result<usize, String> {
        expect(tokens, "(")?;
        let word = tokens.next().unwrap_or_default().to_owned();
        let index = self.nodes.len();
        self.nodes.push(Node { word, numbers: Vec::new(), bodies: Vec::new() });
        while let Some(text) = tokens.next_if(|token| !matches!(*token, "(" | ")" | "[" | "]")) {
            let number = text.parse().map_err(|_| format!("{text:?} is no number"))?;
            self.nodes[index].numbers.push(number);
        }
        while tokens.next_if_eq(&"[").is_some() {
            let mut body = Vec::new();
            while tokens.next_if_eq(&"]").is_none() {
                body.push(self.node(tokens)?);
            }
            self.nodes[index].bodies.push(body);
        }
        expect(tokens, ")")?;
        Ok(index)
    }
}

fn expect<'a>(tokens: &mut impl Iterator<Item = &'a str>, wanted: &str) -> Result<(), String> {
    match tokens.next() {
        Some(token) if token == wanted => Ok(()),
        other => Err(format!("{wanted:?} should stand where {other:?} does")),
    }
}

/// Brackets one by one, and what stands between blanks.
fn tokens(text: &str) -> impl Iterator<Item = &str> {
    text.split_whitespace().flat_map(|part| {
        part.split_inclusive(['(', ')', '[', ']']).flat_map(|piece| match piece.char_indices().next_back() {
            Some((at, '(' | ')' | '[' | ']')) if at > 0 => vec![&piece[..at], &piece[at..]],
            _ => vec![piece],
        })
    })
}
