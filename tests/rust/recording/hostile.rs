//! What reading takes of memory and time, of files that are made to take much of it, and of a recorder's.

use super::damage::{BESIDE, TIMES, file, frame, number, peak_of, process, processor_time, written};
use super::{Folder, all_of, everything, in_turn};
use ctxalloc::recording::{Recording, record};
use ctxalloc::tune::Plan;
use ctxalloc::{Buffer, Error, request};
use std::time::Duration;

fn name(at: u64) -> Vec<u8> {
    let text = format!("{at:x}");
    let mut body = vec![2];
    number(&mut body, at % 60_000);
    number(&mut body, text.len() as u64);
    body.extend(text.as_bytes());
    frame(&body)
}

/// What a reading of these frames takes: the recording, or why it is none, and how many times the bytes of the file.
fn reading(folder: &Folder, what: &str, parts: &[Vec<u8>]) -> (Result<Recording, &'static str>, f64) {
    let bytes = file(parts);
    let path = written(folder, "hostile", &bytes);
    let begun = processor_time();
    let (read, peak) = peak_of(|| Recording::open(&path));
    // Many minutes, if each were compared with all before it.
    let time = processor_time() - begun;
    assert!(time < Duration::from_secs(60), "{what}: {time:?}"); // 28 under ThreadSanitizer
    let read = read.map_err(|error| match error {
        Error::BadRecording { reason, .. } => reason,
        error => panic!("{what}: {error}"),
    });
    let times = peak.saturating_sub(BESIDE) as f64 / bytes.len() as f64;
    eprintln!("{what}: {times:.2} times {} bytes", bytes.len());
    assert!(times <= TIMES, "{what}: {times}");
    (read, times)
}

/// As [`reading`], of what is a recording.
fn read_all(folder: &Folder, what: &str, parts: &[Vec<u8>]) -> (Recording, f64) {
    let (read, times) = reading(folder, what, parts);
    (read.unwrap(), times)
}

/// Bodies of events a nanosecond apart, from this time on: of each its first byte, its request's number, and what
/// follows, where numbers are told from the ones before.
fn events(from_ns: u64, count: u64, mut each: impl FnMut(u64) -> (u8, u64, Vec<Told>)) -> Vec<Vec<u8>> {
    let (mut bodies, mut body) = (Vec::new(), vec![1]);
    let (mut time, mut request, mut block) = (0, 0, 0);
    for at in 0..count {
        let (first, on, rest) = each(at);
        body.push(first | if on == request { 0 } else { 0x10 });
        number(&mut body, from_ns + at - time);
        if on != request {
            number(&mut body, (on - request) << 1);
        }
        for told in rest {
            match told {
                Told::Number(told) => number(&mut body, told),
                Told::Block(told) => {
                    number(&mut body, (told - block) << 1);
                    block = told;
                }
            }
        }
        (time, request) = (from_ns + at, on);
        if body.len() > 16 << 10 || at + 1 == count {
            bodies.push(frame(&std::mem::replace(&mut body, vec![1])));
            (time, request, block) = (0, 0, 0);
        }
    }
    bodies
}

#[derive(Clone)]
enum Told {
    Number(u64),
    Block(u64),
}

const MANY: u64 = 400_000;

#[test]
fn what_cannot_be_read_takes_no_memory() {
    let _turn = in_turn();
    let folder = Folder::new("unread");
    let first = || vec![process(1)];
    let gaps = [first(), (0..MANY).map(|at| [name(0), vec![at as u8 | 1]].concat()).collect()].concat();
    let (read, times) = read_all(&folder, "gaps", &gaps);
    assert!(times <= 0.1, "{times}");
    let places: u64 = read.gaps().iter().map(|gap| gap.places).sum();
    assert_eq!((read.gaps().len(), places), (1000, MANY - 1), "the last one is cut off");
    let garbage = [first(), vec![(0..20 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()]];
    let (read, times) = read_all(&folder, "garbage", &garbage.concat());
    assert!(times <= 0.1 && read.gaps().len() == 1, "{times}");
    let zeros = [first(), vec![vec![0; 20 << 20]], vec![name(1)]].concat();
    let (read, times) = read_all(&folder, "zeros", &zeros);
    assert!(times <= 0.1 && read.names() == ["1"], "{times}");
}

/// Things that each take more than they have in the file: no more of them are believed than its length has room for.
#[test]
fn hostile_files_take_no_long_time_and_memory_by_their_length() {
    let _turn = in_turn();
    let folder = Folder::new("hostile");
    let first = || vec![process(1)];
    let reason = |read: &Recording| read.gaps()[0].reason.clone();
    let (read, _) = read_all(&folder, "names", &[first(), (0..MANY).map(name).collect()].concat());
    assert!(read.names().len() > 16 << 10 && reason(&read).contains("too many names"), "{}", reason(&read));
    let one_name = |at: u64| {
        let mut body = vec![2];
        number(&mut body, at * 7);
        frame(&[body, vec![1, b'x']].concat())
    };
    let (read, _) = read_all(&folder, "numbers of a name", &[first(), (0..MANY).map(one_name).collect()].concat());
    assert!(reason(&read).contains("no recorder gives"), "{}", reason(&read));
    let (read, _) = read_all(&folder, "processes", &(1..=MANY).map(process).collect::<Vec<_>>());
    assert!(read.header().processes > 1024 && reason(&read).contains("too many processes"), "{}", reason(&read));
    // One request that begins, and what it does.
    let numbers = |numbers: &[u64]| numbers.iter().map(|&number| Told::Number(number)).collect::<Vec<_>>();
    let of_one = |each: &dyn Fn(u64) -> (u8, Vec<Told>)| {
        let begun = frame(&[1, 0x10, 1, 2, 0, 0, 0]);
        let all = |at| {
            let (first, rest) = each(at);
            (first, 1, rest)
        };
        [first(), vec![begun], events(2, 3 * MANY, all)].concat()
    };
    let events_of = |read: &Recording| (all_of(read).count() + read.skipped()) as u64;
    let (read, times) = read_all(&folder, "refusals", &of_one(&|_| (4, numbers(&[1]))));
    assert!(times <= 0.1 && events_of(&read) == 3 * MANY + 1, "{times}");
    let (read, _) = read_all(&folder, "blocks", &of_one(&|at| (1, [vec![Told::Block(at)], numbers(&[1, 0])].concat())));
    assert_eq!((events_of(&read), read.skipped()), (3 * MANY + 1, 0));
    let apart = of_one(&|at| (1, [vec![Told::Block(64 * at)], numbers(&[1, 0])].concat()));
    let (read, _) = reading(&folder, "blocks apart", &apart);
    assert_eq!(read.err(), Some("its numbers lie farther apart than those of any recording"));
    // Ends of threads that did nothing.
    let (read, _) = read_all(&folder, "ends", &of_one(&|at| (0x26, numbers(&[at]))));
    assert_eq!(Plan::new(&read, None, false).unwrap().facts().threads, 1);
    // Requests that begin before a gap and end behind it, all of them.
    let begins = events(1, MANY, |at| (0, at + 1, numbers(&[0, 0, 0])));
    let ends = events(MANY + 1, MANY, |at| (5, at + 1, numbers(&[0; 5])));
    let (read, _) = read_all(&folder, "torn", &[first(), begins.clone(), vec![vec![9; 3]], ends].concat());
    assert!((1..=MANY).all(|request| read.is_torn(request)) && !read.is_torn(MANY + 1));
    let (read, _) = read_all(&folder, "requests", &[first(), begins].concat());
    assert_eq!((events_of(&read), read.skipped()), (MANY, 0));
    // Each in a frame of its own.
    let refused = |at| events(2 + at, 1, |_| (4, 1, numbers(&[1]))).concat();
    let begun = frame(&[1, 0x10, 1, 2, 0, 0, 0]);
    let (read, _) = read_all(&folder, "frames", &[first(), vec![begun], (0..MANY).map(refused).collect()].concat());
    assert_eq!((events_of(&read), read.skipped()), (MANY + 1, 0));
    // Frames that all begin at once and end late.
    let long = frame(&[1, 0x10, 1, 2, 0, 0, 0, 4, 0xff, 0xff, 0xff, 1, 1]);
    let (read, _) = reading(&folder, "overlaps", &[first(), vec![long; MANY as usize / 2]].concat());
    assert_eq!(read.err(), Some("more of its frames overlap in time than those of any recording"));
}

/// The smallest frames there are, with and without something between: of each more is kept than it has in the file.
#[test]
fn the_smallest_frames_take_no_more_memory_than_others() {
    let _turn = in_turn();
    let folder = Folder::new("smallest");
    let of = |what: &str, each: &dyn Fn(u64) -> Vec<u8>| {
        let frames = std::iter::once(process(1)).chain((0..3 * MANY).map(each)).collect::<Vec<_>>();
        read_all(&folder, what, &frames).0
    };
    let end = frame(&[1, 6, 1]);
    let begin = frame(&[1, 0x10, 0, 2, 0, 0, 0]);
    let free = frame(&[1, 3, 0, 0]);
    let between = |frame: &[u8]| [frame, b"x"].concat();
    let later = |at: u64| events(at, 1, |_| (0x26, 0, vec![Told::Number(at)])).concat();
    assert!(of("thread ends", &|_| end.clone()).gaps().is_empty());
    of("thread ends in their order", &later);
    of("a request", &|_| begin.clone());
    of("frees", &|_| free.clone());
    for (what, frame) in [("gaps, thread ends", &end), ("gaps, a request", &begin), ("gaps, frees", &free)] {
        let read = of(what, &|_| between(frame));
        let reasons: Vec<_> = read.gaps().iter().map(|gap| &*gap.reason).collect();
        assert!(reasons.contains(&"no frame begins here"), "{reasons:?}");
    }
    let known = process(1);
    of("one process again and again", &|at| if at % 2 == 0 { known.clone() } else { end.clone() });
}

/// Requests that each take more in lists than in the file, in a file that is long enough: the room is not passed, and
/// the place is that of the body for which there was none.
#[test]
fn what_would_take_more_memory_than_its_bytes_is_an_error_with_the_place() {
    let _turn = in_turn();
    let folder = Folder::new("full");
    let end = frame(&[1, 6, 1]);
    let bytes = file(&[vec![process(1)], vec![end.clone(); 3_500_000]].concat());
    let path = written(&folder, "trace", &bytes);
    let (read, peak) = peak_of(|| Recording::open(&path));
    assert!(peak < bytes.len() + BESIDE, "{peak} of {}", bytes.len());
    let Err(Error::BadRecording { offset, reason, .. }) = read else { panic!("{read:?}") };
    assert_eq!(reason, "to read on would take more memory than its bytes");
    let first = file(&[process(1)]).len() + 12;
    assert!(offset > 1 << 20 && (offset - first as u64).is_multiple_of(end.len() as u64), "{offset}");
}

/// A file beside the recording whose numbers are refused behind a gap: what was read of it before is forgotten.
#[test]
fn of_a_file_that_is_passed_over_nothing_is_kept() {
    let _turn = in_turn();
    let folder = Folder::new("passed-over");
    let begun = |request: u64| events(request, 1, |_| (0, request, vec![Told::Number(0); 3])).concat();
    let path = written(&folder, "trace", &file(&[process(1), name(0), begun(1)]));
    let apart = (1..40_000).map(|at| begun(64 * at));
    let beside = std::iter::once(process(2)).chain(apart).chain([b"x".to_vec(), begun(3)]);
    written(&folder, "trace.1", &file(&beside.collect::<Vec<_>>()));
    let read = Recording::open(path).unwrap();
    let [.., gap] = read.gaps() else { panic!("{:?}", read.gaps()) };
    assert!(gap.file.ends_with("trace.1") && gap.reason.contains("farther apart"), "{gap:?}");
    assert_eq!(all_of(&read).count(), 1);
}

/// What a recorder writes takes a part of its bytes.
#[test]
fn reading_a_recording_takes_half_of_its_files_length() {
    let _turn = in_turn();
    let folder = Folder::new("little");
    let recorder = record(folder.file(), everything()).unwrap();
    for turn in 0..20_000_u64 {
        let request = request().root().name("route").begin().unwrap();
        for block in 0..20 {
            let made = Buffer::with_capacity_in(request.handler(), 1000 + block).unwrap();
            if turn % 50 == 0 { std::mem::forget(made) } else { drop(made) }
        }
        request.end();
    }
    recorder.stop().unwrap();
    let (read, peak) = peak_of(|| Recording::open(folder.file()).unwrap());
    let bytes = read.header().file_bytes as usize;
    let events = all_of(&read).count();
    eprintln!("{peak} for {bytes} bytes, {events} events");
    assert_eq!(events, 20_000 * 42 - 400 * 20);
    assert!(peak < bytes / 2 + (2 << 20), "{peak} for {bytes}");
    let kept = peak_of(|| read.clone()).1;
    assert!(kept < bytes / 8, "{kept} for {bytes}");
}
