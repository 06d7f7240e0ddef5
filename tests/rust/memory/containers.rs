//! `ContextAlloc` under the containers of allocator-api2, and by itself against a model: every alignment, zero sizes,
//! growing and shrinking, handlers that align to nothing.

use crate::support::{Odd, blue, green, marked, red, rounds, switched};
use allocator_api2::alloc::{Allocator, Layout};
use allocator_api2::boxed::Box as BoxIn;
use allocator_api2::vec::Vec as VecIn;
use ctxalloc::{ContextAlloc, Handler, handler, register, scope};
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::thread;

/// Handlers aligned to 1, 16 and 64 bytes.
fn owners() -> [Handler; 3] {
    static ODD: OnceLock<Handler> = OnceLock::new();
    let odd = *ODD.get_or_init(|| register("odd", Odd).expect("a name of its own"));
    [odd, handler("system").expect("built in"), handler("aligned64").expect("built in")]
}

#[test]
fn a_container_stays_with_the_handler_it_was_made_in() {
    let (owner, strategy) = marked("container");
    let mut numbers = scope(owner, || VecIn::new_in(ContextAlloc::new()));
    scope(blue(), || numbers.extend(0..10_000_u64));
    assert_eq!((numbers.allocator().handler(), strategy.live_blocks()), (owner, 1));
    assert!(numbers.iter().copied().eq(0..10_000));
    let copy = scope(green(), || numbers.clone());
    assert_eq!((copy.allocator().handler(), strategy.live_blocks()), (owner, 2));
    thread::spawn(move || drop((numbers, copy))).join().expect("no panic");
    assert_eq!((strategy.live_blocks(), strategy.live_bytes()), (0, 0));
}

#[test]
fn the_default_allocator_is_the_current_handler() {
    scope(red(), || assert_eq!(ContextAlloc::default().handler(), red()));
    assert_eq!(ContextAlloc::with_handler(green()), scope(green(), ContextAlloc::new));
    assert_ne!(ContextAlloc::with_handler(green()), ContextAlloc::with_handler(red()));
}

#[test]
fn types_without_a_size_ask_for_no_block() {
    let (owner, strategy) = marked("no size");
    let mut units = VecIn::new_in(ContextAlloc::with_handler(owner));
    units.extend([(); 1000]);
    #[repr(align(256))]
    struct Nothing;
    let nothing = BoxIn::new_in(Nothing, ContextAlloc::with_handler(owner));
    assert!((&raw const *nothing).addr().is_multiple_of(256));
    let empty: VecIn<u64, _> = VecIn::new_in(ContextAlloc::with_handler(owner));
    assert_eq!((units.len(), empty.len(), strategy.made()), (1000, 0, 0));
}

#[test]
fn out_of_memory_is_a_value_and_the_container_stays() {
    let (owner, strategy) = switched("container out of memory");
    let mut numbers = VecIn::new_in(ContextAlloc::with_handler(owner));
    numbers.extend([1_u8, 2, 3]);
    strategy.refuse(true);
    assert!(numbers.try_reserve(10_000).is_err());
    assert_eq!(&numbers[..], [1, 2, 3]);
    assert!(BoxIn::try_new_in(0_u64, ContextAlloc::with_handler(owner)).is_err());
    assert!(ContextAlloc::with_handler(owner).allocate(layout(10, 4096)).is_err());
    strategy.refuse(false);
    numbers.reserve(10_000);
    drop(numbers);
    assert_eq!(strategy.live_blocks.load(Ordering::SeqCst), 0);
}

#[test]
fn impossible_layouts_are_refused() {
    let allocator = ContextAlloc::with_handler(owners()[1]);
    for align in [1, 16, 4096, 1 << 40, 1 << 62] {
        let most = isize::MAX as usize - (align - 1);
        if cfg!(miri) {
            continue; // its malloc ends the run where a real one returns NULL
        }
        assert!(allocator.allocate(layout(most, align)).is_err());
        assert!(allocator.allocate_zeroed(layout(most, align)).is_err());
    }
    let nothing = layout(0, 1 << 62);
    let block = allocator.allocate(nothing).expect("nothing is always there");
    assert!(block.cast::<u8>().addr().get().is_multiple_of(1 << 62));
    // SAFETY: from this allocator, with this layout.
    unsafe { allocator.deallocate(block.cast(), nothing) };
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("a layout")
}

#[derive(Debug, Clone)]
enum Step {
    Allocate {
        layout: Layout,
        zeroed: bool,
    },
    /// To a layout of any size and alignment: grow, grow_zeroed or shrink, whichever fits.
    Change {
        which: usize,
        layout: Layout,
        zeroed: bool,
    },
    Deallocate {
        which: usize,
    },
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let size = prop_oneof![Just(0_usize), 1..40_usize, 0..rounds(5000, 300)];
    (size, 0..rounds(13, 9) as u32).prop_map(|(size, power)| layout(size, 1 << power))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (any_layout(), any::<bool>()).prop_map(|(layout, zeroed)| Step::Allocate { layout, zeroed }),
        5 => (any::<usize>(), any_layout(), any::<bool>())
            .prop_map(|(which, layout, zeroed)| Step::Change { which, layout, zeroed }),
        2 => any::<usize>().prop_map(|which| Step::Deallocate { which }),
    ]
}

/// A live block and what is known to be in it.
struct Live {
    block: NonNull<[u8]>,
    layout: Layout,
    model: Vec<u8>,
}

impl Live {
    /// Fills what is not known yet, so that overlaps and lost bytes show.
    fn fill(&mut self, seed: u8) {
        for index in self.model.len()..self.layout.size() {
            let byte = seed.wrapping_add(index as u8);
            // SAFETY: `index` is below the length of the live block.
            unsafe { self.block.cast::<u8>().add(index).write(byte) };
            self.model.push(byte);
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the first `model.len()` bytes are initialised.
        unsafe { std::slice::from_raw_parts(self.block.cast().as_ptr(), self.model.len()) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: rounds(200, 4) as u32, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn blocks_of_any_layout_keep_their_bytes_through_any_change(
        owner in 0..3_usize,
        steps in prop::collection::vec(step(), 1..rounds(50, 15)),
    ) {
        let allocator = ContextAlloc::with_handler(owners()[owner]);
        let mut live: Vec<Live> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            let count = live.len().max(1);
            match step {
                Step::Allocate { layout, zeroed } => {
                    let block = if zeroed { allocator.allocate_zeroed(layout) } else { allocator.allocate(layout) };
                    let model = if zeroed { vec![0; layout.size()] } else { Vec::new() };
                    live.push(Live { block: block.expect("some bytes"), layout, model });
                }
                Step::Change { which, layout, zeroed } => if let Some(one) = live.get_mut(which % count) {
                    let (block, old) = (one.block.cast(), one.layout);
                    let changed = if layout.size() < old.size() {
                        // SAFETY: a live block with this layout; smaller.
                        unsafe { allocator.shrink(block, old, layout) }
                    } else if zeroed {
                        // SAFETY: a live block with this layout; not smaller.
                        unsafe { allocator.grow_zeroed(block, old, layout) }
                    } else {
                        // SAFETY: a live block with this layout; not smaller.
                        unsafe { allocator.grow(block, old, layout) }
                    };
                    one.block = changed.expect("some bytes");
                    one.layout = layout;
                    one.model.truncate(layout.size());
                    if zeroed {
                        one.model.resize(layout.size(), 0);
                    }
                },
                Step::Deallocate { which } => if !live.is_empty() {
                    let one = live.swap_remove(which % count);
                    // SAFETY: a live block with this layout.
                    unsafe { allocator.deallocate(one.block.cast(), one.layout) };
                },
            }
            for one in &live {
                prop_assert!(one.block.cast::<u8>().addr().get().is_multiple_of(one.layout.align()));
                prop_assert!(one.block.len() >= one.layout.size());
                prop_assert!(one.bytes() == one.model, "the bytes of a block changed");
            }
            live.iter_mut().for_each(|one| one.fill(number as u8));
        }
        for one in live {
            // SAFETY: a live block with this layout.
            unsafe { allocator.deallocate(one.block.cast(), one.layout) };
        }
    }
}
