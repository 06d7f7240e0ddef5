//! Small blocks of containers go a short way where they can. To the byte they are counted and limited as on the long
//! one: random programs against a naive model, on one thread, on others, and while another one looks.

use allocator_api2::alloc::{Allocator, Layout};
use ctxalloc::request::{Request, Stats};
use ctxalloc::strategy::Budget;
use ctxalloc::{ContextAlloc, request};
use std::ptr::NonNull;
use std::thread;

const LIMIT: usize = 40_000;
const STEPS: usize = if cfg!(miri) { 120 } else { 20_000 };

struct Block(NonNull<u8>, Layout);

// SAFETY: whoever has it has the block.
unsafe impl Send for Block {}

/// What the account must say, and nothing more.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Model {
    live_bytes: usize,
    live_blocks: usize,
    peak_bytes: usize,
    total_bytes: u64,
    total_blocks: u64,
    refused: u64,
}

impl Model {
    /// Whether the account has room for so many bytes more, of a new block or of one that grows.
    fn takes(&mut self, bytes: usize, blocks: usize) -> bool {
        if self.live_bytes + bytes > LIMIT {
            self.refused += 1;
            return false;
        }
        self.live_bytes += bytes;
        self.live_blocks += blocks;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.total_bytes += bytes as u64;
        self.total_blocks += blocks as u64;
        true
    }

    fn gives_back(&mut self, bytes: usize) {
        self.live_bytes -= bytes;
        self.live_blocks -= 1;
    }
}

fn seen(stats: Stats) -> Model {
    let Stats { live_bytes, live_blocks, peak_bytes, total_bytes, total_blocks, refused, .. } = stats;
    Model { live_bytes, live_blocks, peak_bytes, total_bytes, total_blocks, refused }
}

fn random(state: &mut usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// A size that is mostly small, with an alignment that needs no larger block.
fn layout(state: &mut usize) -> Layout {
    let most = [64, 300, 3000, 30_000][random(state) % 4];
    Layout::from_size_align(1 + random(state) % most, 1 << (random(state) % 5)).expect("valid")
}

/// Makes, grows and frees blocks at random; each step must leave the request's numbers as the model's.
fn work(request: &Request, blocks: &mut Vec<Block>, model: &mut Model, state: &mut usize) {
    let allocator = request.run(ContextAlloc::new);
    for step in 0..STEPS {
        let which = random(state);
        match which % 5 {
            0..2 => {
                let layout = layout(state);
                let made = allocator.allocate(layout).ok();
                assert_eq!(made.is_some(), model.takes(layout.size(), 1), "step {step}");
                blocks.extend(made.map(|block| Block(block.cast(), layout)));
            }
            2 if !blocks.is_empty() => {
                let place = which / 5 % blocks.len();
                let Block(block, old) = blocks[place];
                let new = Layout::from_size_align(old.size() + random(state) % 500, old.align()).expect("valid");
                // SAFETY: a live block of this allocator with this layout; the old pointer is not used after success.
                let grown = unsafe {
                    block.write(step as u8);
                    allocator.grow(block, old, new)
                };
                let growth = new.size() - old.size();
                assert_eq!(grown.is_ok(), growth == 0 || model.takes(growth, 0), "step {step}");
                if let Ok(grown) = grown {
                    // SAFETY: the first byte was written above, and kept.
                    assert_eq!(unsafe { grown.cast::<u8>().read() }, step as u8);
                    blocks[place] = Block(grown.cast(), new);
                }
            }
            _ if !blocks.is_empty() => free(&allocator, blocks.swap_remove(which / 5 % blocks.len()), model),
            _ => {}
        }
        assert_eq!(seen(request.stats()), *model, "step {step}");
    }
}

fn free(allocator: &ContextAlloc, Block(block, layout): Block, model: &mut Model) {
    // SAFETY: a live block of this allocator with this layout, once.
    unsafe { allocator.deallocate(block, layout) };
    model.gives_back(layout.size());
}

#[test]
fn a_requests_small_blocks_are_counted_and_limited_to_the_byte() {
    let request = request().limit_bytes(LIMIT).begin().expect("memory");
    let (mut blocks, mut model, mut state) = (Vec::new(), Model::default(), 1);
    work(&request, &mut blocks, &mut model, &mut state);
    // On another thread, which takes the account away, and here again.
    thread::scope(|scope| {
        scope.spawn(|| work(&request, &mut blocks, &mut model, &mut state)).join().expect("no panic");
    });
    work(&request, &mut blocks, &mut model, &mut state);
    let allocator = request.run(ContextAlloc::new);
    blocks.into_iter().for_each(|block| free(&allocator, block, &mut model));
    assert_eq!(seen(request.stats()), model);
    assert_eq!((model.live_bytes, model.live_blocks), (0, 0));
    assert!(model.refused > 0, "the limit was never reached");
}

#[test]
fn budgets_above_count_what_goes_the_short_way() {
    let process = Budget::new("process", None);
    let tenant = process.child("tenant", Some(LIMIT));
    let request = request().limit_bytes(1 << 30).budget(&tenant).begin().expect("memory");
    let allocator = request.run(ContextAlloc::new);
    let (mut blocks, mut model, mut state) = (Vec::new(), Model::default(), 7);
    for _ in 0..STEPS {
        if random(&mut state).is_multiple_of(2) {
            let layout = layout(&mut state);
            let made = allocator.allocate(layout).ok();
            assert_eq!(made.is_some(), model.takes(layout.size(), 1));
            blocks.extend(made.map(|block| Block(block.cast(), layout)));
        } else if let Some(block) = blocks.pop() {
            free(&allocator, block, &mut model);
        }
        for budget in [&process, &tenant] {
            assert_eq!(budget.in_use_bytes(), model.live_bytes);
        }
        assert_eq!(request.stats().live_bytes, model.live_bytes);
    }
    // The request ends, and what it left behind still counts, until it is freed elsewhere.
    let stats = request.end().stats;
    assert_eq!((stats.live_bytes, stats.live_blocks), (model.live_bytes, model.live_blocks));
    thread::spawn(move || {
        blocks.into_iter().for_each(|block| free(&allocator, block, &mut model));
    })
    .join()
    .expect("no panic");
    assert_eq!((process.in_use_bytes(), tenant.in_use_bytes()), (0, 0));
}

#[test]
fn who_looks_from_elsewhere_sees_sums_that_add_up() {
    let request = request().begin().expect("memory");
    let allocator = request.run(ContextAlloc::new);
    let layout = Layout::from_size_align(100, 8).expect("valid");
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            for _ in 0..STEPS {
                let block = allocator.allocate(layout).expect("no limit").cast();
                // SAFETY: live, from this allocator, once.
                unsafe { allocator.deallocate(block, layout) };
            }
        });
        while !worker.is_finished() {
            let stats = request.stats();
            assert_eq!(stats.live_bytes, stats.live_blocks * 100);
            assert_eq!(stats.total_bytes, stats.total_blocks * 100);
            assert!(stats.live_blocks <= 1);
        }
    });
    assert_eq!(request.stats().total_blocks, STEPS as u64);
}
