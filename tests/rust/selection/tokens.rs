//! Rule 2: `set` changes the current context only; its token restores, once, in whatever order, in its own context.

use crate::support::{green, red};
use ctxalloc::{Context, Error, Token, current, reset, set};
use std::thread;

/// Each refused use: nothing changes there, and the token still restores where it belongs.
fn is_foreign_here(token: &Token) {
    let before = current();
    assert_eq!(reset(token), Err(Error::TokenForeign));
    assert_eq!(current(), before);
    assert!(!token.is_used());
}

#[test]
fn no_two_contexts_ever_accept_each_others_tokens() {
    // Far more contexts than one thread draws identities for at a time, on several threads.
    let contexts = crate::support::rounds(3000, 40);
    let tokens: Vec<Token> = thread::scope(|threads| {
        let makers: Vec<_> = (0..4)
            .map(|_| {
                threads.spawn(move || (0..contexts).map(|_| Context::new().run(|| set(red()))).collect::<Vec<_>>())
            })
            .collect();
        makers.into_iter().flat_map(|maker| maker.join().expect("no panic")).collect()
    });
    let mut last = Context::new();
    last.run(|| {
        drop(set(green()));
        tokens.iter().for_each(is_foreign_here);
    });
}

#[test]
fn every_refusal_says_what_to_do() {
    let used = Error::TokenUsed.to_string();
    assert!(used.contains("used once") && used.contains("one reset()"), "{used}");
    let foreign = Error::TokenForeign.to_string();
    assert!(foreign.contains("another context") && foreign.contains("that called set()"), "{foreign}");
}
