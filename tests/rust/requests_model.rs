//! Accounts against a naive model, in which a chain is a set of accounts and a charge goes to all of them or to none:
//! trees of budgets, diamonds, requests up to six deep, limits, refusals, overdrafts, resizes, escapes, work after the
//! end, on one thread and handed from thread to thread.
//!
//! After each step of a random program all numbers of all accounts must be those of the model. `CTXALLOC_STRESS` says
//! how many times the programs of `make test` are run (`make stress`: a million); a failure names its seed.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[cfg(feature = "allocator-api2")]
#[path = "requests_model/containers.rs"]
mod containers;
#[path = "support/errors.rs"]
mod errors;
#[path = "requests_model/hands.rs"]
mod hands;
#[path = "requests_model/model.rs"]
mod model;
#[path = "requests_model/random.rs"]
mod random;
#[path = "requests_model/threads.rs"]
mod threads;

use ctxalloc::request::AfterEnd;
use ctxalloc::strategy::{Budget, System};
use ctxalloc::{Buffer, Context, Error, Request, request};
use errors::{error, refusal};
use hands::Hands;
use model::{Model, Numbers};
use random::{Random, times};

struct Real {
    number: usize,
    request: Option<Request>,
    budget: Budget,
    context: Option<Context>,
    after_end: AfterEnd,
    depth: usize,
    /// The thread that began it, which owns its account.
    home: usize,
}

struct Block {
    buffer: Buffer,
    request: usize,
    counted: bool,
}

struct Program<'a> {
    random: Random,
    model: Model,
    budgets: Vec<(usize, Budget)>,
    requests: Vec<Real>,
    blocks: Vec<Block>,
    hands: &'a Hands,
}

impl Program<'_> {
    fn limit(&mut self) -> Option<usize> {
        match self.random.below(4) {
            0 => None,
            1 => Some(self.random.below(3000)),
            2 => Some(self.random.below(60_000)),
            _ => Some(self.random.below(2_000_000)),
        }
    }

    fn new_budget(&mut self) {
        let limit = self.limit();
        let name = format!("budget {}", self.model.accounts.len());
        if self.budgets.is_empty() || self.random.one_in(3) {
            let number = self.model.budget(name.clone(), limit, None);
            self.add_budget(number, Budget::new(&name, limit));
        } else {
            let (parent, real) = &self.budgets[self.random.below(self.budgets.len())];
            let real = real.child(&name, limit);
            let number = self.model.budget(name, limit, Some(*parent));
            self.add_budget(number, real);
        }
    }

    fn add_budget(&mut self, number: usize, real: Budget) {
        self.model.accounts[number].id = real.id();
        self.budgets.push((number, real));
    }

    fn begin(&mut self) {
        let limit = self.limit();
        let name = format!("request {}", self.model.accounts.len());
        let budget = (!self.budgets.is_empty() && self.random.one_in(2)).then(|| self.random.below(self.budgets.len()));
        let inside =
            (!self.requests.is_empty() && !self.random.one_in(4)).then(|| self.random.below(self.requests.len()));
        let inside =
            inside.filter(|&inside| self.requests[inside].depth < 6 && self.requests[inside].context.is_some());
        let is_root = inside.is_some() && self.random.one_in(6);
        let overdraft = [0, 0, 60, 2000][self.random.below(4)];
        let after_end = [AfterEnd::Charge, AfterEnd::Refuse, AfterEnd::Detach][self.random.below(3)];
        let mut builder = request().root();
        let depth = inside.map_or(0, |inside| self.requests[inside].depth + 1);
        if let Some(inside) = inside.filter(|_| !is_root) {
            builder = self.requests[inside].context.as_mut().unwrap().run(request);
        }
        builder = builder.name(&name).overdraft_bytes(overdraft).after_end(after_end);
        if let Some(limit) = limit {
            builder = builder.limit_bytes(limit);
        }
        if let Some(budget) = budget {
            builder = builder.budget(&self.budgets[budget].1);
        }
        if self.random.one_in(5) {
            builder = builder.strategy(System);
        }
        let home = self.hands.any(&mut self.random);
        let real = self.hands.run(home, move || builder.begin()).unwrap();
        let outer = inside.filter(|_| !is_root).map(|inside| self.requests[inside].number);
        let budget = budget.map(|budget| self.budgets[budget].0);
        let number = self.model.request(name, limit, overdraft, budget, outer);
        self.model.accounts[number].id = real.budget().id();
        self.requests.push(Real {
            number,
            budget: real.budget(),
            context: Some(Context::with_handler(real.handler())),
            request: Some(real),
            after_end,
            depth,
            home,
        });
    }

    fn allocate(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let which = self.random.below(self.requests.len());
        let size = self.random.size();
        let Some(mut context) = self.requests[which].context.take() else { return };
        let there = self.hands.near(&mut self.random, self.requests[which].home);
        let (made, context) = self.hands.run(there, move || {
            let made = context.run(|| Buffer::zeroed(size));
            (made, context)
        });
        self.requests[which].context = Some(context);
        if let Some(block) = self.was_made(which, size, made) {
            self.blocks.push(block);
        }
    }

    /// The same to the model, and whether both agree.
    fn was_made(&mut self, which: usize, size: usize, made: Result<Buffer, Error>) -> Option<Block> {
        let Real { number, after_end, .. } = self.requests[which];
        let is_over = self.model.accounts[number].ended;
        let is_tiny = size <= 1024;
        let is_late = is_over && after_end == AfterEnd::Refuse;
        match after_end {
            AfterEnd::Refuse if is_over && !(is_tiny && self.model.accounts[number].overdraft > Some(0)) => {
                self.model.accounts[number].stats.refused += 1;
                assert!(matches!(made, Err(Error::RequestEnded { .. })), "{made:?}");
            }
            AfterEnd::Detach if is_over && !self.model.is_inside_of_an_open_one(number) => {
                return Some(Block { buffer: made.unwrap(), request: number, counted: false });
            }
            _ => match self.model.charge(number, size, 1, size, is_late) {
                Ok(()) => {
                    return Some(Block { buffer: made.unwrap(), request: number, counted: true });
                }
                Err(refusing) if is_late && refusing == number => {
                    assert!(matches!(made, Err(Error::RequestEnded { .. })), "{made:?}");
                }
                Err(refusing) => {
                    let Numbers { limit, stats, name, id, overdraft, .. } = &self.model.accounts[refusing];
                    let expected = error!(BudgetExceeded {
                        budget: name.clone(),
                        budget_id: *id,
                        of_request: overdraft.is_some(),
                        limit_bytes: limit.unwrap(),
                        in_use_bytes: stats.live_bytes,
                        held_bytes: self.model.accounts[number].stats.live_bytes,
                        requested_bytes: size,
                        chosen_for: None::<String>,
                        guaranteed_bytes: 0usize
                    });
                    assert_eq!(refusal(made), expected);
                }
            },
        }
        None
    }

    /// Small blocks, one after the other, which nobody looks at meanwhile: so the request borrows for them.
    fn burst(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let which = self.random.below(self.requests.len());
        let Some(mut context) = self.requests[which].context.take() else { return };
        let largest = [64, 300, 2000][self.random.below(3)];
        // A number of bytes to ask for, or none: the latest is freed, or the first.
        let steps: Vec<Result<usize, bool>> = (0..1 + self.random.below(80))
            .map(
                |_| if self.random.one_in(3) { Err(self.random.one_in(2)) } else { Ok(1 + self.random.below(largest)) },
            )
            .collect();
        let there = self.hands.near(&mut self.random, self.requests[which].home);
        let done = steps.clone();
        let (made, left, context) = self.hands.run(there, move || {
            let (mut made, mut left) = (Vec::new(), Vec::new());
            context.run(|| {
                for step in done {
                    match step {
                        Ok(size) => {
                            let buffer = Buffer::zeroed(size);
                            made.push(buffer.as_ref().map(|_| ()).map_err(Error::clone));
                            left.extend(buffer);
                        }
                        Err(_) if left.is_empty() => {}
                        Err(true) => drop(left.pop()),
                        Err(false) => drop(left.remove(0)),
                    }
                }
            });
            (made, left, context)
        });
        self.requests[which].context = Some(context);
        let number = self.requests[which].number;
        let (mut made, mut sizes) = (made.into_iter(), Vec::new());
        for step in steps {
            match step {
                Ok(size) => {
                    let stand_in = made.next().unwrap().map(|()| Buffer::zeroed(size).unwrap());
                    sizes.extend(self.was_made(which, size, stand_in).map(|block| (size, block.counted)));
                }
                Err(_) if sizes.is_empty() => {}
                Err(is_latest) => {
                    let (size, counted) = if is_latest { sizes.pop().unwrap() } else { sizes.remove(0) };
                    if counted {
                        self.model.give_back(number, size, 1);
                    }
                }
            }
        }
        assert_eq!(left.len(), sizes.len());
        let blocks = left.into_iter().zip(sizes);
        self.blocks.extend(blocks.map(|(buffer, (_, counted))| Block { buffer, request: number, counted }));
    }

    fn resize(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let which = self.random.below(self.blocks.len());
        let size = self.random.size();
        let Block { mut buffer, request, counted } = self.blocks.swap_remove(which);
        let old = buffer.len();
        let real = self.requests.iter().find(|real| real.number == request).unwrap();
        let there = self.hands.near(&mut self.random, real.home);
        let (done, buffer) = self.hands.run(there, move || (buffer.resize(size), buffer));
        if counted {
            let has_overdraft = self.model.accounts[request].overdraft > Some(0);
            let is_late = real.after_end == AfterEnd::Refuse && self.model.accounts[request].ended;
            let refuses = is_late && size > old && !(size <= 1024 && has_overdraft);
            if refuses {
                self.model.accounts[request].stats.refused += 1;
                assert!(done.is_err());
            } else {
                let grown = size.saturating_sub(old);
                // What is given back is never refused.
                let expected = if grown > 0 { self.model.charge(request, grown, 0, size, is_late) } else { Ok(()) };
                assert_eq!(done.is_ok(), expected.is_ok());
                if expected.is_ok() {
                    self.model.give_back(request, old.saturating_sub(size), 0);
                }
            }
        } else {
            done.unwrap();
        }
        self.blocks.push(Block { buffer, request, counted });
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let which = self.random.below(self.blocks.len());
        let Block { buffer, request, counted } = self.blocks.swap_remove(which);
        if counted {
            self.model.give_back(request, buffer.len(), 1);
        }
        let home = self.requests.iter().find(|real| real.number == request).unwrap().home;
        let there = self.hands.near(&mut self.random, home);
        self.hands.run(there, move || drop(buffer));
    }

    fn end(&mut self) {
        let open: Vec<_> = (0..self.requests.len()).filter(|&number| self.requests[number].request.is_some()).collect();
        if open.is_empty() {
            return;
        }
        let which = open[self.random.below(open.len())];
        let real = self.requests[which].request.take().unwrap();
        let number = self.requests[which].number;
        let there = self.hands.near(&mut self.random, self.requests[which].home);
        let report = self.hands.run(there, move || real.end());
        let stats = self.model.accounts[number].stats;
        assert_eq!((report.escaped_blocks, report.stats.peak_bytes), (stats.live_blocks, stats.peak_bytes));
        let account = &mut self.model.accounts[number];
        account.ended = true;
        if self.requests[which].after_end == AfterEnd::Refuse {
            account.floor = account.stats.live_bytes;
        }
        if self.random.one_in(2) {
            self.requests[which].context = None; // whatever else there is of it, its blocks keep it
        }
    }

    fn change_a_limit(&mut self) {
        if !self.budgets.is_empty() {
            let limit = self.limit();
            let (number, real) = &self.budgets[self.random.below(self.budgets.len())];
            let account = &mut self.model.accounts[*number];
            account.limit = limit;
            account.floor =
                if limit.is_some_and(|limit| account.stats.live_bytes > limit) { account.stats.live_bytes } else { 0 };
            real.set_limit_bytes(limit);
        }
    }

    /// All numbers, some of which no request borrows after: of `requests` too where these are asked.
    fn check(&self, asks_requests: bool) {
        for (number, real) in &self.budgets {
            let Numbers { stats, name, .. } = &self.model.accounts[*number];
            let seen = (real.in_use_bytes(), real.peak_bytes(), real.refused());
            assert_eq!(seen, (stats.live_bytes, stats.peak_bytes, stats.refused), "{name}");
        }
        for real in &self.requests {
            let Numbers { stats, name, limit, .. } = &self.model.accounts[real.number];
            let seen = (real.budget.in_use_bytes(), real.budget.peak_bytes(), real.budget.refused());
            assert_eq!(seen, (stats.live_bytes, stats.peak_bytes, stats.refused), "{name}");
            if let Some(request) = real.request.as_ref().filter(|_| asks_requests) {
                let beyond = limit.map_or(0, |limit| stats.live_bytes.saturating_sub(limit));
                let mut expected = *stats;
                expected.overdraft_bytes = beyond;
                assert_eq!(request.stats(), expected, "{name}");
            }
        }
    }

    fn run(mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.below(20) {
                0 => self.new_budget(),
                1..=2 => self.begin(),
                3 => self.end(),
                4 => self.change_a_limit(),
                5..=7 => self.resize(),
                8..=10 => self.free(),
                11..=14 => self.burst(),
                _ => self.allocate(),
            }
            let asks_requests = self.random.one_in(6);
            self.check(asks_requests);
        }
        while !self.blocks.is_empty() {
            self.free();
        }
        self.check(true);
        assert!(self.model.accounts.iter().all(|account| account.stats.live_bytes == 0));
    }
}

fn programs(count: usize, first_seed: u64, hands: &Hands) {
    for seed in first_seed..first_seed + count as u64 {
        let seed_on_failure = SeedOnFailure(seed);
        let program = Program {
            random: Random::new(seed),
            model: Model::default(),
            budgets: Vec::new(),
            requests: Vec::new(),
            blocks: Vec::new(),
            hands,
        };
        program.run(60);
        std::mem::forget(seed_on_failure);
    }
}

/// Says the seed where the program fails.
struct SeedOnFailure(u64);

impl Drop for SeedOnFailure {
    fn drop(&mut self) {
        eprintln!("the program with seed {} failed", self.0);
    }
}

#[test]
fn random_programs_on_one_thread_have_the_models_numbers() {
    programs(if cfg!(miri) { 5 } else { 1500 * times() }, 1, &Hands::new(0, 0));
}

#[test]
fn random_programs_handed_from_thread_to_thread_have_the_models_numbers() {
    programs(if cfg!(miri) { 3 } else { 500 * times() }, 1 << 40, &Hands::new(3, usize::MAX));
}

#[test]
fn random_programs_handed_to_threads_that_end_have_the_models_numbers() {
    for lasts in [1, 7, 30] {
        programs(if cfg!(miri) { 1 } else { 150 * times() }, 1 << 41, &Hands::new(3, lasts));
    }
}
