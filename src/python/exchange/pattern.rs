//! `Pattern`: a path with parameters, as `routes` of a middleware and frameworks write it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A path with parameters: a text, then parameters with a text after each.
pub(super) struct Pattern {
    first: String,
    others: Vec<(Parameter, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    /// ``{name}``: something without a slash.
    Segment,
    /// ``{name:path}``: anything, or nothing.
    Path,
}

impl Pattern {
    /// ``texts``: those around its parameters. ``are_paths``: for each parameter whether it takes slashes.
    pub(super) fn of(texts: Vec<String>, are_paths: Vec<bool>) -> PyResult<Self> {
        let mut texts = texts.into_iter();
        let first = texts.next().ok_or_else(|| PyValueError::new_err("a pattern has a text at its beginning"))?;
        let kinds = are_paths.into_iter().map(|is| if is { Parameter::Path } else { Parameter::Segment });
        Ok(Self { first, others: kinds.zip(texts).collect() })
    }

    /// Whether the pattern makes up the whole of `path`. Takes time in proportion to the path's length, times that of
    /// the pattern: who asks chooses the path.
    pub(super) fn is(&self, path: &str) -> bool {
        let Some(rest) = path.strip_prefix(self.first.as_str()) else { return false };
        let Some(((parameter, text), before)) = self.others.split_last() else { return rest.is_empty() };
        let Some(rest) = rest.strip_suffix(text.as_str()) else { return false };
        if before.is_empty() {
            return *parameter == Parameter::Path || !(rest.is_empty() || rest.contains('/'));
        }
        // Where the part of the pattern up to here may end, in ascending order.
        let mut starts = vec![0];
        for (parameter, text) in before {
            let mut ends = parameter.ends(rest, &starts);
            ends.retain_mut(|end| {
                let follows = rest.as_bytes()[*end..].starts_with(text.as_bytes());
                *end += text.len();
                follows
            });
            starts = ends;
        }
        parameter.ends(rest, &starts).last() == Some(&rest.len())
    }
}

impl Parameter {
    /// Where a value may end that begins at one of `starts`: both in ascending order, each end once.
    fn ends(self, path: &str, starts: &[usize]) -> Vec<usize> {
        let Some(&first) = starts.first() else { return Vec::new() };
        let ends = (first..=path.len()).filter(|end| path.is_char_boundary(*end));
        if self == Self::Path {
            return ends.collect();
        }
        let mut starts = starts.iter().copied().peekable();
        // Whether a value that has begun may go on here.
        let mut goes_on = false;
        let mut seen = first;
        ends.filter(|&end| {
            goes_on = goes_on && !path[seen..end].contains('/');
            seen = end;
            let is_end = goes_on;
            goes_on |= starts.next_if_eq(&end).is_some();
            is_end
        })
        .collect()
    }
}
