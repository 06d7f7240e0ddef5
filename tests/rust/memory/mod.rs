//! Owned memory: it remembers its handler, whatever is selected by the time it is resized or freed.

mod buffer;
mod containers;
mod scratch;
