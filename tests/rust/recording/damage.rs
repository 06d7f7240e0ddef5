//! What the reader makes of files that are damaged, foreign and hostile: all that is sound, each gap with its place, in
//! bounded time and memory.
#![allow(unsafe_code, reason = "an allocator that counts")]

use super::{Folder, Random, added, all_of, everything, in_turn, random_program, times};
use ctxalloc::recording::{Recording, What, record};
use ctxalloc::tune::{Choice, Plan, replay};
use ctxalloc::{Buffer, Error, request};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Counts what the process has, and had at most.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: all is passed on to `System`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    // In place where `System` can: what grows is not there twice.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() {
            let more = size - layout.size();
            PEAK.fetch_max(LIVE.fetch_add(more, Relaxed) + more, Relaxed);
        } else {
            LIVE.fetch_sub(layout.size() - size, Relaxed);
        }
        // SAFETY: the caller's promises are those of `System`, which made the block.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are those of `System`, which made the block.
        unsafe { System.dealloc(block, layout) }
    }
}

/// What a reading took of memory at its peak, beside what there was before it.
pub(super) fn peak_of<R>(read: impl FnOnce() -> R) -> (R, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let done = read();
    (done, PEAK.load(Relaxed) - before)
}

/// What this thread took of a processor: what others do on this machine is not in it.
pub(super) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("less than a second"))
}

pub(super) const MAGIC_BYTES: usize = 8;

/// The frames of a sound file.
pub(super) fn frames(file: &[u8]) -> Vec<Vec<u8>> {
    let (mut at, mut found) = (MAGIC_BYTES, Vec::new());
    while at < file.len() {
        let length = 12 + u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        found.push(file[at..at + length].to_vec());
        at += length;
    }
    found
}

pub(super) fn file(frames: &[Vec<u8>]) -> Vec<u8> {
    [b"\x89CTXREC\x01", frames.concat().as_slice()].concat()
}

pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_le_bytes();
    let checksum = crc32fast::hash(&[b"ctxalloc", length.as_slice()].concat()).to_le_bytes();
    [&length, &checksum, &crc32fast::hash(body).to_le_bytes(), body].concat()
}

/// A file with many frames, and its folder.
fn recorded(name: &str) -> (Folder, Vec<u8>) {
    let folder = Folder::new(name);
    let recorder = record(folder.file(), everything()).unwrap();
    for seed in 0..3 {
        random_program(seed);
        std::thread::sleep(Duration::from_millis(90)); // until what waits is written
    }
    recorder.stop().unwrap();
    let bytes = fs::read(folder.file()).unwrap();
    (folder, bytes)
}

pub(super) fn written(folder: &Folder, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.0.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Where the gaps of a file are, and how long.
fn gaps(recording: &Recording) -> Vec<(u64, u64)> {
    recording.gaps().iter().map(|gap| (gap.offset, gap.bytes)).collect()
}

fn is_process(frame: &[u8]) -> bool {
    frame[12] == 0
}

/// Frames of a recording with damage between and within them. What is left of the sound ones is what must be read.
#[test]
fn what_is_sound_is_read_and_what_is_not_is_told() {
    let _turn = in_turn();
    let (folder, good) = recorded("sound");
    let sound = frames(&good);
    assert!(sound.len() > 12, "{} frames", sound.len());
    Plan::new(&Recording::open(folder.file()).unwrap(), None, true).unwrap();
    for seed in 0..100 * times() as u64 {
        let mut random = Random::new(seed);
        let (mut bytes, mut kept, mut expected) = (file(&[]), Vec::new(), Vec::<(u64, u64)>::new());
        let damages = 1 + random.below(4);
        for (at, whole) in sound.iter().enumerate() {
            let mut bad = Vec::new();
            if !is_process(whole) && random.below(sound.len()) < damages {
                match random.below(7) {
                    0 => bad.extend((0..1 + random.below(300)).map(|_| random.below(256) as u8)),
                    1 => bad.resize(1 + random.below(5000), 0), // as file systems do
                    2 => bad.extend(&whole[..1 + random.below(whole.len() - 1)]), // half of it, and then all of it
                    3 => {
                        bad.extend(whole);
                        bad[random.below(12)] ^= 1 << random.below(8); // its length, or a checksum
                    }
                    4 => {
                        bad.extend(whole);
                        let from = 12 + random.below(whole.len() - 12);
                        bad[from..].iter_mut().for_each(|byte| *byte ^= 0x55);
                    }
                    5 => {
                        bad.extend(&whole[..12 + random.below(whole.len() - 12)]);
                        bad.resize(bad.len() + random.below(600), 0); // half of it, and then zeros
                    }
                    _ => bad.extend(frame(&[1, 0x1f, 1])), // no event, and its checksum is right
                }
            }
            let is_lost = !bad.is_empty() && random.below(2) == 0;
            if !bad.is_empty() {
                // A gap ends where the next frame begins; what is right in a frame's head is not told.
                let offset = bytes.len() as u64;
                match expected.last_mut() {
                    Some((before, length)) if *before + *length == offset => *length += bad.len() as u64,
                    _ => expected.push((offset, bad.len() as u64)),
                }
                bytes.extend(bad);
            }
            if !is_lost || at + 1 == sound.len() {
                bytes.extend(whole);
                kept.push(whole.clone());
            }
        }
        let read = Recording::open(written(&folder, "damaged", &bytes)).unwrap();
        let model = Recording::open(written(&folder, "model", &file(&kept))).unwrap();
        let total = |gaps: &[(u64, u64)]| gaps.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let found = gaps(&read);
        // Of a frame whose body is no events only the body is one.
        let heads: u64 = 12 * read.gaps().iter().filter(|gap| gap.reason.contains("no event")).count() as u64;
        assert_eq!(total(&found) + heads, total(&expected), "seed {seed}: {found:?}, {expected:?}");
        assert_eq!(read.names(), model.names(), "seed {seed}");
        assert!(all_of(&read).eq(all_of(&model)), "seed {seed}");
        assert_eq!((read.skipped(), read.is_cut_off()), (model.skipped(), model.is_cut_off()), "seed {seed}");
        added(&read);
        // What is left can be replayed: what lacks events is not held to what its account said.
        let plan = Plan::new(&read, None, true).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        if seed % 20 == 0 {
            replay(&plan, &Choice::named("pool").unwrap()).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
}

#[test]
fn only_requests_that_were_open_at_a_gap_are_torn() {
    let _turn = in_turn();
    let folder = Folder::new("torn");
    let recorder = record(folder.file(), everything()).unwrap();
    let long = request().root().name("long").begin().unwrap();
    for turn in 0..3 {
        let short = request().root().name(format!("short {turn}")).begin().unwrap();
        drop(Buffer::zeroed_in(short.handler(), 100).unwrap());
        drop(Buffer::zeroed_in(long.handler(), 1000 + turn).unwrap());
        short.end();
        drop(Buffer::zeroed_in(long.handler(), 100).unwrap());
        std::thread::sleep(Duration::from_millis(150));
    }
    long.end();
    recorder.stop().unwrap();
    let good = fs::read(folder.file()).unwrap();
    let all = frames(&good);
    // The frame of the long one that is in the middle.
    let of_events: Vec<usize> = (0..all.len()).filter(|&at| all[at][12] == 1).collect();
    let torn_without = |at: usize| {
        let mut without = all.clone();
        *without[at].last_mut().unwrap() ^= 1;
        let path = written(&folder, &format!("without-{at}"), &file(&without));
        let read = Recording::open(path).unwrap();
        let torn = all_of(&read).filter_map(|event| match event.what {
            What::Begin { name, .. } if read.is_torn(event.request) => Some(read.names()[name as usize].clone()),
            _ => None,
        });
        (torn.collect::<Vec<_>>(), read)
    };
    let found: Vec<_> = of_events.iter().map(|&at| torn_without(at)).collect();
    assert!(found.iter().any(|(torn, _)| torn == &["long"]), "{of_events:?}");
    for (torn, read) in &found {
        assert!(torn.is_empty() || torn == &["long"], "{torn:?}");
        assert_eq!(read.gaps().len(), 1);
        let facts = Plan::new(read, None, false).unwrap().facts();
        assert_eq!(facts.torn, torn.len() as u64);
        let done = replay(&Plan::new(read, None, false).unwrap(), &Choice::named("pool").unwrap()).unwrap();
        let ended = all_of(read).filter(|event| matches!(event.what, What::End { .. })).count();
        assert_eq!(done.compared, (ended - torn.len()) as u64);
    }
}

/// Its frames are another process's than those before: the numbers of requests begin anew.
#[test]
fn a_process_whose_first_words_are_lost_is_another_one() {
    let _turn = in_turn();
    let (folder, good) = recorded("another");
    let all = frames(&good);
    let mut lost = all.clone();
    lost[0][20] ^= 1;
    let read = Recording::open(written(&folder, "alone", &file(&lost))).unwrap();
    let whole = Recording::open(folder.file()).unwrap();
    assert_eq!(all_of(&read).count(), all_of(&whole).count());
    assert_eq!((read.header().processes, read.header().version.as_str()), (1, ""));
    assert_eq!(gaps(&read), [(8, all[0].len() as u64)]);
    // A frame that is there twice is no process.
    let events = all.iter().position(|frame| frame[12] == 1).unwrap();
    let twice = [&all[..events], &[vec![9; 30], all[events].clone()], &all[events..]].concat();
    let read = Recording::open(written(&folder, "twice", &file(&twice))).unwrap();
    assert_eq!((read.header().processes, all_of(&read).count()), (1, all_of(&whole).count()));
    // Behind a process that was killed, and behind one that ended.
    // Request 1, and its end.
    let one = |at_ns: u8| frame(&[1, 0x10, at_ns, 2, 0, 0, 0, 0x05, 9, at_ns, at_ns, 0, 0, 0]);
    for is_closed in [false, true] {
        let end = if is_closed { vec![frame(&[5])] } else { Vec::new() };
        let both = [vec![process(1), one(7)], end, vec![vec![9; 30], one(3)]].concat();
        let read = Recording::open(written(&folder, "both", &file(&both))).unwrap();
        assert_eq!((read.header().processes, read.header().one_in), (2, 1));
        let said = all_of(&read).filter_map(|event| match event.what {
            What::End { sums, .. } => Some((event.request, sums.peak_bytes)),
            _ => None,
        });
        assert_eq!(said.collect::<Vec<_>>(), [(2, 3), (1, 7)]);
    }
}

#[test]
fn a_recording_goes_on_behind_damage() {
    let _turn = in_turn();
    let (folder, good) = recorded("goes-on");
    let all = frames(&good);
    let path = folder.file();
    let half = &all[1][..all[1].len() - 1];
    for (end, gap_count, processes) in [
        (vec![0; 5000], 0, 2),                           // room that was never written to
        (half[..7].to_vec(), 0, 2),                      // a process that was killed
        ([half, &[0; 9]].concat(), 1, 2),                // both
        ([&half[..7], &[0; 500]].concat(), 1, 2),        // and within the head
        ([&[7; 100], all[1].as_slice()].concat(), 1, 3), // whole frames behind damage: whose?
    ] {
        fs::write(&path, [good.as_slice(), &end].concat()).unwrap();
        let before = all_of(&Recording::open(&path).unwrap()).count();
        let recorder = record(&path, everything()).unwrap();
        request().root().name("behind").begin().unwrap().end();
        recorder.stop().unwrap();
        let read = Recording::open(&path).unwrap();
        assert_eq!(all_of(&read).count(), before + 2, "{} bytes", end.len());
        assert_eq!((read.header().processes, read.gaps().len()), (processes, gap_count));
        assert!(read.gaps().iter().all(|gap| gap.offset == good.len() as u64));
    }
}

#[test]
fn what_cannot_be_a_recording_is_an_error_that_says_where() {
    let _turn = in_turn();
    let (folder, good) = recorded("cannot");
    let error = |bytes: &[u8]| match Recording::open(written(&folder, "bad", bytes)).unwrap_err() {
        Error::BadRecording { offset, reason, .. } => (offset, reason),
        error => panic!("{error}"),
    };
    assert_eq!(error(b"something else"), (0, "this is no recording"));
    let mut other = good.clone();
    other[7] = 9;
    assert_eq!(error(&other), (7, "another version of ctxalloc wrote it; read it with that one"));
    assert_eq!(error(&[&good[..8], &[1; 100]].concat()), (8, "no frame begins here"));
    assert_eq!(error(&file(&[frame(&[1, 0])])).1, "there is something before any process begins");
}

#[test]
fn a_foreign_file_beside_a_recording_is_passed_over_and_told() {
    let _turn = in_turn();
    let (folder, good) = recorded("foreign");
    let events = all_of(&Recording::open(folder.file()).unwrap()).count();
    fs::write(folder.0.join("trace.3"), "my own notes").unwrap();
    let mut older = good.clone();
    older[7] = 0;
    fs::write(folder.0.join("trace.4"), &older).unwrap();
    fs::create_dir(folder.0.join("trace.5")).unwrap();
    let read = Recording::open(folder.file()).unwrap();
    assert_eq!(all_of(&read).count(), events);
    assert_eq!(read.header().file_bytes, good.len() as u64);
    let told: Vec<_> = read.gaps().iter().map(|gap| (Path::new(&gap.file), gap.bytes, gap.reason.as_str())).collect();
    let [notes, older_told, folder_told] = told[..] else { panic!("{told:?}") };
    assert_eq!(notes, (folder.0.join("trace.3").as_path(), 12, "this is no recording"));
    assert_eq!(older_told.1, older.len() as u64);
    assert!(older_told.2.contains("another version"), "{}", older_told.2);
    assert_eq!((folder_told.1, folder_told.2), (0, "this is no plain file"));
    // Unless it is the one that is asked for, or there is nothing else.
    for name in ["trace.3", "trace.4"] {
        assert!(matches!(Recording::open(folder.0.join(name)), Err(Error::BadRecording { .. })), "{name}");
    }
    fs::remove_file(folder.file()).unwrap();
    assert!(matches!(Recording::open(folder.file()), Err(Error::BadRecording { offset: 0, .. })));
}

/// Bytes and frames that were flipped, cut out, doubled, mixed with others' and made up: an error that says where, or
/// a recording, in bounded memory.
#[test]
fn no_bytes_make_the_reader_fail() {
    let _turn = in_turn();
    let (folder, good) = recorded("mutated");
    let all = frames(&good);
    let path = folder.0.join("mutated");
    let (mut errors, mut read, mut with_gaps) = (0, 0, 0);
    for seed in 0..300 * times() as u64 {
        let mut random = Random::new(seed);
        let mut parts = all.clone();
        for _ in 0..random.below(4) {
            let (at, other) = (random.below(parts.len()), random.below(all.len()));
            match random.below(6) {
                0 => parts.insert(at, all[other].clone()),
                1 => drop(parts.remove(at)),
                2 => {
                    let last = parts.len() - 1;
                    parts.swap(at, other.min(last));
                }
                3 => {
                    let from = random.below(parts[at].len());
                    parts[at].truncate(from); // half of one and half of another
                    let second = all[other][random.below(all[other].len())..].to_vec();
                    parts[at].extend(second);
                }
                4 => {
                    // What the frame says is made up, and its checksums are right.
                    let mut body = all[other][12..].to_vec();
                    let byte = random.below(body.len());
                    body[byte] = random.below(256) as u8;
                    parts[at] = frame(&body);
                }
                _ => {
                    let length = random.below(1 << 21) as u32;
                    let there = parts[at].len().min(4);
                    parts[at].splice(..there, length.to_le_bytes()).for_each(drop);
                }
            }
        }
        let mut bytes = file(&parts);
        for _ in 0..random.below(4) {
            let (at, length) = (random.below(bytes.len().max(1)), random.below(64));
            let end = (at + length).min(bytes.len());
            match random.below(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
                1 => bytes.truncate(at),
                2 => drop(bytes.drain(at..end)),
                3 => {
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
                4 => {
                    let end = (at + random.below(5000)).min(bytes.len());
                    bytes[at..end].fill(0);
                }
                _ => bytes[at..end].iter_mut().for_each(|byte| *byte = random.below(256) as u8),
            }
        }
        fs::write(&path, &bytes).unwrap();
        let (opened, peak) = peak_of(|| Recording::open(&path));
        assert!((peak as f64) < bytes.len() as f64 * TIMES + BESIDE as f64, "seed {seed}: {peak} of {}", bytes.len());
        match opened {
            Ok(recording) => {
                read += 1;
                added(&recording); // what it says is sound
                with_gaps += usize::from(!recording.gaps().is_empty());
                assert!(recording.gaps().iter().all(|gap| gap.offset + gap.bytes <= bytes.len() as u64), "seed {seed}");
                let _ = Plan::new(&recording, None, false); // an error, or a plan
            }
            Err(Error::BadRecording { offset, .. }) => {
                errors += 1;
                assert!(offset <= bytes.len() as u64, "seed {seed}");
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(read > 200 && with_gaps > 100, "{errors} errors, {read} read, {with_gaps} with gaps");
}

/// Reading takes at most so many times the bytes of the files, and so many bytes beside that, whatever they have.
pub(super) const TIMES: f64 = 1.0;
pub(super) const BESIDE: usize = 4 << 20;

pub(super) fn number(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub(super) fn process(pid: u64) -> Vec<u8> {
    let mut body = vec![0];
    number(&mut body, pid);
    body.extend([0, 0, 1, 1, 1, 1, 1]); // no version, no system, and numbers
    frame(&body)
}
