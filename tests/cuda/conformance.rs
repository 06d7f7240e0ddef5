//! CUDA's sources and the quarantine, against the driver of `driver.c`. Without the feature `cuda` there is nothing
//! here.

mod fake;

use ctxalloc::source::{CudaDevice, CudaKind, CudaManaged, CudaPinned, CudaPinnedOptions, CudaSource, cuda_mapped};
use ctxalloc::strategy::{
    Budget, Budgeted, PoolOptions, Quarantined, Reuse, Strategy, Tracked, Zeroing, conformance, cuda_capturing,
    cuda_settle, cuda_waiting,
};
use fake::{alone, copy, device, get, run, set};
use std::ptr::NonNull;

const MIB: usize = 1 << 20;

fn pinned() -> Quarantined<CudaPinned> {
    let source = CudaPinned::new(&device(), CudaPinnedOptions::default()).expect("it registers");
    Quarantined::pool(source, PoolOptions::default(), Reuse::AfterEvents).expect("12.5")
}

fn managed() -> Quarantined<CudaManaged> {
    let source = CudaManaged::new(&device()).expect("it has some");
    Quarantined::pool(source, PoolOptions::default(), Reuse::AfterEvents).expect("12.5")
}

#[allow(unsafe_code, reason = "blocks")]
fn release(strategy: &impl Strategy, block: NonNull<u8>) {
    // SAFETY: each test releases its live blocks once.
    unsafe { strategy.release(block) }
}

/// A block with the same byte all over.
#[allow(unsafe_code, reason = "blocks")]
fn filled(strategy: &impl Strategy, size_bytes: usize, byte: u8) -> NonNull<u8> {
    let block = strategy.allocate(size_bytes).expect("memory");
    // SAFETY: that many bytes.
    unsafe { block.write_bytes(byte, size_bytes) };
    block
}

/// Ends what the strategies left: nothing waits, and nothing is mapped.
fn nothing_is_left() {
    run(1_000_000);
    for _ in 0..3 {
        cuda_settle();
    }
    let waiting = cuda_waiting();
    assert_eq!((waiting.blocks, waiting.bytes), (0, 0));
    // The thread ctxalloc-decay may look at a pool at the moment, and is then the last to let go of it.
    for _ in 0..500 {
        if cuda_mapped().1 == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let (mapped_bytes, mappings, _) = cuda_mapped();
    assert_eq!((mapped_bytes, mappings), (0, 0));
    assert_eq!((get(c"registrations"), get(c"registered_bytes"), get(c"allocations")), (0, 0, 0));
}

#[test]
fn pinned_and_managed_memory_keep_the_strategy_contract() {
    let _turn = alone();
    conformance::check(pinned());
    conformance::check(pinned().arena());
    conformance::check(managed());
    conformance::check(managed().arena());
    conformance::check(Budgeted::new(pinned(), Budget::new("all", None)));
    conformance::check(Tracked::new(pinned()).expect("not tracked"));
    let unchecked = Quarantined::pool(
        CudaPinned::new(&device(), CudaPinnedOptions::default()).expect("it registers"),
        PoolOptions::default(),
        Reuse::Unchecked,
    );
    conformance::check(unchecked.expect("always"));
    nothing_is_left();
}

#[test]
fn whole_mappings_are_registered_and_blocks_lie_in_one_each() {
    let _turn = alone();
    let (pool, device) = (pinned(), device());
    let before = get(c"registered_ever");
    let blocks: Vec<_> =
        [100, 70_000, 5 * MIB, 40 * MIB].map(|size| (pool.allocate(size).expect("memory"), size)).into();
    for &(block, size) in &blocks {
        let address = block.addr().get();
        assert_eq!(device.kind_of(address).expect("a context"), CudaKind::Host);
        assert_eq!(device.kind_of(address + size - 1).expect("a context"), CudaKind::Host);
        assert_eq!(device.device_address(address).expect("an answer"), Some(address));
    }
    let ever = get(c"registered_ever") - before;
    assert!(ever <= 4, "{ever} registrations for 4 blocks");
    for (block, _) in blocks {
        release(&pool, block);
    }
    assert_eq!(device.kind_of(pool_free_address()).expect("a context"), CudaKind::Pageable);
    drop(pool);
    nothing_is_left();
}

fn pool_free_address() -> usize {
    std::ptr::from_ref(Box::leak(Box::new(7_u8))).addr()
}

#[test]
fn small_blocks_share_an_event() {
    let _turn = alone();
    let pool = pinned();
    let before = get(c"recorded");
    for _ in 0..640 {
        release(&pool, pool.allocate(1000).expect("memory"));
    }
    assert_eq!(get(c"recorded") - before, 10, "one for 64");
    drop(pool);
    nothing_is_left();
}

#[test]
fn an_arena_that_ended_keeps_its_memory_until_the_device_is_done() {
    let _turn = alone();
    let pool = pinned();
    set(c"progress", 0);
    let arena = pool.arena();
    let blocks = [3000, 3 * MIB].map(|size| (filled(&arena, size, 5), size));
    for (block, size) in blocks {
        copy(block, size);
        release(&arena, block);
    }
    drop(arena);
    drop(pool);
    cuda_settle();
    assert!(get(c"registrations") > 0, "unregistering it would end the process");
    run(2);
    cuda_settle();
    nothing_is_left();
}

#[test]
#[allow(unsafe_code, reason = "blocks")]
fn a_resize_that_moves_leaves_the_old_block_to_the_copy() {
    let _turn = alone();
    let pool = pinned();
    set(c"progress", 0);
    let block = filled(&pool, MIB, 3);
    copy(block, MIB);
    // SAFETY: live, and only the new one is used from here on.
    let moved = unsafe { pool.resize(block, 9 * MIB) }.expect("memory");
    let other = filled(&pool, MIB, 4);
    assert_ne!(other, block);
    // SAFETY: the first MiB was kept.
    assert!(unsafe { std::slice::from_raw_parts(moved.as_ptr(), MIB) }.iter().all(|&byte| byte == 3));
    run(1);
    release(&pool, moved);
    release(&pool, other);
    drop(pool);
    nothing_is_left();
}

#[test]
fn what_waits_goes_back_where_nobody_allocates() {
    let _turn = alone();
    let pool = pinned();
    set(c"progress", 0);
    let block = filled(&pool, 2 * MIB, 1);
    copy(block, 2 * MIB);
    release(&pool, block);
    let begun = std::time::Instant::now();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(cuda_waiting().bytes >= 2 * MIB, "the copy runs");
    run(1 << 30);
    while cuda_waiting().bytes > 0 {
        assert!(begun.elapsed().as_secs() < 60, "{:?}", cuda_waiting());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(pool);
    nothing_is_left();
}

#[test]
fn nothing_is_wiped_that_a_device_may_read() {
    let _turn = alone();
    let zeroing = Zeroing::new(Budgeted::new(pinned(), Budget::new("pinned", None)));
    assert!(zeroing.allocate(1000).is_none() && zeroing.allocate_zeroed(1000).is_none());
    drop(zeroing);
    let kept = CudaPinned::new(&device(), CudaPinnedOptions::default()).expect("a device");
    let at_once = Quarantined::pool(kept, PoolOptions::default(), Reuse::Unchecked).expect("a pool");
    let zeroing = Zeroing::new(at_once);
    let block = filled(&zeroing, 1000, 1);
    release(&zeroing, block);
    drop(zeroing);
    nothing_is_left();
}

#[test]
fn nothing_is_recorded_while_a_graph_is_captured() {
    let _turn = alone();
    let pool = pinned();
    let invalidated = get(c"invalidated");
    set(c"capturing", 1);
    let guard = cuda_capturing();
    let block = filled(&pool, 2 * MIB, 1);
    release(&pool, block);
    let other = filled(&pool, 2 * MIB, 2);
    assert_ne!(other, block, "nobody knows whether the device is done");
    assert!(cuda_settle() == 0 && cuda_waiting().captures == 1);
    set(c"capturing", 0);
    drop(guard);
    assert_eq!(get(c"invalidated"), invalidated, "no call broke the capture");
    cuda_settle();
    assert_eq!(cuda_waiting().bytes, 0);
    release(&pool, other);
    drop(pool);
    nothing_is_left();
}

#[test]
fn an_event_that_cannot_be_recorded_is_tried_again() {
    let _turn = alone();
    let pool = pinned();
    set(c"capturing", 1); // which nobody announced
    let block = filled(&pool, 2 * MIB, 1);
    release(&pool, block);
    assert_eq!(cuda_settle(), 0);
    assert_eq!(cuda_waiting().blocks, 1);
    let said = fake::driver().last_failure().expect("a call failed");
    assert!(said.contains("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)") && said.contains("capturing()"), "{said}");
    set(c"capturing", 0);
    assert!(cuda_settle() >= 2 * MIB);
    drop(pool);
    nothing_is_left();
}

#[test]
fn a_refused_registration_falls_back_to_the_drivers_own_memory() {
    let _turn = alone();
    let pool = pinned();
    let fallbacks = cuda_mapped().2;
    set(c"refuse_register", -1);
    let block = pool.allocate_zeroed(3 * MIB).expect("cuMemHostAlloc");
    assert_eq!((get(c"registrations"), get(c"allocations"), cuda_mapped().2), (0, 1, fallbacks + 1));
    assert_eq!(device().kind_of(block.addr().get()).expect("a context"), CudaKind::Host);
    set(c"refuse_alloc", -1);
    assert_eq!(pool.allocate(50 * MIB), None);
    assert_eq!((get(c"registrations"), get(c"allocations")), (0, 1), "nothing is lost");
    set(c"refuse_register", 0);
    set(c"refuse_alloc", 0);
    let other = pool.allocate(50 * MIB).expect("it goes on");
    release(&pool, block);
    release(&pool, other);
    drop(pool);
    nothing_is_left();
}

#[test]
fn what_waits_makes_room_when_the_source_refuses() {
    let _turn = alone();
    let pool = pinned();
    set(c"progress", 1);
    let block = filled(&pool, 8 * MIB, 1);
    for _ in 0..3 {
        copy(block, 8 * MIB);
    }
    release(&pool, block);
    set(c"refuse_register", -1);
    set(c"refuse_alloc", -1);
    assert_eq!(pool.allocate(8 * MIB), Some(block), "each query completes a copy");
    set(c"refuse_register", 0);
    set(c"refuse_alloc", 0);
    release(&pool, block);
    drop(pool);
    nothing_is_left();
}

#[test]
fn device_and_driver_say_what_they_are() {
    let _turn = alone();
    let device = device();
    assert_eq!((device.ordinal(), device.name().as_str(), device.numa_node()), (0, "Fake 0", None));
    assert_eq!((fake::driver().version(), fake::driver().devices()), ((12, 5), 1));
    let refused = CudaDevice::open(fake::driver(), 7).expect_err("there is one device");
    let said = refused.to_string();
    assert!(
        said.contains("no CUDA device 7; there are 1") && said.contains("CUDA_ERROR_INVALID_DEVICE (101)"),
        "{said}"
    );
    for (name, make) in [
        (c"register", (|device| CudaPinned::new(&device, CudaPinnedOptions::default()).map(|_| ())) as Make),
        (c"concurrent", |device| CudaManaged::new(&device).map(|_| ())),
    ] {
        set(name, 0);
        let said = make(device).expect_err("it has none").to_string();
        assert!(said.contains("CUDA_ERROR_NOT_SUPPORTED (801)") && said.contains("'Fake 0'"), "{said}");
        set(name, 1);
    }
    assert!(!managed_source().survives_fork());
}

type Make = fn(CudaDevice) -> Result<(), ctxalloc::Error>;

fn managed_source() -> CudaManaged {
    CudaManaged::new(&device()).expect("it has some")
}

/// Blocks made, copied from, resized and freed at random, while copies get done at random: `driver.c` ends the process
/// where bytes change under a running copy, or memory goes.
#[test]
#[allow(unsafe_code, reason = "blocks")]
fn random_programs_never_change_bytes_under_a_running_copy() {
    let _turn = alone();
    for seed in 1..=8_u64 {
        println!("seed {seed}");
        let mut state = seed;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let pool = pinned();
        let arenas = [pool.clone(), pool.arena(), pool.arena()];
        let mut live: Vec<(NonNull<u8>, usize, usize)> = Vec::new();
        for _ in 0..1500 {
            set(c"progress", random(3) as i64);
            match random(10) {
                0..4 => {
                    let (size, whose) = ([64, 700, 40_000, 300_000, MIB][random(5)] + random(60), random(3));
                    live.push((filled(&arenas[whose], size, random(256) as u8), size, whose));
                }
                4..6 if !live.is_empty() => {
                    let (block, size, _) = live[random(live.len())];
                    copy(block, size);
                }
                6 if !live.is_empty() => {
                    let at = random(live.len());
                    let (block, _, whose) = live[at];
                    let size = 64 + random(400_000);
                    // SAFETY: live, and only the new one is used from here on. It is written only while no copy reads
                    // it.
                    live[at] = (unsafe { arenas[whose].resize(block, size) }.expect("memory"), size, whose);
                }
                7..9 if !live.is_empty() => {
                    let (block, _, whose) = live.swap_remove(random(live.len()));
                    release(&arenas[whose], block);
                }
                _ => run(random(4) as i64),
            }
        }
        for (block, _, whose) in live {
            release(&arenas[whose], block);
        }
        drop((pool, arenas));
        nothing_is_left();
    }
}
