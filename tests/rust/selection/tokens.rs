//! Rule 2: `set` changes the current context only; its token restores, once, in whatever order, in its own context.

use crate::support::{block_on, blue, green, migrate, red};
use ctxalloc::{Context, Error, Token, WithHandler, current, default_handler, reset, set};
use std::thread;

#[test]
fn reset_puts_back_what_was_selected_before() {
    let outer = set(red());
    let inner = set(green());
    assert_eq!(current(), green());
    assert_eq!(reset(&inner), Ok(()));
    assert_eq!(current(), red());
    assert_eq!(reset(&outer), Ok(()));
    assert_eq!(current(), default_handler());
    assert!(Context::copy_current().is_unset(), "as if nothing had ever been selected");
}

#[test]
fn tokens_may_be_used_in_any_order_and_restore_what_each_one_saw() {
    let saw_default = set(red());
    let saw_red = set(green());
    let saw_green = set(blue());
    assert_eq!(reset(&saw_red), Ok(()));
    assert_eq!(current(), red());
    assert_eq!(reset(&saw_default), Ok(()));
    assert_eq!(current(), default_handler());
    assert_eq!(reset(&saw_green), Ok(()));
    assert_eq!(current(), green(), "the last token used decides, as in Python");
}

#[test]
fn a_token_used_twice_is_refused_and_changes_nothing() {
    let token = set(red());
    assert!(!token.is_used());
    assert_eq!(reset(&token), Ok(()));
    assert!(token.is_used());
    drop(set(green()));
    assert_eq!(reset(&token), Err(Error::TokenUsed));
    assert_eq!(current(), green());
}

#[test]
fn a_token_knows_the_old_handler() {
    let first = set(red());
    let second = set(green());
    assert_eq!((first.old_handler(), second.old_handler()), (None, Some(red())));
}

#[test]
fn dropping_a_token_keeps_the_selection() {
    drop(set(red()));
    assert_eq!(current(), red());
}

#[test]
fn setting_none_selects_the_default_and_its_token_restores() {
    drop(set(red()));
    let token = set(None);
    assert_eq!(current(), default_handler());
    assert_eq!(reset(&token), Ok(()));
    assert_eq!(current(), red());
}

#[test]
fn setting_the_same_handler_again_gives_a_token_of_its_own() {
    let first = set(red());
    let second = set(red());
    assert_eq!(reset(&second), Ok(()));
    assert_eq!(current(), red());
    assert_eq!(reset(&first), Ok(()));
    assert_eq!(current(), default_handler());
}

/// Each refused use: nothing changes there, and the token still restores where it belongs.
fn is_foreign_here(token: &Token) {
    let before = current();
    assert_eq!(reset(token), Err(Error::TokenForeign));
    assert_eq!(current(), before);
    assert!(!token.is_used());
}

#[test]
fn a_token_of_another_thread_is_refused_and_stays_good_at_home() {
    let token = set(red());
    let token = thread::spawn(move || {
        is_foreign_here(&token); // in a context that selected nothing
        drop(set(green()));
        is_foreign_here(&token);
        token
    })
    .join()
    .expect("no panic");
    assert_eq!(reset(&token), Ok(()));
    assert_eq!(current(), default_handler());
}

#[test]
fn a_token_of_the_creator_is_refused_in_a_copied_context() {
    let token = set(red());
    Context::copy_current().run(|| is_foreign_here(&token));
    block_on(
        async {
            is_foreign_here(&token);
        }
        .in_current_handler(),
    );
    assert_eq!(reset(&token), Ok(()));
}

#[test]
fn a_token_of_a_copied_context_is_refused_outside_and_good_inside() {
    let mut context = Context::copy_current();
    let token = context.run(|| set(red()));
    is_foreign_here(&token);
    assert_eq!(context.run(|| reset(&token)), Ok(()));
    assert!(context.is_unset());
}

#[test]
fn a_token_belongs_to_its_context_not_to_a_thread() {
    let mut context = Context::new();
    let token = context.run(|| set(red()));
    let (context, outcome) = thread::spawn(move || {
        let outcome = context.run(|| reset(&token));
        (context, outcome)
    })
    .join()
    .expect("no panic");
    assert_eq!(outcome, Ok(()));
    assert!(context.is_unset());
}

#[test]
fn a_token_stays_good_while_its_future_migrates() {
    let work = async {
        let token = set(green());
        crate::support::Yield(3).await;
        let outcome = reset(&token);
        (outcome, current())
    };
    let (seen, threads) = migrate(work.with_handler(red()));
    assert_eq!(seen, (Ok(()), red()));
    assert_eq!(threads.len(), 4);
}

#[test]
fn a_used_token_says_so_first_wherever_it_is_used() {
    let token = set(red());
    assert_eq!(reset(&token), Ok(()));
    let outcome = Context::copy_current().run(|| reset(&token));
    assert_eq!(outcome, Err(Error::TokenUsed)); // CPython checks in this order
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
