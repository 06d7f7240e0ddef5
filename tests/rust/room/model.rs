//! The naive model of rooms: it works everything out anew after each step.

#[derive(Clone, Copy)]
pub(super) struct ModelBudget {
    pub(super) parent: Option<usize>,
    pub(super) limit: usize,
    pub(super) guarantee: Option<usize>,
}

pub(super) struct ModelRequest {
    /// Grows from one that comes to the next, whether or not it has to wait then.
    pub(super) number: usize,
    pub(super) outer: Option<usize>,
    pub(super) budget: usize,
    pub(super) reserved: usize,
    pub(super) limit: usize,
    /// Bytes of its own blocks.
    pub(super) own: usize,
    pub(super) has_ended: bool,
}

/// Blocks of a request that a reclaimer of its budget drops.
pub(super) struct ModelCache {
    pub(super) request: usize,
    pub(super) order: usize,
    pub(super) bytes: usize,
}

#[derive(Default)]
pub(super) struct Model {
    /// The next request's.
    pub(super) number: usize,
    pub(super) caches: Vec<ModelCache>,
    pub(super) budgets: Vec<ModelBudget>,
    pub(super) requests: Vec<ModelRequest>,
    /// Number, budget, bytes: in the order in which they came.
    pub(super) waiting: Vec<(usize, usize, usize)>,
    pub(super) closed: Vec<usize>,
}

impl Model {
    pub(super) fn above(&self, budget: usize) -> Vec<usize> {
        let mut found = vec![budget];
        while let Some(parent) = self.budgets[found[found.len() - 1]].parent {
            found.push(parent);
        }
        found
    }

    pub(super) fn is_inside_of_an_ended_one(&self, request: usize) -> bool {
        let around = std::iter::successors(Some(request), |&request| self.requests[request].outer);
        around.into_iter().any(|request| self.requests[request].has_ended)
    }

    /// What a request uses, with those inside of it.
    pub(super) fn used(&self, request: usize) -> usize {
        let inside = (0..self.requests.len()).filter(|&other| self.requests[other].outer == Some(request));
        self.requests[request].own + inside.map(|inside| self.counts_as(inside)).sum::<usize>()
    }

    /// What it counts as above.
    pub(super) fn counts_as(&self, request: usize) -> usize {
        let reserved = if self.requests[request].has_ended { 0 } else { self.requests[request].reserved };
        reserved.max(self.used(request))
    }

    pub(super) fn children(&self, budget: usize) -> impl Iterator<Item = usize> {
        (0..self.budgets.len()).filter(move |&child| self.budgets[child].parent == Some(budget))
    }

    pub(super) fn in_use(&self, budget: usize) -> usize {
        let is_root =
            |&request: &usize| self.requests[request].outer.is_none() && self.requests[request].budget == budget;
        let requests = (0..self.requests.len()).filter(is_root).map(|request| self.counts_as(request));
        requests.sum::<usize>() + self.children(budget).map(|child| self.budget_counts_as(child)).sum::<usize>()
    }

    /// What a budget counts as above.
    pub(super) fn budget_counts_as(&self, budget: usize) -> usize {
        self.in_use(budget).max(self.budgets[budget].guarantee.unwrap_or_default())
    }

    /// What is guaranteed to the budgets below, however little is in use.
    pub(super) fn promised(&self, budget: usize) -> usize {
        let to = |child: usize| self.promised(child).max(self.budgets[child].guarantee.unwrap_or_default());
        self.children(budget).map(to).sum()
    }

    /// Whether a request could not have so many bytes even if it were the only one.
    pub(super) fn never_fits(&self, budget: usize, bytes: usize) -> bool {
        let mut alone = Self { budgets: self.budgets.clone(), ..Self::default() };
        !alone.try_to(false, |model, adds| model.change_request(adds, budget, bytes))
    }

    pub(super) fn change_request(&mut self, adds: bool, budget: usize, reserved: usize) {
        if !adds {
            self.requests.pop();
            return;
        }
        let (number, limit) = (self.next_number(), usize::MAX);
        self.requests.push(ModelRequest { number, outer: None, budget, reserved, limit, own: 0, has_ended: false });
    }

    pub(super) fn next_number(&mut self) -> usize {
        self.number += 1;
        self.number - 1
    }

    /// Changes a guarantee: what it is refused for, if it is.
    pub(super) fn guarantee(&mut self, budget: usize, bytes: usize) -> Result<(), &'static str> {
        let before = self.budgets[budget].guarantee;
        let promised = |model: &Self| (0..model.budgets.len()).map(|at| model.promised(at)).collect::<Vec<_>>();
        if bytes > self.budgets[budget].limit {
            return Err("own limit");
        }
        let all_before = promised(self);
        self.budgets[budget].guarantee = Some(bytes);
        let all = promised(self);
        self.budgets[budget].guarantee = before;
        if (0..all.len()).any(|at| all[at] > all_before[at] && all[at] > self.budgets[at].limit) {
            return Err("promised");
        }
        let change = |model: &mut Self, adds| model.budgets[budget].guarantee = if adds { Some(bytes) } else { before };
        if self.try_to(false, change) { Ok(()) } else { Err("busy") }
    }

    pub(super) fn all_in_use(&self) -> Vec<usize> {
        let budgets = (0..self.budgets.len()).map(|budget| self.in_use(budget));
        budgets.chain((0..self.requests.len()).map(|request| self.used(request))).collect()
    }

    /// Does something, and takes it back if what grows by it exceeds a limit, or is closed to newcomers.
    pub(super) fn try_to(&mut self, is_newcomer: bool, change: impl Fn(&mut Self, bool)) -> bool {
        let before = self.all_in_use();
        change(self, true);
        let limits: Vec<_> =
            self.budgets.iter().map(|budget| budget.limit).chain(self.requests.iter().map(|r| r.limit)).collect();
        let after = self.all_in_use();
        let is_refused = (0..after.len()).any(|at| {
            after[at] > before.get(at).copied().unwrap_or_default()
                && (after[at] > limits[at] || (is_newcomer && self.closed.contains(&at)))
        });
        if is_refused {
            change(self, false);
        }
        !is_refused
    }

    /// How many bytes of what is in use in a budget another one above it would get back.
    pub(super) fn gives_back(&self, budget: usize, full: usize) -> usize {
        let above = self.above(budget);
        let Some(end) = above.iter().position(|&at| at == full) else { return 0 };
        let is_below = |&request: &usize| self.above(self.requests[request].budget).contains(&budget);
        let live = (0..self.requests.len()).filter(is_below).map(|request| self.requests[request].own).sum();
        above[..end].iter().fold(live, |bytes, &at| {
            let guaranteed = self.budgets[at].guarantee.unwrap_or_default();
            self.in_use(at).max(guaranteed) - (self.in_use(at) - bytes).max(guaranteed)
        })
    }

    /// Which request gives way to one that waits in a budget for so many bytes of another one: of the largest the one
    /// that came last.
    pub(super) fn victim(&self, waits_in: usize, bytes: usize, full: usize) -> Option<usize> {
        let used = self.in_use(full);
        let mut with = Self { budgets: self.budgets.clone(), ..Self::default() };
        with.requests.extend(self.requests.iter().map(|request| ModelRequest { ..*request }));
        with.change_request(true, waits_in, bytes);
        let wanted = with.in_use(full) - used;
        let live = |request: usize| {
            let is_inside = |&other: &usize| {
                std::iter::successors(Some(other), |&other| self.requests[other].outer).any(|other| other == request)
            };
            (0..self.requests.len()).filter(is_inside).map(|other| self.requests[other].own).sum::<usize>()
        };
        // Of what it uses, what it reserved and those around it reserved stays; then what budgets are guaranteed.
        let excess = |request: usize| {
            let mut bytes = live(request);
            for around in std::iter::successors(Some(request), |&request| self.requests[request].outer) {
                if !self.requests[around].has_ended {
                    let (reserved, used) = (self.requests[around].reserved, self.used(around));
                    bytes = used.max(reserved) - (used - bytes).max(reserved);
                }
            }
            let above = self.above(self.requests[request].budget);
            let end = above.iter().position(|&at| at == full)?;
            Some(above[..end].iter().fold(bytes, |bytes, &at| {
                let guaranteed = self.budgets[at].guarantee.unwrap_or_default();
                self.in_use(at).max(guaranteed) - (self.in_use(at) - bytes).max(guaranteed)
            }))
        };
        let candidates = (0..self.requests.len()).filter(|&request| !self.requests[request].has_ended);
        let all = candidates.filter_map(|request| Some((excess(request)?, self.requests[request].number, request)));
        all.filter(|&(excess, ..)| excess > wanted).max().map(|(.., request)| request)
    }

    /// Which caches are dropped, in this order, when so much of a budget is wanted back.
    pub(super) fn reclaim(&mut self, full: usize, wanted: usize) -> (usize, Vec<usize>) {
        let mut order: Vec<usize> = (0..self.caches.len()).collect();
        order.sort_by_key(|&at| (self.caches[at].order, at));
        let (mut freed, mut dropped) = (0, Vec::new());
        for at in order {
            if freed < wanted && self.gives_back(self.requests[self.caches[at].request].budget, full) > 0 {
                let request = self.caches[at].request;
                let bytes = std::mem::take(&mut self.caches[at].bytes);
                self.requests[request].own -= bytes;
                freed += bytes;
                dropped.push(at);
            }
        }
        (freed, dropped)
    }

    /// Whether so many bytes more break the limit of a request, or of a budget up to the first one that they are
    /// guaranteed to: where others cannot be the reason.
    pub(super) fn is_refused_by_its_own(&self, request: usize, bytes: usize) -> bool {
        let mut around = std::iter::successors(Some(request), |&request| self.requests[request].outer);
        if around.any(|request| self.used(request).saturating_add(bytes) > self.requests[request].limit) {
            return true;
        }
        let above = self.above(self.requests[request].budget);
        let is_guaranteed = |&at: &usize| self.in_use(at) + bytes <= self.budgets[at].guarantee.unwrap_or_default();
        let own = above.iter().position(is_guaranteed).map_or(above.len(), |at| at + 1);
        above[..own].iter().any(|&at| self.in_use(at) + bytes > self.budgets[at].limit)
    }

    /// Who gets room now.
    pub(super) fn look(&mut self) -> Vec<(usize, usize, usize)> {
        let mut all = Vec::new();
        loop {
            let given = self.look_once();
            if given.is_empty() {
                return all;
            }
            all.extend(given);
        }
    }

    /// Those who wait in vain, whatever they wait for.
    pub(super) fn turn_away(&mut self) -> Vec<(usize, usize, usize)> {
        let waiting = std::mem::take(&mut self.waiting);
        let (in_vain, others) = waiting.into_iter().partition(|&(_, budget, bytes)| self.never_fits(budget, bytes));
        self.waiting = others;
        in_vain
    }

    pub(super) fn look_once(&mut self) -> Vec<(usize, usize, usize)> {
        let (mut closed, mut given): (Vec<usize>, _) = (Vec::new(), Vec::new());
        for waiter in self.waiting.clone() {
            let (number, budget, bytes) = waiter;
            let above = self.above(budget);
            let before: Vec<_> = above.iter().map(|&b| (self.in_use(b), self.budget_counts_as(b))).collect();
            self.change_request(true, budget, bytes);
            let after: Vec<_> = above.iter().map(|&b| (self.in_use(b), self.budget_counts_as(b))).collect();
            let grows = |at: usize| after[at].0 > before[at].0;
            let is_closed = |at: &usize| grows(*at) && closed.contains(&above[*at]);
            let is_full = |at: &usize| grows(*at) && after[*at].0 > self.budgets[above[*at]].limit;
            let all = 0..above.len();
            let mut obstacles: Vec<usize> = all.clone().filter(is_closed).take(1).collect();
            let is_passed_over = !obstacles.is_empty();
            if obstacles.is_empty() {
                obstacles = all.filter(is_full).take(1).collect();
            }
            let Some(&highest) = obstacles.last() else {
                self.requests.last_mut().unwrap().number = number;
                self.waiting.retain(|other| other != &waiter);
                given.push(waiter);
                continue;
            };
            // Its own tenant's small ones must not use up the guarantee that it waits to draw on.
            let is_drawn_on = |at: &usize| after[*at].0 - before[*at].0 > after[*at].1 - before[*at].1;
            closed.extend((0..highest).filter(is_drawn_on).map(|at| above[at]));
            if !is_passed_over {
                closed.extend(obstacles.iter().map(|&at| above[at]));
            }
            self.change_request(false, 0, 0);
        }
        self.closed = closed;
        given
    }
}
