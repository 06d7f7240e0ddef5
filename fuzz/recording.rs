//! Any bytes as a recording: an error, or a recording whose events make sense, from which a plan is made or refused.
#![no_main]

use ctxalloc::recording::{Recording, What};
use ctxalloc::tune::{Plan, routes};
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

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
        if is_damage { file.extend(body) } else { file.extend(frame(body)) }
        rest = after;
    }
    file
}

fuzz_target!(|data: &[u8]| {
    let path = FOLDER.join("trace");
    fs::write(&path, file(data)).expect("a file");
    let Ok(recording) = Recording::open(&path) else { return };
    let (mut begun, mut ended, mut made, mut live) = (HashSet::new(), HashSet::new(), HashSet::new(), HashSet::new());
    let mut last = 0;
    for event in recording.events() {
        let event = event.expect("nobody changes it");
        assert!(event.at_ns >= last, "time goes forward");
        last = event.at_ns;
        if let What::Begin { name, handler, parent } = event.what {
            assert!(parent == 0 || begun.contains(&parent));
            assert!((name as usize) < recording.names().len() && (handler as usize) < recording.handlers().len());
            assert!(begun.insert(event.request), "once");
            continue;
        }
        assert!(begun.contains(&event.request));
        match event.what {
            What::Allocate { block, .. } => assert!(made.insert(block) && live.insert((block, event.request))),
            What::Resize { block, .. } => assert!(live.contains(&(block, event.request))),
            What::Free { block } => assert!(live.remove(&(block, event.request))),
            What::Refused { by, .. } => assert!(by == 0 || begun.contains(&by)),
            What::End { .. } => assert!(ended.insert(event.request)),
            _ => {}
        }
    }
    routes(&recording).expect("nobody changes it");
    for on_one_thread in [false, true] {
        if let Ok(plan) = Plan::new(&recording, None, on_one_thread) {
            assert!(plan.facts().threads_at_once <= plan.facts().threads);
        }
    }
});
