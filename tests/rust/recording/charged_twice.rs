//! Requests that are charged to others than those around them, by a budget: a recording says of these others that their
//! accounts include more than their events, and all else is compared as ever.

use super::random::Random;
use super::{all_of, begun, with_one_in};
use ctxalloc::recording::{Recording, What};
use ctxalloc::request::{AfterEnd, Builder, Request};
use ctxalloc::strategy::{Budgeted, System};
use ctxalloc::tune::{Choice, Plan, replay, routes};
use ctxalloc::{Buffer, register, request};
use std::collections::{BTreeSet, HashMap};
use std::thread;

/// The names of the requests whose account includes others, once a replay has had the sums of all that have none.
fn with_others(program: impl FnOnce()) -> BTreeSet<String> {
    with_one_in(1, program, told)
}

fn told(recording: &Recording) -> BTreeSet<String> {
    let (mut name_of, mut found, mut ended, mut outer) = (HashMap::new(), BTreeSet::new(), 0, BTreeSet::new());
    for event in all_of(recording) {
        match event.what {
            What::Begin { name, parent, .. } => {
                let name = &recording.names()[name as usize];
                name_of.insert(event.request, name.clone());
                outer.extend((parent == 0).then_some(name));
            }
            What::End { sums, .. } => {
                ended += 1;
                found.extend(sums.includes_others.then(|| name_of[&event.request].clone()));
            }
            _ => {}
        }
    }
    for on_one_thread in [false, true] {
        let plan = Plan::new(recording, None, on_one_thread).unwrap();
        let facts = plan.facts();
        assert_eq!((facts.with_others, facts.torn, facts.left_out), (found.len() as u64, 0, 0));
        let replayed = replay(&plan, &Choice::named("pool").unwrap()).unwrap();
        assert_eq!(replayed.compared, ended - facts.with_others);
    }
    for name in outer {
        let plan = Plan::new(recording, Some(name), false).unwrap();
        replay(&plan, &Choice::named("arena").unwrap()).unwrap();
    }
    assert_eq!(routes(recording).unwrap().last().unwrap().requests, name_of.len() as u64 - inner(recording));
    found
}

fn inner(recording: &Recording) -> u64 {
    all_of(recording).filter(|event| matches!(event.what, What::Begin { parent: 1.., .. })).count() as u64
}

/// Makes something that is freed, and something that the next one to make something finds alive.
fn works(request: &Request) -> Buffer {
    drop(Buffer::zeroed_in(request.handler(), 70_000).unwrap());
    Buffer::zeroed_in(request.handler(), 5000).unwrap()
}

fn root(name: &str) -> Builder {
    request().root().name(name)
}

fn names(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn a_root_with_another_ones_budget() {
    let found = with_others(|| {
        let one = root("one").begin().unwrap();
        let kept = works(&one);
        thread::scope(|threads| {
            threads.spawn(|| {
                let other = root("other").budget(&one.budget()).begin().unwrap();
                drop(works(&other));
            });
        });
        assert_eq!(one.end().stats.total_blocks, 4);
        drop(kept);
    });
    assert_eq!(found, names(&["one"]));
}

#[test]
fn one_inside_of_one_with_the_budget_of_another() {
    let found = with_others(|| {
        let (around, other) = (root("around").begin().unwrap(), root("other").begin().unwrap());
        let inner = around.run(|| request().name("inner").budget(&other.budget()).begin()).unwrap();
        let kept = [works(&around), works(&inner), works(&other)];
        assert_eq!(inner.end().stats.total_blocks, 2);
        assert_eq!((other.end().stats.total_blocks, around.end().stats.total_blocks), (4, 4));
        drop(kept);
    });
    assert_eq!(found, names(&["other"]), "the one around has what its events say");
}

#[test]
fn budgets_of_requests_one_below_the_other() {
    let found = with_others(|| {
        let first = root("first").begin().unwrap();
        let second = root("second").budget(&first.budget()).begin().unwrap();
        let third = root("third").budget(&second.budget()).begin().unwrap();
        let kept = works(&third);
        assert_eq!((third.end().stats.total_blocks, second.end().stats.total_blocks), (2, 2));
        drop(kept);
        assert_eq!(first.end().stats.total_blocks, 2);
    });
    assert_eq!(found, names(&["first", "second"]));
}

#[test]
fn the_budget_of_one_that_is_inside_of_another() {
    let found = with_others(|| {
        let around = root("around").begin().unwrap();
        let inner = around.run(|| request().name("inner").begin()).unwrap();
        let other = root("other").budget(&inner.budget()).begin().unwrap();
        let kept = [works(&other), works(&inner)];
        drop((other, inner, kept));
        assert_eq!(around.end().stats.total_blocks, 4);
    });
    assert_eq!(found, names(&["around", "inner"]));
}

#[test]
fn the_budget_of_one_around_is_charged_once_and_says_nothing() {
    let found = with_others(|| {
        let around = root("around").begin().unwrap();
        let inner = around.run(|| request().name("inner").budget(&around.budget()).begin()).unwrap();
        let deep = inner.run(|| request().name("deep").budget(&around.budget()).begin()).unwrap();
        let kept = [works(&deep), works(&inner)];
        drop((deep, inner, kept));
        assert_eq!(around.end().stats.total_blocks, 4);
    });
    assert_eq!(found, names(&[]));
}

#[test]
fn a_budget_whose_request_has_ended_leads_to_those_around_that() {
    let found = with_others(|| {
        let (around, alone) = (root("around").begin().unwrap(), root("alone").begin().unwrap());
        let inner = around.run(|| request().name("inner").begin()).unwrap();
        let budgets = [inner.budget(), alone.budget()];
        drop((inner, alone));
        let others = budgets.map(|budget| root("other").budget(&budget).begin().unwrap());
        drop(others.map(|other| works(&other)));
        assert_eq!(around.end().stats.total_blocks, 2);
    });
    assert_eq!(found, names(&["around"]), "the sums of those that had ended were complete");
}

/// What goes on in the Context of an ended request is charged to what that was charged to.
#[test]
fn what_an_ended_request_had_as_a_budget_is_still_charged() {
    let found = with_others(|| {
        let payer = root("payer").begin().unwrap();
        let ended = root("ended").budget(&payer.budget()).begin().unwrap();
        let handler = ended.handler();
        let kept = works(&ended);
        drop(ended);
        let later = ctxalloc::scope(handler, || request().name("later").begin()).unwrap();
        drop((works(&later), kept));
        drop(later);
        assert_eq!(payer.end().stats.total_blocks, 4);
    });
    assert_eq!(found, names(&["payer"]));
}

#[test]
fn a_budget_below_a_request_is_its_own_way_there() {
    let found = with_others(|| {
        let above = root("above").begin().unwrap();
        let tenant = above.budget().child("tenant", None).child("user", None);
        let other = root("other").budget(&tenant).begin().unwrap();
        drop(works(&other));
    });
    assert_eq!(found, names(&["above"]));
}

#[test]
fn what_is_charged_to_a_requests_budget_by_itself() {
    let found = with_others(|| {
        let (charged, budgeted, quiet) =
            ["charged", "budgeted", "quiet"].map(|name| root(name).begin().unwrap()).into();
        let charge = charged.budget().charge(1000).unwrap();
        let handler = register("of no request", Budgeted::new(System, budgeted.budget())).unwrap();
        drop((Buffer::zeroed_in(handler, 500).unwrap(), charge));
        // Its own charges, and a budget that nobody uses, are no others.
        let charge = quiet.handle().charge(77).unwrap();
        let _unused = quiet.budget().child("unused", None);
        drop((works(&quiet), charge));
        assert_eq!(charged.end().stats.total_bytes, 1000);
        assert_eq!(budgeted.end().stats.total_bytes, 500);
    });
    assert_eq!(found, names(&["budgeted", "charged"]));
}

/// One that is left out is charged too. Whether it is recorded is chosen as ever.
#[test]
fn those_that_a_recording_leaves_out_are_told_of_too() {
    let program = || {
        for _ in 0..300 {
            let payer = root("payer").begin().unwrap();
            let other = root("other").budget(&payer.budget()).begin().unwrap();
            let inner = other.run(|| request().name("inner").begin()).unwrap();
            drop(works(&inner));
        }
    };
    with_one_in(3, program, |recording| {
        let (facts, counts) = (Plan::new(recording, None, false).unwrap().facts(), begun(recording));
        assert_eq!(facts.with_others, counts["payer"]);
        assert!((50..150).contains(&counts["payer"]) && (50..150).contains(&counts["other"]));
    });
}

/// As a model has it: what a request is charged to when it begins, and what it is inside of.
#[derive(Default)]
struct Modelled {
    charged: BTreeSet<usize>,
    around: BTreeSet<usize>,
    includes_others: bool,
}

#[test]
fn any_program_is_replayed_with_the_sums_of_those_that_include_no_others() {
    for seed in 0..4 * super::times() as u64 {
        let mut expected = BTreeSet::new();
        let found = with_others(|| expected = random_requests(seed));
        assert!(found == expected && expected.len() > 5, "seed {seed}: {found:?} for {expected:?}");
    }
}

fn random_requests(seed: u64) -> BTreeSet<String> {
    let mut random = Random::new(seed + 1);
    let mut open: HashMap<usize, Request> = HashMap::new();
    let (mut handlers, mut budgets, mut model) = (Vec::new(), Vec::new(), Vec::<Modelled>::new());
    let (mut anchors, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        let at = random.below(model.len().max(1));
        match random.below(6) {
            0 if model.len() < 60 => {
                let number = model.len();
                let recent = |random: &mut Random| (number > 0).then(|| number - 1 - random.below(number.min(6)));
                let outer = recent(&mut random).filter(|_| random.below(3) > 0);
                let payer = recent(&mut random).filter(|_| random.below(2) == 0);
                let mut its = Modelled::default();
                let alive = |all: &BTreeSet<usize>| all.iter().copied().filter(|one| open.contains_key(one)).collect();
                if let Some(outer) = outer {
                    its.around = alive(&model[outer].around);
                    its.charged = alive(&model[outer].charged);
                    its.around.extend(open.contains_key(&outer).then_some(outer));
                    its.charged.extend(open.contains_key(&outer).then_some(outer));
                }
                if let Some(payer) = payer {
                    its.charged.extend(alive(&model[payer].charged));
                    its.charged.extend(open.contains_key(&payer).then_some(payer));
                }
                for &other in its.charged.difference(&its.around) {
                    model[other].includes_others = true;
                }
                let mut terms = match outer {
                    Some(outer) => ctxalloc::scope(handlers[outer], request),
                    None => request().root(),
                };
                if let Some(payer) = payer {
                    terms = terms.budget(&budgets[payer]);
                }
                let begun = terms.name(number.to_string()).after_end(AfterEnd::Charge).begin().unwrap();
                handlers.push(begun.handler());
                budgets.push(begun.budget());
                // While this is alive, its handler leads to those around it, after its end too.
                anchors.push(Buffer::zeroed_in(begun.handler(), 64).unwrap());
                open.insert(number, begun);
                model.push(its);
            }
            1 if open.len() > 8 => drop(open.remove(&at)),
            2 | 3 if open.contains_key(&at) => {
                kept.push(Buffer::zeroed_in(handlers[at], 1 + random.below(100_000)).unwrap());
            }
            4 if !kept.is_empty() => drop(kept.swap_remove(random.below(kept.len()))),
            5 if !kept.is_empty() => {
                let at = random.below(kept.len());
                kept[at].resize(1 + random.below(50_000)).unwrap();
            }
            _ => {}
        }
    }
    drop((open, anchors, kept));
    let names = model.iter().enumerate().filter(|(_, its)| its.includes_others);
    names.map(|(number, _)| number.to_string()).collect()
}
