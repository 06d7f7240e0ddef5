//! Any bytes as a recording: an error, or a recording whose events make sense, of which `trace info` counts the same and
//! exports tell each, and from which a plan is made or refused; all of it within the memory that docs/tune.md states.
#![no_main]

use ctxalloc::recording::{Recording, What};
use ctxalloc::tune::{Plan, Told, routes, told};
use libfuzzer_sys::fuzz_target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let above = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let folder = above.join(format!("ctxalloc-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    folder
});

fn frame(body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_le_bytes();
    let checksum = crc32fast::hash(&[b"ctxalloc", length.as_slice()].concat()).to_le_bytes();
    [&length, &checksum, &crc32fast::hash(body).to_le_bytes(), body].concat()
}

/// The first byte says what the others are: a file, or bodies, each behind its length, whose checksums are made right.
/// A length of 255 is damage: the bytes that follow it, without a head.
fn file(data: &[u8]) -> Vec<u8> {
    let Some((&kind, mut rest)) = data.split_first() else { return Vec::new() };
    if kind & 1 == 0 {
        return rest.to_vec();
    }
    let mut file = b"\x89CTXREC\x01".to_vec();
    while let Some((&length, after)) = rest.split_first() {
        let is_damage = length == 255;
        let (body, after) = after.split_at(usize::from(if is_damage { 5 } else { length }).min(after.len()));
        if is_damage {
            file.extend(body)
        } else {
            file.extend(frame(body))
        }
        rest = after;
    }
    file
}

/// Counts what is alive, and the most of it since it was asked last.
struct Counted;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: all is the system's; what is counted beside it changes no block.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller's duties are those of this trait, which are the system's too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above: the block is the system's, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// What `work` took of memory at most, beside what was there.
fn peak_of<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let done = work();
    (done, PEAK.load(Relaxed) - before)
}

const MIB: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let path = FOLDER.join("trace");
    let file = file(data);
    let length = file.len();
    fs::write(&path, file).expect("a file");
    let (opened, taken) = peak_of(|| Recording::open(&path));
    assert!(taken <= length + 4 * MIB, "the reader took {taken}");
    let Ok(recording) = opened else { return };
    let recording = Arc::new(recording);
    let (mut begun, mut ended, mut made, mut live) = (HashSet::new(), HashSet::new(), HashSet::new(), HashSet::new());
    let (mut last, mut events, mut expected) = (0, 0, Told::default());
    for event in recording.events() {
        let event = event.expect("nobody changes it");
        assert!(event.at_ns >= last, "time goes forward");
        last = event.at_ns;
        events += 1;
        if let What::Begin { name, handler, parent } = event.what {
            assert!(parent == 0 || begun.contains(&parent));
            assert!((name as usize) < recording.names().len() && (handler as usize) < recording.handlers().len());
            assert!(begun.insert(event.request), "once");
            expected.requests += 1;
            continue;
        }
        assert!(begun.contains(&event.request));
        match event.what {
            What::Allocate { block, .. } => {
                assert!(made.insert(block) && live.insert((block, event.request)));
                expected.blocks += 1;
            }
            What::Resize { block, .. } => {
                assert!(live.contains(&(block, event.request)));
                expected.resizes += 1;
            }
            What::Free { block } => {
                assert!(live.remove(&(block, event.request)));
                expected.freed += 1;
            }
            What::Refused { by, .. } => {
                assert!(by == 0 || begun.contains(&by));
                expected.refused += 1;
            }
            What::End { sums, .. } => {
                assert!(ended.insert(event.request));
                expected.ended += 1;
                expected.with_others += u64::from(sums.includes_others);
            }
            _ => {}
        }
    }
    let (mut lines, mut profile, mut refused) = ([0; 2], 0, Vec::new());
    let count = |part: &[u8]| part.iter().filter(|&&byte| byte == b'\n').count() as u64;
    let (said, taken) = peak_of(|| {
        told(&recording, |what, part| match (what, part) {
            ("rmm.csv", Ok(part)) => lines[0] += count(part),
            ("perfetto", Ok(part)) => lines[1] += count(part),
            (_, Ok(part)) => profile += part.len(),
            (what, Err(_)) => refused.push(what),
        })
    });
    assert!(taken <= length + 9 * MIB, "`trace` took {taken}");
    if let Ok(said) = said {
        assert_eq!(Told { escaped: 0, ..said }, expected);
        let of_blocks = expected.blocks + expected.freed + 2 * expected.resizes;
        assert!(refused.contains(&"rmm.csv") || lines[0] == of_blocks + 1, "{lines:?}, {expected:?}");
        assert!(refused.contains(&"perfetto") || lines[1] == events.max(1) + 2, "{lines:?}, {events} events");
        assert!(refused.contains(&"pprof") || profile > 0);
    }
    let (found, taken) = peak_of(|| routes(&recording).expect("nobody changes it"));
    assert!(taken <= 32 * length + 4 * MIB, "a summary took {taken} for {length} bytes");
    assert!(found.iter().all(|route| route.peak_bytes.len() as u64 <= route.requests));
    drop(found);
    for on_one_thread in [false, true] {
        let (plan, taken) = peak_of(|| Plan::new(&recording, None, on_one_thread));
        assert!(taken <= 32 * length + 4 * MIB, "a plan took {taken} for {length} bytes");
        if let Ok(plan) = plan {
            assert!(plan.facts().threads_at_once <= plan.facts().threads);
        }
    }
});
