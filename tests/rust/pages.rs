//! Pools over special pages, asked of the kernel: are they huge, are they locked, on which node do they lie? And blocks
//! in files of memory, mapped by another process. Cases that need a process of their own are this test binary once
//! more, running one ignored test; what the machine does not offer is skipped with the reason.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "blocks are touched; kernels are asked")]

#[path = "support/child.rs"]
mod child;

#[path = "support/errors.rs"]
mod errors;

use child::{fate_in, fate_of};
use ctxalloc::Error;
use ctxalloc::source::{HugePages, LockedPages, NumaPages, NumaPolicy, Pages, pages};
use ctxalloc::strategy::{Aligned, Arena, Pool, PoolOptions, SharedMemory, Strategy, System, conformance};
use errors::error;
use std::fs;
use std::os::fd::RawFd;
use std::ptr::NonNull;

const MIB: usize = 1 << 20;

fn pool<P: Pages>(source: P) -> Pool<P> {
    Pool::over(source, PoolOptions::default())
}

/// A block with every byte written.
fn touched(strategy: &impl Strategy, size_bytes: usize) -> NonNull<u8> {
    let block = strategy.allocate(size_bytes).expect("memory");
    // SAFETY: a new block of that size.
    unsafe { block.write_bytes(1, size_bytes) };
    block
}

fn release(strategy: &impl Strategy, block: NonNull<u8>) {
    // SAFETY: the tests release each live block once.
    unsafe { strategy.release(block) }
}

/// A number of kB after a name, in bytes.
fn kb(line: &str, name: &str) -> Option<usize> {
    let number: usize = line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(number << 10)
}

/// How many bytes of huge pages lie behind the mappings that overlap a block (/proc/self/smaps).
fn huge_bytes(block: NonNull<u8>, size_bytes: usize) -> usize {
    let (start, end) = (block.addr().get(), block.addr().get() + size_bytes);
    let smaps = fs::read_to_string("/proc/self/smaps").expect("readable");
    let mut inside = false;
    let mut bytes = 0;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((from, to)) = range
            && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            inside = from < end && to > start;
        } else if inside {
            bytes += kb(line, "AnonHugePages:").unwrap_or(0);
        }
    }
    bytes
}

/// Whether the kernel was asked for huge pages in the middle of a block: `hg` in VmFlags of /proc/self/smaps.
fn is_hinted(block: NonNull<u8>, size_bytes: usize) -> bool {
    let middle = block.addr().get() + size_bytes / 2;
    let smaps = fs::read_to_string("/proc/self/smaps").expect("readable");
    let mut inside = false;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((from, to)) = range
            && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            inside = (from..to).contains(&middle);
        } else if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
            return flags.split_whitespace().any(|flag| flag == "hg");
        }
    }
    false
}

/// What transparent huge pages are set to: `always`, `madvise` or `never`.
fn transparent_huge_pages() -> String {
    let modes = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    modes.split(['[', ']']).nth(1).unwrap_or("never").to_owned()
}

#[test]
fn pools_of_huge_pages_keep_the_strategy_contract() {
    conformance::check(pool(HugePages::transparent()));
}

#[test]
fn large_blocks_lie_on_huge_pages_and_small_ones_do_not() {
    let mode = transparent_huge_pages();
    if mode == "never" {
        eprintln!("skipped: /sys/kernel/mm/transparent_hugepage/enabled says never");
        return;
    }
    let pool = pool(HugePages::transparent());
    for size_bytes in [2 * MIB, 4 * MIB, 33 * MIB] {
        let block = touched(&pool, size_bytes);
        assert!(block.addr().get().is_multiple_of(2 * MIB));
        let huge = huge_bytes(block, size_bytes);
        assert!(huge >= size_bytes / (2 * MIB) * (2 * MIB), "{huge} bytes of {size_bytes} are huge");
        release(&pool, block);
    }
    for size_bytes in [100, 100_000, MIB] {
        let blocks: Vec<_> = (0..5 * MIB / size_bytes).map(|_| touched(&pool, size_bytes)).collect();
        let huge: usize =
            blocks.iter().step_by(1 + blocks.len() / 10).map(|&block| huge_bytes(block, size_bytes)).sum();
        assert!(huge == 0 || mode == "always", "{huge} bytes are huge for blocks of {size_bytes}");
        blocks.into_iter().for_each(|block| release(&pool, block));
    }
}

/// As NumPy's default handler does; blocks of 40 MiB have a mapping of their own in glibc.
#[test]
fn the_c_heap_is_asked_for_huge_pages_behind_large_blocks() {
    if fs::metadata("/sys/kernel/mm/transparent_hugepage").is_err() {
        eprintln!("skipped: the kernel has no transparent huge pages");
        return;
    }
    for size_bytes in [4 * MIB, 5 * MIB + 100, 40 * MIB] {
        for make in [System::allocate, System::allocate_zeroed] {
            let block = make(&System, size_bytes).expect("memory");
            assert!(is_hinted(block, size_bytes), "{size_bytes} bytes");
            release(&System, block);
        }
    }
    let small = System.allocate(4 * MIB - 4096).expect("memory");
    // SAFETY: a live block of this strategy, whose address is not used again.
    let grown = unsafe { System.resize(small, 40 * MIB) }.expect("memory");
    assert!(!is_hinted(grown, 40 * MIB), "one that grows is not");
    release(&System, grown);
    let other = Aligned::new(64).expect("an alignment");
    let block = other.allocate(40 * MIB).expect("memory");
    assert!(!is_hinted(block, 40 * MIB), "nor is another strategy's");
    release(&other, block);
}

#[test]
fn reserved_huge_pages_are_there_or_refused_with_their_number() {
    let number = |path| fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let free_pages: usize = number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free_pages < 32 {
        eprintln!("skipped: blocks on reserved huge pages; {free_pages} are free, 32 are needed");
    }
    match HugePages::reserved() {
        Ok(source) if free_pages >= 32 => {
            let pool = pool(source);
            conformance::check(pool.clone());
            pool.trim();
            let block = touched(&pool, 3 * MIB);
            assert_eq!(number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"), free_pages - 2);
            assert!(pool.allocate(2 * MIB * free_pages).is_none(), "more than there is");
            release(&pool, block);
            pool.trim();
            assert_eq!(number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"), free_pages);
        }
        Ok(_) => {}
        Err(refused) => {
            let expected =
                error!(NoHugePages { reserved_pages: number("/proc/sys/vm/nr_hugepages"), free_pages: free_pages });
            assert_eq!(format!("{refused:?}"), expected);
            assert!(refused.to_string().contains("sysctl vm.nr_hugepages=512"), "{refused}");
        }
    }
}

/// The node behind each page of a block, as move_pages(2) tells where it moves nothing.
fn nodes_of(block: NonNull<u8>, size_bytes: usize) -> Vec<i32> {
    let pages: Vec<_> = (0..size_bytes).step_by(4096).map(|offset| block.as_ptr().wrapping_add(offset)).collect();
    let mut nodes = vec![-1; pages.len()];
    let nowhere = std::ptr::null::<i32>();
    // SAFETY: as many addresses as places for answers; without a list of nodes nothing moves.
    let failed =
        unsafe { libc::syscall(libc::SYS_move_pages, 0, pages.len(), pages.as_ptr(), nowhere, nodes.as_mut_ptr(), 0) };
    assert_eq!(failed, 0, "move_pages: {}", std::io::Error::last_os_error());
    nodes
}

/// The policy of the mapping behind an address: MPOL_PREFERRED 1, MPOL_BIND 2, MPOL_INTERLEAVE 3.
fn policy_at(block: NonNull<u8>) -> (i32, u64) {
    const MPOL_F_ADDR: usize = 2;
    let (mut mode, mut mask) = (-1, [0_u64; 16]);
    let (to_mode, to_mask) = (&raw mut mode, mask.as_mut_ptr());
    // SAFETY: places for the mode and for 1024 nodes.
    let failed = unsafe { libc::syscall(libc::SYS_get_mempolicy, to_mode, to_mask, 1024, block.as_ptr(), MPOL_F_ADDR) };
    assert_eq!(failed, 0, "get_mempolicy: {}", std::io::Error::last_os_error());
    (mode, mask[0])
}

#[test]
fn pages_lie_on_the_node_that_was_asked_for() {
    for (nodes, policy, mode) in [
        (&[0][..], NumaPolicy::Bind, 2),
        (&[0], NumaPolicy::Preferred, 1),
        (&[0], NumaPolicy::Interleave, 3),
        (&[], NumaPolicy::Interleave, 3),
    ] {
        let source = match NumaPages::new(nodes, policy) {
            Err(Error::SystemRefused { call: "mbind", reason, .. }) => {
                eprintln!("skipped: mbind is refused: {reason}");
                return;
            }
            made => made.expect("node 0 is there"),
        };
        assert_eq!((source.nodes().next(), source.policy()), (Some(0), policy));
        let pool = pool(source);
        for size_bytes in [100, 100_000, 5 * MIB] {
            let block = touched(&pool, size_bytes);
            let (mode_found, mask) = policy_at(block);
            assert_eq!((mode_found, mask & 1), (mode, 1), "{source:?}");
            let found = nodes_of(block, size_bytes);
            assert!(found.iter().all(|&node| source.nodes().any(|asked| asked as i32 == node)), "{found:?}");
            release(&pool, block);
        }
        conformance::check(pool);
    }
}

/// How many bytes this process has locked.
fn locked_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").expect("readable");
    status.lines().find_map(|line| kb(line, "VmLck:")).expect("a line VmLck")
}

/// Whether this process may lock that much.
fn may_lock(bytes: usize) -> bool {
    pool(LockedPages::untried()).allocate(bytes).is_some()
}

#[test]
fn what_is_handed_out_is_locked_and_no_more() {
    fate_of("child_that_locks").ended_well();
}

#[test]
#[ignore = "a child of what_is_handed_out_is_locked_and_no_more: VmLck is the process's"]
fn child_that_locks() {
    if !may_lock(64 * MIB) {
        eprintln!("skipped: this process may not lock 64 MiB (RLIMIT_MEMLOCK)");
        return;
    }
    let pool = pool(LockedPages::new().expect("64 MiB could be locked"));
    let before = locked_bytes();
    let small = touched(&pool, 100);
    let span = locked_bytes() - before;
    assert!((64 << 10..=256 << 10).contains(&span), "{span} bytes are locked for a block of 100");
    let large = touched(&pool, 5 * MIB);
    let block = locked_bytes() - before - span;
    assert!((5 * MIB..6 * MIB).contains(&block), "{block} bytes are locked for a block of 5 MiB");
    release(&pool, small);
    release(&pool, large);
    assert_eq!(locked_bytes(), before + span + block, "what is kept for the next one stays locked");
    pool.trim();
    assert_eq!(locked_bytes(), before);

    let arena = Arena::over(&pool);
    let blocks: Vec<_> = (0..100).map(|_| touched(&arena, 10_000)).collect();
    assert!(locked_bytes() >= before + MIB - 50_000);
    blocks.into_iter().for_each(|block| release(&arena, block));
    drop(arena);
    pool.trim();
    assert_eq!(locked_bytes(), before);
    conformance::check(pool);
}

#[test]
fn a_limit_without_room_is_told_at_construction_and_later_a_failure() {
    fate_of("child_that_may_lock_little").ended_well();
}

#[test]
#[ignore = "a child of a_limit_without_room_is_told_at_construction_and_later_a_failure"]
fn child_that_may_lock_little() {
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a limit of this process.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    };
    limit(512 << 10);
    // SAFETY: root may lock what it likes; nobody may not. Where we are somebody already, this fails and is not needed.
    unsafe { libc::setuid(65534) };
    let pool = pool(LockedPages::new().expect("one span fits"));
    assert_eq!(LockedPages::limit_bytes(), Some(512 << 10));
    let small = touched(&pool, 100);
    assert!(pool.allocate(MIB).is_none(), "a large block that does not fit");
    let warm = touched(&pool, 300_000);
    release(&pool, warm); // kept, locked: it has to go when there is no room for the spans below
    let spans: Vec<_> = std::iter::from_fn(|| pool.allocate(30_000)).take(1000).collect();
    assert!((8..20).contains(&spans.len()), "{} blocks of 30000 bytes in 512 KiB", spans.len());
    spans.into_iter().for_each(|block| release(&pool, block));
    release(&pool, small);
    pool.trim();
    assert_eq!(locked_bytes(), 0);
    touched(&pool, 100_000);

    limit(0);
    let refused = LockedPages::new().expect_err("nothing may be locked");
    let Error::LockLimit { requested_bytes: 65536, limit_bytes: 0, locked_bytes, .. } = refused else {
        panic!("{refused:?}")
    };
    assert!(locked_bytes > 0);
    assert!(refused.to_string().contains("RLIMIT_MEMLOCK is 0 bytes"), "{refused}");
}

/// Maps the first bytes of a file of memory.
fn mapped(descriptor: RawFd, size_bytes: usize) -> *mut u8 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the system likes.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), size_bytes, protection, libc::MAP_SHARED, descriptor, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    start.cast()
}

fn byte(block: NonNull<u8>, at: usize) -> u8 {
    // SAFETY: the tests pass an offset inside the live block. Another process may write there, hence volatile.
    unsafe { block.add(at).read_volatile() }
}

fn write(block: NonNull<u8>, at: usize, value: u8) {
    // SAFETY: the tests pass an offset inside the live block.
    unsafe { block.add(at).write_volatile(value) };
}

#[test]
fn another_process_maps_a_block_and_both_see_what_the_other_writes() {
    let block = touched(&SharedMemory, 10_000);
    // The address of a view, somewhere inside.
    let found = SharedMemory::locate(block.addr().get() + 5000).expect("inside of a live block");
    assert_eq!(found.offset_bytes, 5000);
    let environment = [
        ("CTXALLOC_FILE", format!("/proc/{}/fd/{}", std::process::id(), found.descriptor)),
        ("CTXALLOC_OFFSET", found.offset_bytes.to_string()),
        ("CTXALLOC_SIZE", found.size_bytes.to_string()),
    ];
    fate_in("child_that_maps_a_block", &environment).ended_well();
    assert_eq!([byte(block, 4999), byte(block, 5000), byte(block, 5001)], [1, 77, 1]);
    release(&SharedMemory, block);
}

#[test]
#[ignore = "a child of another_process_maps_a_block_and_both_see_what_the_other_writes"]
fn child_that_maps_a_block() {
    use std::os::fd::AsRawFd;
    let said = |name| std::env::var(name).expect("given by the parent");
    let file = fs::File::options().read(true).write(true).open(said("CTXALLOC_FILE")).expect("a file of memory");
    let size_bytes: usize = said("CTXALLOC_SIZE").parse().expect("a number");
    let offset_bytes: usize = said("CTXALLOC_OFFSET").parse().expect("a number");
    let start = mapped(file.as_raw_fd(), size_bytes);
    // SAFETY: mapped with that size.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, size_bytes) };
    assert!(bytes.iter().all(|&byte| byte == 1));
    bytes[offset_bytes] = 77;
}

#[test]
fn after_fork_both_see_one_memory_and_each_gives_up_its_own_mapping() {
    fate_of("child_that_forks_with_shared_blocks").ended_well();
}

#[test]
#[ignore = "a child of after_fork_both_see_one_memory_and_each_gives_up_its_own_mapping"]
fn child_that_forks_with_shared_blocks() {
    let block = touched(&SharedMemory, 10_000);
    let descriptor = |block: NonNull<u8>| SharedMemory::locate(block.addr().get()).expect("live").descriptor;
    let file = descriptor(block);
    let length = || {
        // SAFETY: an all-zero stat is a place for one.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a live descriptor, and a place for the answer.
        assert_eq!(unsafe { libc::fstat(file, &raw mut stat) }, 0);
        stat.st_size
    };
    assert_eq!(length(), 12288);
    // SAFETY: the child calls nothing but the strategy and `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        write(block, 0, 50);
        // SAFETY: live in the child too. Grown elsewhere: the parent may grow the same file.
        let grown = unsafe { SharedMemory.resize(block, 100_000) }.expect("memory");
        let moved = descriptor(grown) != file && byte(grown, 0) == 50 && byte(grown, 9999) == 1;
        write(grown, 1, 51);
        release(&SharedMemory, grown);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!moved)) };
    }
    let mut status = -1;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!([byte(block, 0), byte(block, 1), byte(block, 9999)], [50, 1, 1], "the child wrote one of them");
    assert_eq!((descriptor(block), length()), (file, 12288));
    release(&SharedMemory, block);
}

#[test]
fn without_descriptors_allocations_fail_and_nothing_is_lost() {
    fate_of("child_with_few_descriptors").ended_well();
}

#[test]
#[ignore = "a child of without_descriptors_allocations_fail_and_nothing_is_lost"]
fn child_with_few_descriptors() {
    let open = || fs::read_dir("/proc/self/fd").expect("a folder").count();
    let mappings = || fs::read_to_string("/proc/self/maps").expect("readable").matches("memfd:ctxalloc").count();
    let before = open();
    let limit = libc::rlimit { rlim_cur: 40, rlim_max: 40 };
    // SAFETY: a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    for _ in 0..3 {
        let mut blocks: Vec<_> = std::iter::from_fn(|| SharedMemory.allocate(1000)).take(100).collect();
        assert!((10..40).contains(&blocks.len()), "{} blocks with 40 descriptors", blocks.len());
        let last = blocks.pop().expect("some");
        // SAFETY: live. Growing needs no descriptor, and what is too much leaves the block alone.
        let last = unsafe { SharedMemory.resize(last, MIB) }.expect("memory");
        // SAFETY: live; a failure leaves it alone.
        assert!(unsafe { SharedMemory.resize(last, 1 << 60) }.is_none());
        assert!(SharedMemory::locate(last.addr().get()).is_some());
        release(&SharedMemory, last);
        blocks.into_iter().for_each(|block| release(&SharedMemory, block));
        assert!(SharedMemory.allocate(1 << 60).is_none());
        assert_eq!((open(), mappings()), (before, 0));
    }
}

#[test]
fn pages_are_mapped_whole_and_what_cannot_be_is_an_error() {
    let page = pages::page_bytes();
    for align in [0, 1, page / 2, page + 1, 3 * page] {
        assert!(matches!(pages::map(page, align), Err(Error::BadAlignment { .. })), "{align}");
    }
    assert!(matches!(pages::map(0, page), Err(Error::BadOption { option: "size_bytes", .. })));
    for impossible in [usize::MAX, usize::MAX - page + 1, usize::MAX / 2] {
        assert!(matches!(pages::map(impossible, page), Err(Error::OutOfMemory { .. })), "{impossible}");
    }
    for (size_bytes, align) in [(1, page), (page + 1, 4 * page), (page, 1 << 22)] {
        let start = pages::map(size_bytes, align).expect("a few pages");
        assert_eq!(start.addr().get() % align, 0);
        let whole_bytes = size_bytes.next_multiple_of(page);
        // SAFETY: so many bytes are mapped there, zero, and nobody else has them.
        unsafe {
            assert!(std::slice::from_raw_parts(start.as_ptr(), whole_bytes).iter().all(|&byte| byte == 0));
            pages::unmap(start, whole_bytes);
        }
    }
}
