//! The table under every interleaving and every weak memory order that loom knows. `Witness` makes the plain fields
//! of tables and entries visible to it: a publication that is too weak fails one of these.
//!
//! The thread that reads is the spawned one. Loom runs the other first and goes back from each of its stores; the
//! other way round it forgets a reader's load over the writer's own, and explores a single order.

use super::super::name::Name;
use super::super::process::{empty, table};
use super::super::trampoline;
use super::super::{Extras, Reach, adopt, handler};
use super::{Draft, Handler, Table};
use crate::error::Error;
use crate::strategy::{Aligned, System};
use loom::sync::Arc;
use loom::thread;
use std::ptr::NonNull;

fn draft(name: &'static str) -> Draft<'static> {
    trampoline::draft(Name::new(name).expect("a good name"), System)
}

fn with_one() -> Arc<Table> {
    let table = empty();
    table.register(draft("first")).expect("a new name");
    Arc::new(table)
}

#[test]
fn loom_who_finds_an_entry_by_name_finds_all_of_it() {
    loom::model(|| {
        let table = with_one();
        let reader = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                let early = table.named("second");
                if let Some(found) = early {
                    assert_eq!(table.with_struct(found.as_ptr()), Some(found), "by struct before by name");
                }
                // Perhaps behind the newer one by now.
                assert!(table.named("first").is_some_and(|found| found.name() == "first"));
                early
            }
        });
        let written = table.register(draft("second")).expect("a new name").0;
        let early = reader.join().expect("no panic");
        assert!(early.is_none_or(|found| found == written));
        assert_eq!(table.named("second"), Some(written));
    });
}

#[test]
fn loom_a_walk_of_the_list_sees_whole_entries_in_order_of_registration() {
    loom::model(|| {
        let table = Arc::new(empty());
        let reader = thread::spawn({
            let table = Arc::clone(&table);
            move || table.iter().map(|handler| handler.name().into_owned()).collect::<Vec<_>>()
        });
        table.register(draft("first")).expect("a new name");
        table.register(draft("second")).expect("a new name");
        table.register(draft("third")).expect("a new name");
        let seen = reader.join().expect("no panic");
        assert!(["first", "second", "third"][..seen.len()] == seen, "{seen:?}");
        assert!(table.iter().map(Handler::name).eq(["first", "second", "third"]));
    });
}

#[test]
fn loom_of_two_registrations_of_one_name_one_wins() {
    loom::model(|| {
        let table = Arc::new(empty());
        let rival = thread::spawn({
            let table = Arc::clone(&table);
            move || table.register(draft("wanted"))
        });
        let mine = table.register(draft("wanted"));
        let other = rival.join().expect("no panic");
        let taken = Err(Error::NameTaken { name: "wanted".into() });
        let winner = match (&mine, &other) {
            (Ok((winner, true)), refused) if *refused == taken => *winner,
            (refused, Ok((winner, true))) if *refused == taken => *winner,
            outcome => panic!("{outcome:?}"),
        };
        assert_eq!(table.named("wanted"), Some(winner));
        assert_eq!(table.iter().count(), 1);
    });
}

#[test]
fn loom_two_registrations_of_two_names_both_stay() {
    loom::model(|| {
        let table = Arc::new(empty());
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || table.register(draft("theirs")).expect("a new name").0
        });
        let mine = table.register(draft("mine")).expect("a new name").0;
        let theirs = other.join().expect("no panic");
        assert_eq!((table.named("mine"), table.named("theirs")), (Some(mine), Some(theirs)));
        let listed: Vec<Handler> = table.iter().collect();
        assert!(listed == [mine, theirs] || listed == [theirs, mine], "{listed:?}");
    });
}

#[test]
fn loom_the_first_use_makes_one_table_for_all() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let other = thread::spawn(|| (handler("aligned64"), table().default()));
        let mine = (handler("aligned64"), table().default());
        assert_eq!(mine, other.join().expect("no panic"));
        assert!(mine.0.is_some_and(|found| found.name() == "aligned64"));
        assert_eq!(mine.1.name(), "system");
    });
}

#[test]
#[allow(unsafe_code, reason = "adopting is unsafe")]
fn loom_one_struct_adopted_by_two_threads_is_one_handler() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        // A foreign struct: one that another table made, immortal as NEP 49 wants it.
        let elsewhere = trampoline::draft(Name::new("foreign").expect("a good name"), Aligned::CACHE_LINE);
        let foreign = empty().register(elsewhere).expect("an empty table").0.as_ptr();
        let address = foreign.expose_provenance();
        let adopt_it = move || {
            let foreign: *mut super::PyDataMem_Handler = std::ptr::with_exposed_provenance_mut(address);
            let foreign = NonNull::new(foreign).expect("not NULL");
            // SAFETY: an immortal struct with good functions.
            unsafe { adopt(foreign, Reach::AnyThread, None, Extras::default()) }
        };
        let other = thread::spawn(adopt_it);
        let mine = adopt_it().expect("a good struct");
        assert_eq!(Ok(mine), other.join().expect("no panic"));
        assert_eq!(handler("foreign"), Some(mine));
    });
}
