//! What errors say, and what they are.

use super::Error;

fn refused(budget: String, limit_bytes: usize, in_use_bytes: usize, requested_bytes: usize) -> Error {
    let (budget_id, of_request, held_bytes) = (1, false, 0);
    Error::BudgetExceeded {
        budget,
        budget_id,
        of_request,
        limit_bytes,
        in_use_bytes,
        held_bytes,
        requested_bytes,
        chosen_for: None,
        guaranteed_bytes: 0,
    }
}

#[test]
fn messages_name_the_request_and_the_bytes_that_were_asked_for() {
    let ended = |request: &str, requested_bytes| {
        let text = Error::RequestEnded { request: request.into(), requested_bytes }.to_string();
        text.split_once(';').map(|(what, _)| what.to_owned()).unwrap_or(text)
    };
    assert_eq!(ended("job", 5), "request 'job' has ended and gives no more memory (5 bytes were asked for)");
    assert_eq!(ended("job", 0), "request 'job' has ended and gives no more memory");
    assert_eq!(ended("request 7", 0), "request 7 has ended and gives no more memory");
    assert_eq!(ended("", 0), "the request has ended and gives no more memory");
}

#[test]
fn a_budget_without_a_limit_does_not_tell_one() {
    let message = refused("b".to_owned(), usize::MAX, 3, 7).to_string();
    assert!(message.starts_with("budget 'b' has no limit, but cannot count 7 more bytes: with the 3"), "{message}");
}

#[test]
fn a_block_that_is_none_is_named_without_a_size() {
    let message = Error::NotABlock { address: 0x10, size_bytes: 0 }.to_string();
    assert!(message.starts_with("no live block of ctxalloc_new() begins at 0x10:"), "{message}");
}

#[test]
fn what_somebody_gave_stays_in_its_line_whatever_it_has_in_it() {
    let name = || "a\0b\n\u{1b}[31m'ä".to_owned();
    let shown = "a\\0b\\n\\u{1b}[31m'ä";
    for error in [
        Error::UnknownHandler { name: name(), known: name() },
        Error::NameTaken { name: name() },
        Error::NameHasNul { name: name(), position: 1 },
        Error::FunctionMissing { handler: name(), function: "free" },
        refused(name(), 1, 1, 1),
    ] {
        let message = error.to_string();
        assert!(message.contains(shown) && !message.contains(char::is_control), "{message}");
    }
}
