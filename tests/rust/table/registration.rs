//! Registering: names, races, immortality. A refusal leaves the table as it was.

use crate::support::errors::{error, refusal};
use crate::support::{Marked, Refusing, Switched, rounds};
use ctxalloc::strategy::{Aligned, System};
use ctxalloc::{Buffer, Error, Handler, default_handler, handler, handlers, register};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

/// The names in the table, as far as this test may know them: others register at the same time.
fn ours(prefix: &str) -> Vec<String> {
    handlers().map(|handler| handler.name().into_owned()).filter(|name| name.starts_with(prefix)).collect()
}

#[test]
fn the_built_in_handlers_are_there_from_the_start() {
    let first: Vec<_> = handlers().take(2).map(Handler::name).collect();
    assert_eq!(first, ["system", "aligned64"]);
    assert_eq!(default_handler().name(), "system");
    let [system, aligned] = ["system", "aligned64"].map(|name| handler(name).expect("built in"));
    assert_eq!((system.alignment(), aligned.alignment()), (16, 64));
    assert_eq!((system.version(), aligned.version()), (1, 1));
}

#[test]
fn a_registered_handler_is_found_by_its_name_and_listed_in_order() {
    let first = register("in order 1", Aligned::CACHE_LINE).expect("a new name");
    let second = register("in order 2", System).expect("a new name");
    assert_eq!((handler("in order 1"), handler("in order 2")), (Some(first), Some(second)));
    assert_eq!(ours("in order"), ["in order 1", "in order 2"]);
    assert_ne!(first, second);
    assert_eq!(first.to_string(), "in order 1");
    assert_eq!(format!("{first:?}"), r#"Handler("in order 1": Aligned { align: 64 })"#);
    assert_eq!(first.description(), "Aligned { align: 64 }");
    assert_eq!(ctxalloc::handler::handler_at(first.as_ptr()), Some(first));
}

#[test]
fn handlers_are_keys() {
    let owners: std::collections::HashMap<Handler, String> =
        handlers().map(|handler| (handler, handler.name().into_owned())).collect();
    assert_eq!(owners.get(&default_handler()), Some(&"system".to_owned()));
    assert!(owners.iter().all(|(handler, name)| handler.name() == *name));
    assert!(owners.len() >= 2, "no two are equal");
}

#[test]
fn the_error_for_a_name_that_nobody_has_lists_those_there_are() {
    assert_eq!(handler("nobody"), None);
    assert_eq!(handler(""), None);
    let text = ctxalloc::handler::try_handler("nobody").unwrap_err().to_string();
    assert!(text.contains("'nobody'") && text.contains("system, aligned64"), "{text}");
}

#[test]
fn a_taken_name_is_refused_and_the_first_handler_stays() {
    let first = register("taken", Aligned::CACHE_LINE).expect("a new name");
    assert_eq!(refusal(register("taken", System)), error!(NameTaken { name: "taken" }));
    assert_eq!(refusal(register("system", System)), error!(NameTaken { name: "system" }));
    assert_eq!(handler("taken"), Some(first));
    assert_eq!(first.alignment(), 64);
    assert_eq!(ours("taken").len(), 1);
}

#[test]
fn a_strategy_whose_alignment_is_no_power_of_two_is_refused() {
    for align in [0, 3, 48, usize::MAX] {
        let refused = register("says something odd", Refusing::aligned_to(align));
        assert_eq!(refusal(refused), error!(BadAlignment { align: align, min: 1, max: 1 << 30 }));
    }
    assert_eq!(handler("says something odd"), None);
}

#[test]
fn a_refused_strategy_is_dropped_and_an_accepted_one_never() {
    let [accepted, refused] = [(); 2].map(|()| Arc::new(Switched::default()));
    register("kept for ever", Arc::clone(&accepted)).expect("a new name");
    assert!(register("kept for ever", Arc::clone(&refused)).is_err());
    assert_eq!((Arc::strong_count(&accepted), Arc::strong_count(&refused)), (2, 1));
}

#[test]
fn a_strategy_that_panics_while_it_is_looked_at_leaves_the_table_usable() {
    let shy = Refusing { debug: |_| std::panic::resume_unwind(Box::new("shy")), ..Refusing::aligned_to(1) };
    assert!(std::panic::catch_unwind(|| register("shy", shy)).is_err());
    assert_eq!(handler("shy"), None);
    register("shy", System).expect("the name is free, and so is the lock");
}

#[test]
fn a_handler_never_changes_and_never_goes() {
    let (early, strategy) = crate::support::marked("early");
    let weak = Arc::downgrade(&strategy);
    drop(strategy);
    // SAFETY: the struct of a registered handler is never freed or moved.
    let c_struct = || unsafe { std::slice::from_raw_parts(early.as_ptr().cast::<u8>(), 168) }.to_vec();
    let (pointer, bytes) = (early.as_ptr(), c_struct());
    for number in 0..rounds(300, 20) {
        register(&format!("later {number}"), System).expect("a new name");
    }
    assert_eq!((handler("early"), early.as_ptr()), (Some(early), pointer));
    assert_eq!(c_struct(), bytes);
    assert!(weak.upgrade().is_some(), "its strategy lives on with it");
    drop(Buffer::zeroed_in(early, 10).expect("10 bytes"));
}

#[test]
fn racing_registrations_of_many_names_lose_none() {
    let (threads, each) = (rounds(8, 2), rounds(50, 5));
    let barrier = Barrier::new(threads);
    thread::scope(|scope| {
        for worker in 0..threads {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                for number in 0..each {
                    let name = format!("crowd {worker} {number}");
                    let registered = register(&name, Marked::new()).expect("a new name");
                    assert_eq!(handler(&name), Some(registered));
                }
            });
        }
    });
    let listed = ours("crowd");
    assert_eq!(listed.len(), threads * each);
    for worker in 0..threads {
        let prefix = format!("crowd {worker} ");
        let own: Vec<_> = listed.iter().filter(|name| name.starts_with(&prefix)).collect();
        let wanted: Vec<_> = (0..each).map(|number| format!("crowd {worker} {number}")).collect();
        assert!(own.iter().zip(&wanted).all(|(own, wanted)| *own == wanted), "each thread's are in its order");
    }
}

#[test]
fn look_ups_during_registrations_see_whole_handlers_and_a_growing_list() {
    let done = AtomicBool::new(false);
    let count = rounds(400, 15);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..rounds(3, 1))
            .map(|_| {
                scope.spawn(|| {
                    let mut last = 0;
                    loop {
                        let finished = done.load(Ordering::SeqCst);
                        let listed: Vec<Handler> = handlers().collect();
                        assert!(listed.len() >= last, "a handler went away");
                        last = listed.len();
                        let newest = listed[last - 1];
                        assert_eq!(handler(&newest.name()), Some(newest), "listed, hence found");
                        drop(Buffer::zeroed_in(listed[0], 16).expect("16 bytes"));
                        if finished {
                            return;
                        }
                    }
                })
            })
            .collect();
        for number in 0..count {
            register(&format!("read meanwhile {number}"), System).expect("a new name");
        }
        done.store(true, Ordering::SeqCst);
        for reader in readers {
            reader.join().expect("no panic");
        }
    });
    assert_eq!(ours("read meanwhile").len(), count);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: rounds(200, 8) as u32, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Any text: it enters as it is, or is refused for the first of the reasons that hold, and nothing else happens.
    #[test]
    fn any_name_is_taken_as_it_is_or_refused_for_the_right_reason(text in "\\PC{0,10}|[a-z\0]{0,8}|[x-z]{120,130}|鵜{40,44}") {
        let known = handler(&text);
        let outcome = register(&text, System);
        if text.is_empty() {
            prop_assert_eq!(outcome, Err(Error::NameEmpty));
        } else if text.len() > 126 {
            prop_assert_eq!(refusal(outcome), error!(NameTooLong { name: text.clone(), length_bytes: text.len() }));
        } else if let Some(position) = text.find('\0') {
            prop_assert_eq!(refusal(outcome), error!(NameHasNul { name: text.clone(), position: position }));
        } else if known.is_some() {
            prop_assert_eq!(refusal(outcome), error!(NameTaken { name: text.clone() }));
        } else {
            let registered = outcome.expect("a good name");
            prop_assert_eq!(&*registered.name(), &*text);
            prop_assert_eq!(handler(&text), Some(registered));
            // SAFETY: the struct of a registered handler is never freed or moved.
            let field = unsafe { (*registered.as_ptr()).name }.map(|byte| byte as u8);
            prop_assert_eq!(&field[..text.len()], text.as_bytes());
            prop_assert!(field[text.len()..].iter().all(|&byte| byte == 0));
        }
    }
}
