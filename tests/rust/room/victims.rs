//! Which request gives way when a budget is full and somebody waits for it, and who never does.

use super::{polled, soon, until, wanting};
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, Request, request};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

fn holding(budget: &Budget, name: &str, bytes: usize) -> (Request, Buffer) {
    let request = request().root().name(name).budget(budget).begin().unwrap();
    let block = request.run(|| Buffer::zeroed(bytes)).unwrap();
    (request, block)
}

/// For whom it was chosen; `None` where it has memory.
fn chosen_for(request: &Request) -> Option<String> {
    match request.run(|| Buffer::zeroed(1)) {
        Ok(_) => None,
        Err(Error::BudgetExceeded { chosen_for: Some(chosen_for), .. }) => Some(chosen_for),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_largest_gives_way_to_one_that_waits_and_is_told_for_whom() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(AT_ONCE);
    assert_eq!((process.victims_after(), process.child("b", None).victims_after()), (AT_ONCE, None));
    let (small, large) = (holding(&process, "small", 300), holding(&process, "large", 600));
    let mut waits = request().root().name("patient").budget(&process).reserve_bytes(400).admit();
    until("one is chosen", || process.victims() >= 1);
    assert_eq!(chosen_for(&small.0), None);
    let refused = large.0.run(|| Buffer::zeroed(1)).unwrap_err();
    let text = "budget 'process' is full, and the request that holds 600 bytes of it was chosen to make room for \
                request 'patient', which waits for 400 bytes of 'process'";
    assert!(refused.to_string().starts_with(text), "{refused}");
    let Error::BudgetExceeded { budget_id, of_request: false, held_bytes: 600, .. } = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(budget_id, process.id());
    drop(large.1);
    let patient = soon(&mut waits).unwrap();
    assert_eq!(chosen_for(&large.0), None, "it was told once, and there is room");
    assert_eq!(large.0.end().refusal, Some(refused));
    drop((patient, small));
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (0, 0));
}

#[test]
fn nobody_at_its_guarantee_and_nobody_smaller_gives_way() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(AT_ONCE);
    let tenant = process.guaranteed_child("tenant", None, 400).unwrap();
    let guaranteed = holding(&tenant, "guaranteed", 400);
    let reserves = soon(&mut wanting(&process, 300)).unwrap();
    let reserved = reserves.run(|| Buffer::zeroed(300)).unwrap();
    let small = holding(&process, "small", 300);
    let waits = wanting(&process, 300);
    let mut decoy = wanting(&Budget::new("other", Some(1)), 1);
    drop(soon(&mut decoy).unwrap());
    thread::sleep(Duration::from_millis(50)); // nothing tells that nobody was chosen
    assert_eq!(process.victims(), 0);
    let beyond = holding(&tenant, "beyond", 0).0;
    drop((waits, reserved, reserves));
    // The tenant's 400 and 300 more: whichever of its requests it is, only 300 would come back.
    let more = beyond.run(|| Buffer::zeroed(299)).unwrap();
    let _waits = wanting(&process, 250);
    until("one is chosen", || process.victims() >= 1);
    assert!(chosen_for(&small.0).is_some(), "300, and not the 299 that the tenant borrowed");
    drop((guaranteed, beyond, more));
}

#[test]
fn who_is_chosen_is_spared_when_room_comes_before() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(AT_ONCE);
    let other = process.charge(300).unwrap();
    let large = request().root().name("large").limit_bytes(800).budget(&process).begin().unwrap();
    let block = large.run(|| Buffer::zeroed(700)).unwrap();
    let mut waits = wanting(&process, 300);
    until("one is chosen", || process.victims() >= 1);
    drop(other);
    let admitted = soon(&mut waits).unwrap();
    drop(admitted);
    until("it is spared", || chosen_for(&large).is_none());
    assert_eq!(large.budget().limit_bytes(), Some(800));
    assert!(large.run(|| Buffer::zeroed(101)).is_err(), "its own limit holds again");
    let waits = wanting(&process, 400);
    until("one is chosen", || process.victims() == 2);
    large.budget().set_limit_bytes(Some(900));
    drop(waits); // it leaves
    until("it is spared", || chosen_for(&large).is_none());
    drop(block);
}

#[test]
fn a_request_hears_at_once_that_it_was_chosen() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(AT_ONCE);
    let heard: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = Arc::clone(&heard);
    let large = request()
        .root()
        .budget(&process)
        .on_chosen(move |error| {
            told.lock().unwrap().push(error.to_string());
            panic!("which harms nobody");
        })
        .begin()
        .unwrap();
    let block = large.run(|| Buffer::zeroed(900)).unwrap();
    let mut waits = wanting(&process, 200);
    until("it has heard", || !heard.lock().unwrap().is_empty());
    assert!(heard.lock().unwrap()[0].contains("was chosen to make room for"));
    drop((large, block));
    drop(soon(&mut waits).unwrap());
}

#[test]
fn a_request_inside_gives_way_alone_where_it_holds_all() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(Some(Duration::from_millis(500))); // the one around it would be the next
    let outer = request().root().budget(&process).begin().unwrap();
    let inner = outer.run(|| request().begin()).unwrap();
    let block = inner.run(|| Buffer::zeroed(900)).unwrap();
    let mut waits = wanting(&process, 200);
    assert!(polled(&mut waits).is_pending());
    until("one is chosen", || process.victims() >= 1);
    assert_eq!(chosen_for(&outer), None);
    assert!(chosen_for(&inner).is_some());
    drop((block, inner, outer));
    drop(soon(&mut waits).unwrap());
}

#[test]
#[cfg_attr(miri, ignore = "thousands of waits")]
fn threads_that_hold_all_and_wait_for_more_get_on_by_victims() {
    let process = Budget::new("process", Some(1000));
    process.set_victims_after(AT_ONCE);
    thread::scope(|scope| {
        for number in 0..4_usize {
            let process = &process;
            scope.spawn(move || {
                for round in 0..100 {
                    let (large, block) = loop {
                        let large = request().root().budget(process).begin().unwrap();
                        if let Ok(block) = large.run(|| Buffer::zeroed(300 + number * 50 + round % 7)) {
                            break (large, block);
                        }
                        thread::yield_now();
                    };
                    // Works until it is done, or is told to give way.
                    for _ in 0..20 {
                        if large.run(|| Buffer::zeroed(1)).is_err() {
                            break;
                        }
                        thread::yield_now();
                    }
                    drop((large, block));
                    let small = request().root().budget(process).reserve_bytes(200);
                    drop(small.timeout(Duration::from_secs(20)).admit_blocking().expect("nobody is forgotten"));
                    assert!(process.in_use_bytes() <= 1000);
                }
            });
        }
    });
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), process.waiting()), (0, 0, 0));
}
