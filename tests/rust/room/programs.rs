//! Random programs, which must agree with the model after each step.

use super::model::{Model, ModelBudget, ModelCache, ModelRequest};
use super::{Random, number, polled, ready, reason, times, wanting};
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request, request};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

/// What is in a cache, with the number of its request.
type Cache = Arc<Mutex<Vec<(usize, Buffer)>>>;

/// Whether one of these who has to wait by the model got room.
fn is_passed(waiting: &mut [(usize, Admitting)], model: &Model) -> bool {
    let mut waits = waiting.iter_mut().filter(|one| model.waiting.iter().any(|other| other.0 == one.0));
    waits.any(|(_, admitting)| polled(admitting).is_ready())
}

/// Runs one; whether a look at the queue saw memory come back while it was under way. The thread of the queue
/// looks whenever it is called: it may find no room for the first one in a tenant, and then, when a block has
/// been given back, room for the second one in the process, for which the first one did not wait yet. The model
/// looks in one moment.
fn run_program(seed: u64, steps: usize) -> bool {
    let mut random = Random::new(seed);
    let mut model = Model::default();
    let mut budgets: Vec<Budget> = Vec::new();
    for number in 0..2 + random.below(5) {
        let limit = 200 + random.below(2000);
        let parent = if number == 0 { None } else { Some(random.below(number)) };
        let guarantee = parent.filter(|_| random.below(2) == 0).map(|_| 0);
        let name = format!("budget {number}");
        budgets.push(match (parent, guarantee) {
            (None, _) => Budget::new(&name, Some(limit)),
            (Some(at), None) => budgets[at].child(&name, Some(limit)),
            (Some(at), Some(bytes)) => budgets[at].guaranteed_child(&name, Some(limit), bytes).unwrap(),
        });
        model.budgets.push(ModelBudget { parent, limit, guarantee });
    }
    // By the model's numbers; `None` once it has ended.
    let mut requests: Vec<Option<Request>> = Vec::new();
    let mut blocks: Vec<(usize, Buffer)> = Vec::new();
    let mut waiting: Vec<(usize, Admitting)> = Vec::new();
    let mut caches: Vec<Cache> = Vec::new();
    let asked: Arc<Mutex<Vec<usize>>> = Arc::default();
    let full = Budget::new("full", Some(1));
    let _one = full.charge(1).unwrap();
    for step in 0..steps {
        let what = format!("seed {seed}, step {step}");
        let live: Vec<usize> = (0..requests.len()).filter(|&at| requests[at].is_some()).collect();
        match random.below(15) {
            0..=2 => {
                let (budget, bytes) = (random.below(budgets.len()), random.below(500));
                let mut admitting = wanting(&budgets[budget], bytes);
                if model.never_fits(budget, bytes) {
                    assert_eq!(reason(ready(&mut admitting)), NoRoom::NeverFits, "{what}");
                } else {
                    let number = model.next_number();
                    model.waiting.push((number, budget, bytes));
                    waiting.push((number, admitting));
                }
            }
            3 if !live.is_empty() => {
                let outer = live[random.below(live.len())];
                if model.is_inside_of_an_ended_one(outer) {
                    continue; // which a new one would not be inside of; `requests_model.rs` has those
                }
                let (bytes, limit) =
                    (random.below(300), if random.below(2) == 0 { usize::MAX } else { 300 + random.below(300) });
                let reserves = random.below(3) > 0;
                let inner = requests[outer].as_ref().unwrap().run(|| {
                    let builder = if limit == usize::MAX { request() } else { request().limit_bytes(limit) };
                    if reserves { builder.reserve_bytes(bytes).admit_blocking() } else { builder.begin() }
                });
                let reserved = if reserves { bytes } else { 0 };
                let budget = model.requests[outer].budget;
                let is_there = model.try_to(true, |model, adds| {
                    if adds {
                        let number = model.next_number();
                        model.requests.push(ModelRequest {
                            number,
                            outer: Some(outer),
                            budget,
                            reserved,
                            limit,
                            own: 0,
                            has_ended: false,
                        });
                    } else {
                        model.requests.pop();
                    }
                });
                assert_eq!(inner.is_ok(), is_there, "{what}: {inner:?}");
                requests.extend(inner.ok().map(Some));
            }
            4..=5 if !live.is_empty() => {
                let at = live[random.below(live.len())];
                let bytes = 1 + random.below(400);
                let made = requests[at].as_ref().unwrap().run(|| Buffer::zeroed(bytes));
                let is_given = model.try_to(false, |model, adds| {
                    let own = &mut model.requests[at].own;
                    *own = if adds { *own + bytes } else { *own - bytes };
                });
                assert_eq!(made.is_ok(), is_given, "{what}: {made:?}");
                assert!(is_given || model.is_refused_by_its_own(at, bytes), "{what}: {made:?} within a guarantee");
                blocks.extend(made.ok().map(|made| (at, made)));
            }
            6 if !blocks.is_empty() => {
                let (at, block) = blocks.swap_remove(random.below(blocks.len()));
                model.requests[at].own -= block.len();
                drop(block);
            }
            7 if !live.is_empty() => {
                let at = live[random.below(live.len())];
                drop(requests[at].take());
                model.requests[at].has_ended = true;
            }
            8 if !waiting.is_empty() => {
                let (number, admitting) = waiting.remove(random.below(waiting.len()));
                model.waiting.retain(|other| other.0 != number);
                drop(admitting);
            }
            9 => {
                let at = random.below(budgets.len());
                let limit = 500 + random.below(2000);
                model.budgets[at].limit = limit;
                budgets[at].set_limit_bytes(Some(limit));
            }
            10..=11 => {
                let at = random.below(budgets.len());
                let bytes = random.below(800);
                if model.budgets[at].guarantee.is_none() {
                    continue;
                }
                let expected = model.guarantee(at, bytes);
                let answer = match budgets[at].set_guarantee_bytes(bytes) {
                    Ok(()) => Ok(()),
                    Err(Error::BadOption { option: "guarantee_bytes", .. }) => Err("own limit"),
                    Err(Error::GuaranteesExceedLimit { .. }) => Err("promised"),
                    Err(Error::NoRoom { reason: NoRoom::Busy, .. }) => Err("busy"),
                    Err(error) => panic!("{what}: {error}"),
                };
                assert_eq!(answer, expected, "{what}: {bytes} of {:?}", budgets[at]);
            }
            12 if caches.len() < 3 => {
                let (budget, order) = (random.below(budgets.len()), random.below(3));
                model.caches.push(ModelCache { request: requests.len(), order, bytes: 0 });
                model.change_request(true, budget, 0);
                requests.push(Some(request().root().budget(&budgets[budget]).begin().unwrap()));
                let cache = Cache::default();
                let (number, dropped, own, here) =
                    (caches.len(), Arc::clone(&cache), Arc::clone(&asked), thread::current().id());
                budgets[budget].add_reclaimer(i32::try_from(order).unwrap(), move |_| {
                    // The thread that asks for those who wait would do it at a time that no model knows.
                    if thread::current().id() == here {
                        own.lock().unwrap().push(number);
                        drop(std::mem::take(&mut *dropped.lock().unwrap()));
                    }
                });
                caches.push(cache);
            }
            12..=13 if !caches.is_empty() => {
                let at = random.below(caches.len());
                let (request, bytes) = (model.caches[at].request, 1 + random.below(300));
                let Some(own) = &requests[request] else { continue };
                let made = own.run(|| Buffer::zeroed(bytes));
                let is_given = model.try_to(false, |model, adds| {
                    let own = &mut model.requests[request].own;
                    *own = if adds { *own + bytes } else { *own - bytes };
                });
                assert_eq!(made.is_ok(), is_given, "{what}: {made:?}");
                if let Ok(made) = made {
                    model.caches[at].bytes += bytes;
                    caches[at].lock().unwrap().push((request, made));
                }
            }
            // Where somebody waits, the thread of the queue may look between the release of two blocks.
            14 if waiting.is_empty() => {
                let (at, wanted) = (random.below(budgets.len()), random.below(500));
                let expected = model.reclaim(at, wanted);
                let freed = budgets[at].reclaim(wanted);
                let dropped = std::mem::take(&mut *asked.lock().unwrap());
                assert_eq!((freed, dropped), expected, "{what}: {wanted} of {:?}", budgets[at]);
            }
            _ => {}
        }
        // Which accounts are closed is found out when the queue is looked at. Here that is after each step: somebody
        // comes who has to wait, at a budget of its own.
        let probe = wanting(&full, 1);
        for (number, ..) in model.turn_away() {
            let at = waiting.iter().position(|waiter| waiter.0 == number).unwrap();
            let (_, mut admitting) = waiting.remove(at);
            assert_eq!(reason(ready(&mut admitting)), NoRoom::NeverFits, "{what}: {number}");
        }
        for (number, ..) in model.look() {
            let at = waiting.iter().position(|waiter| waiter.0 == number).unwrap();
            let (_, mut admitting) = waiting.remove(at);
            // The look was taken on this thread.
            let Poll::Ready(answer) = polled(&mut admitting) else {
                if is_passed(&mut waiting, &model) {
                    return true;
                }
                panic!("{what}: {number} has room: {:?} {budgets:?}", model.waiting)
            };
            requests.push(Some(answer.unwrap_or_else(|error| panic!("{what}: {error}"))));
        }
        for (number, admitting) in &mut waiting {
            if let Poll::Ready(answer) = polled(admitting) {
                if answer.is_ok() && model.waiting.iter().any(|other| other.0 < *number) {
                    return true;
                }
                panic!("{what}: {number} must wait, and got {answer:?}:");
            }
        }
        drop(probe);
        for (at, budget) in budgets.iter().enumerate() {
            assert_eq!(budget.in_use_bytes() + budget.reserved_bytes(), model.in_use(at), "{what}: {budget:?}");
            let waits = model.waiting.iter().filter(|waiter| model.above(waiter.1).contains(&at)).count();
            assert_eq!(budget.waiting(), waits, "{what}: {budget:?}");
        }
        for (at, request) in requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.as_ref()?))) {
            let of = |blocks: &[(usize, Buffer)], request| {
                blocks.iter().filter(|block| block.0 == request).map(|block| block.1.len()).sum::<usize>()
            };
            let live = |request: usize| {
                of(&blocks, request) + caches.iter().map(|cache| of(&cache.lock().unwrap(), request)).sum::<usize>()
            };
            let inside = |request: usize| {
                let mut outer = Some(request);
                while outer.is_some_and(|outer| outer != at) {
                    outer = model.requests[outer.unwrap()].outer;
                }
                outer.is_some()
            };
            let expected: usize = (0..model.requests.len()).filter(|&request| inside(request)).map(live).sum();
            assert_eq!(request.stats().live_bytes, expected, "{what}");
        }
    }
    // At the end somebody waits where nobody did, and the largest gives way.
    waiting.clear();
    model.waiting.clear();
    model.look();
    let (at, bytes) = (random.below(budgets.len()), 1 + random.below(300));
    let full = model.above(at).into_iter().find(|&full| {
        model.change_request(true, at, bytes);
        let is_full = model.in_use(full) > model.budgets[full].limit;
        model.change_request(false, 0, 0);
        is_full
    });
    if let Some(full) = full.filter(|_| !model.never_fits(at, bytes)) {
        budgets[full].set_victims_after(Some(Duration::ZERO));
        let expected = model.victim(at, bytes, full);
        let mut waits = wanting(&budgets[at], bytes);
        if polled(&mut waits).is_pending() {
            let began = Instant::now();
            while expected.is_some() && budgets[full].victims() == 0 {
                assert!(
                    began.elapsed() < Duration::from_secs(10),
                    "seed {seed}: {expected:?} gives way, and nobody did"
                );
                thread::yield_now();
            }
            budgets[full].set_victims_after(None); // the next one would be due in a moment
            for (number, request) in requests.iter().enumerate() {
                let Some(request) = request else { continue };
                // More than there ever is room for: who is chosen hears of that first, unless one inside refuses it.
                let told = request.run(|| Buffer::zeroed(1 << 30)).unwrap_err();
                let is_chosen = matches!(told, Error::BudgetExceeded { chosen_for: Some(_), .. });
                let may_be = expected.is_some_and(|victim| {
                    std::iter::successors(Some(number), |&number| model.requests[number].outer).any(|at| at == victim)
                });
                let is_the_first = budgets[full].victims() <= 1; // else this thread stood still for long
                assert!(
                    !is_chosen || may_be || !is_the_first,
                    "seed {seed}: {number} was chosen, not {expected:?}: {told}"
                );
            }
            assert_eq!(budgets[full].victims() > 0, expected.is_some(), "seed {seed}: {expected:?}");
        }
    }
    caches.iter().for_each(|cache| cache.lock().unwrap().clear());
    drop((requests, blocks, waiting));
    for (at, budget) in budgets.iter().enumerate() {
        let left = (budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting());
        assert_eq!(left, (0, model.promised(at), 0), "seed {seed}: something is left after all have ended");
    }
    while budgets.len() > 1 {
        drop(budgets.swap_remove(1 + random.below(budgets.len() - 1)));
    }
    // The thread of the queue may be the last one to let go of a budget.
    let began = Instant::now();
    while budgets[0].reserved_bytes() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "seed {seed}: a guarantee outlived its budget");
        thread::yield_now();
    }
    assert_eq!((budgets[0].in_use_bytes(), budgets[0].waiting()), (0, 0), "seed {seed}");
    false
}

#[test]
#[cfg_attr(miri, ignore = "the thread of the queue takes long there")]
fn random_programs_agree_with_the_model() {
    let times = times() as u64;
    // CTXALLOC_SEED=7 runs the program of that seed, and again as often.
    let seed = |turn| number("CTXALLOC_SEED").unwrap_or(turn);
    let looked_meanwhile = (0..400 * times).filter(|&turn| run_program(seed(turn), 60)).count() as u64;
    println!("{looked_meanwhile} of {} programs ended where a look had gone on meanwhile", 400 * times);
    assert!(looked_meanwhile <= 2 + times / 4, "{looked_meanwhile}: a look takes a moment, so this is rare");
}
