//! The sentences of [`Error`](super::Error) that depend on a value: what a limit, a name or an address has to say.

use std::fmt::{self, Display, Write};

/// Text from outside, shown in one line whatever it contains: a NUL is `\\0`, an escape `\\u{1b}`.
pub(super) fn shown(text: &str) -> impl Display + '_ {
    struct Shown<'a>(&'a str);
    impl Display for Shown<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.chars().try_for_each(|character| match character.is_control() {
                true => write!(f, "{}", character.escape_debug()),
                false => f.write_char(character),
            })
        }
    }
    Shown(text)
}

/// Why a budget has no room; one without a limit refuses only what cannot be counted.
pub(super) fn no_room(
    limit_bytes: usize,
    in_use_bytes: usize,
    requested_bytes: usize,
    guaranteed_bytes: usize,
) -> String {
    if limit_bytes == usize::MAX {
        return format!(
            "has no limit, but cannot count {requested_bytes} more bytes: with the {in_use_bytes} in use the sum would \
             be more than can be counted; ask for less"
        );
    }
    let kept = match guaranteed_bytes {
        0 => String::new(),
        _ => format!(", of which {guaranteed_bytes} are guaranteed to others"),
    };
    format!(
        "has no room for {requested_bytes} more bytes: {in_use_bytes} of its {limit_bytes} are in use{kept}; free \
         something, or give it a higher limit"
    )
}

/// Why a request was refused that was chosen to make room.
pub(super) fn chosen(held_bytes: usize, chosen_for: &dyn Display) -> String {
    format!(
        "is full, and the request that holds {held_bytes} bytes of it was chosen to make room for {chosen_for}; it \
         should give back what it can, and be tried again later"
    )
}

/// A request by its name; one that was given none is called `request 7` already.
pub(super) fn request_called(name: &str) -> String {
    let is_numbered = name.strip_prefix("request ").is_some_and(|number| number.parse::<u64>().is_ok());
    match name {
        "" => "the request".to_owned(),
        _ if is_numbered => name.to_owned(),
        _ => format!("request '{}'", shown(name)),
    }
}

/// What was asked of a request, where that was memory.
pub(super) fn asked_for(requested_bytes: usize) -> String {
    if requested_bytes == 0 { String::new() } else { format!(" ({requested_bytes} bytes were asked for)") }
}

/// What is not a block of `ctxalloc_new`.
pub(super) fn no_block(address: usize, size_bytes: usize) -> String {
    if size_bytes == 0 {
        return format!(
            "no live block of ctxalloc_new() begins at {address:#x}: it was freed, or came from another allocator"
        );
    }
    format!(
        "{size_bytes} bytes from {address:#x} on lie in no live block of ctxalloc_new(): it was freed, came from another \
         allocator, or is shorter"
    )
}
