//! The files of a recording: how long they get, what they go on with, and what cannot be one.

use super::{Folder, added, all_of, everything, in_turn};
use ctxalloc::recording::{Recording, What, record};
use ctxalloc::{Buffer, Error, request};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

#[test]
fn a_file_stays_below_its_limit_and_keeps_the_newest() {
    let _turn = in_turn();
    let folder = Folder::new("rotated");
    let mut options = everything();
    options.max_bytes = 128 << 10;
    let recorder = record(folder.file(), options).unwrap();
    for number in 0..8000 {
        let request = request().root().name(format!("route {}", number % 7)).begin().unwrap();
        let kept = [1000, 2000, 3000].map(|bytes| Buffer::zeroed_in(request.handler(), bytes).unwrap());
        drop(kept);
        request.end();
    }
    let last = request().root().name("the last").begin().unwrap();
    drop(Buffer::zeroed_in(last.handler(), 77).unwrap());
    last.end();
    recorder.stop().unwrap();
    assert!(bytes_in(&folder) <= options.max_bytes, "{} bytes", bytes_in(&folder));
    let recording = Recording::open(folder.file()).unwrap();
    assert!(recording.names().iter().any(|name| name == "the last"));
    let added = added(&recording);
    assert_eq!(added.said["the last"].peak_bytes, 77);
    assert_eq!(added.sums["route 3"], added.said["route 3"], "names are known after the file was put aside");
    let missing = recording.header().missing_requests;
    assert!(missing > 1000 && missing + begun(&recording) == 8001, "{missing} in files that were replaced");
}

/// Each of the buffers has some 10 KiB, which nobody has written, when the newest request ends: what it is noted in is
/// old enough then, and is written before them.
#[test]
fn older_events_that_are_written_later_do_not_replace_the_newest() {
    let _turn = in_turn();
    let folder = Folder::new("order");
    let mut options = everything();
    options.max_bytes = 64 << 10;
    let recorder = record(folder.file(), options).unwrap();
    let older = [0; 8].map(|_| request().root().name("older").begin().unwrap());
    for _ in 0..1000 {
        older.iter().for_each(|one| drop(Buffer::zeroed_in(one.handler(), 1000).unwrap()));
    }
    thread::sleep(Duration::from_millis(20));
    let newest = request().root().name("the newest").begin().unwrap();
    drop(Buffer::zeroed_in(newest.handler(), 77).unwrap());
    newest.end();
    recorder.stop().unwrap();
    drop(older);
    assert!(bytes_in(&folder) <= options.max_bytes, "{} bytes", bytes_in(&folder));
    let recording = Recording::open(folder.file()).unwrap();
    let said = added(&recording).said;
    assert_eq!(said.get("the newest").map(|sums| sums.peak_bytes), Some(77), "{said:?}");
    assert_eq!(recording.header().missing_requests + begun(&recording), 9);
}

/// No event tells its number any more: the file does.
#[test]
fn the_newest_request_is_missing_too_if_its_beginning_is_replaced() {
    let _turn = in_turn();
    let folder = Folder::new("quiet");
    let mut options = everything();
    options.max_bytes = 64 << 10;
    let recorder = record(folder.file(), options).unwrap();
    let busy = request().root().name("busy").begin().unwrap();
    let quiet = busy.run(|| request().name("quiet").begin()).unwrap();
    for _ in 0..10_000 {
        drop(Buffer::zeroed_in(busy.handler(), 1000).unwrap());
    }
    recorder.stop().unwrap();
    quiet.end();
    let recording = Recording::open(folder.file()).unwrap();
    assert_eq!((begun(&recording), recording.header().missing_requests), (0, 2));
}

fn begun(recording: &Recording) -> u64 {
    all_of(recording).filter(|event| matches!(event.what, What::Begin { .. })).count() as u64
}

/// Of several recordings of one process, each begins with the number that the one before it came to.
#[test]
fn of_recordings_that_have_all_no_request_is_missing() {
    let _turn = in_turn();
    let folder = Folder::new("whole");
    for _ in 0..3 {
        let recorder = record(folder.file(), everything()).unwrap();
        for _ in 0..100 {
            let outer = request().root().name("outer").begin().unwrap();
            request().name("inner").begin().unwrap().end();
            outer.end();
        }
        recorder.stop().unwrap();
    }
    let recording = Recording::open(folder.file()).unwrap();
    assert_eq!((begun(&recording), recording.header().missing_requests), (600, 0));
}

/// The bytes of all files in the folder.
fn bytes_in(folder: &Folder) -> u64 {
    fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn names_are_no_way_around_the_limit() {
    let _turn = in_turn();
    let folder = Folder::new("names");
    let mut options = everything();
    options.max_bytes = 64 << 10;
    let recorder = record(folder.file(), options).unwrap();
    let name_of = |number: usize| format!("{:04} {}", number % 600, "x".repeat(239));
    // The last one has the name of the first, which is known. Which others are left is chance.
    for number in 0..=3000 {
        let name = name_of(number);
        let request = request().root().name(name).begin().unwrap();
        let kept = [1000, 2000, 3000].map(|bytes| Buffer::zeroed_in(request.handler(), bytes).unwrap());
        drop(kept);
        request.end();
        if number % 100 == 0 {
            assert!(bytes_in(&folder) <= options.max_bytes, "{} bytes", bytes_in(&folder));
        }
    }
    recorder.stop().unwrap();
    assert!(bytes_in(&folder) <= options.max_bytes, "{} bytes", bytes_in(&folder));
    let recording = Recording::open(folder.file()).unwrap();
    let mut by_name: HashMap<&str, u64> = HashMap::new();
    for event in all_of(&recording) {
        if let What::Begin { name, .. } = event.what {
            *by_name.entry(&recording.names()[name as usize]).or_default() += 1;
        }
    }
    assert!(by_name["(other)"] > 300 && by_name.contains_key(&*name_of(0)), "{by_name:?}");
    assert_eq!(recording.header().other_requests, by_name["(other)"]);
    let added = added(&recording);
    assert!(added.said.keys().all(|name| added.sums[name] == added.said[name]));
}

/// Nobody knows how large a request gets that begins. Once one was too large, none is recorded until the share is kept.
#[test]
fn large_requests_are_few_from_the_start() {
    let _turn = in_turn();
    let folder = Folder::new("share");
    let mut options = everything();
    options.share = 1e-6;
    let recorder = record(folder.file(), options).unwrap();
    for _ in 0..20 {
        let request = request().root().name("large").begin().unwrap();
        for _ in 0..60_000 {
            drop(Buffer::with_capacity_in(request.handler(), 100).unwrap());
        }
        request.end();
    }
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    assert_eq!(begun(&recording), 1);
    assert!(recording.header().highest_one_in > 1, "and it says so");
}

/// A file that is full already, left by another process with a higher limit, is put aside at once.
#[test]
fn a_full_file_is_not_gone_on_with() {
    let _turn = in_turn();
    let folder = Folder::new("full");
    let mut options = everything();
    for max_bytes in [4 << 20, 64 << 10] {
        options.max_bytes = max_bytes;
        let recorder = record(folder.file(), options).unwrap();
        for number in 0..3000 {
            let request = request().root().name(format!("route {}", number % 7)).begin().unwrap();
            drop(Buffer::zeroed_in(request.handler(), 1000).unwrap());
            request.end();
        }
        recorder.stop().unwrap();
    }
    assert!(bytes_in(&folder) <= 64 << 10, "{} bytes", bytes_in(&folder));
    assert_eq!(Recording::open(folder.file()).unwrap().header().other_requests, 0);
}

#[test]
fn a_recording_goes_on_in_its_file() {
    let _turn = in_turn();
    let folder = Folder::new("again");
    for name in ["first", "second"] {
        let recorder = record(folder.file(), everything()).unwrap();
        let again = record(folder.file(), everything()).unwrap_err();
        assert!(again.to_string().contains("records already"), "{again}");
        let request = request().root().name(name).begin().unwrap();
        drop(Buffer::zeroed_in(request.handler(), 10).unwrap());
        request.end();
        recorder.stop().unwrap();
        // As a process leaves it that is killed while it writes.
        let mut bytes = fs::read(folder.file()).unwrap();
        let begin = bytes[8..15].to_vec();
        bytes.extend_from_slice(&begin);
        fs::write(folder.file(), bytes).unwrap();
        assert!(Recording::open(folder.file()).unwrap().is_cut_off());
    }
    let recording = Recording::open(folder.file()).unwrap();
    assert_eq!(recording.names(), ["first", "second"]);
    assert_eq!(recording.header().processes, 2);
    assert_eq!(added(&recording).said.len(), 2);
}

#[test]
fn what_cannot_be_recorded_into_is_an_error() {
    let _turn = in_turn();
    let folder = Folder::new("errors");
    let record_error = |path: &Path| record(path, everything()).unwrap_err();
    assert!(matches!(record_error(&folder.0), Error::NoRecording { .. }), "a folder");
    assert!(matches!(record_error(&folder.0.join("no/such/folder")), Error::NoRecording { .. }));
    fs::write(folder.file(), "something else").unwrap();
    let error = record_error(&folder.file());
    assert!(error.to_string().contains("no recording of this version"), "{error}");
    assert_eq!(fs::read(folder.file()).unwrap(), b"something else", "it is left alone");
    let error = Recording::open(folder.file()).unwrap_err();
    assert!(matches!(error, Error::BadRecording { offset: 0, .. }), "{error}");
    let mut options = everything();
    options.one_in = 0;
    assert!(matches!(record(folder.0.join("a"), options), Err(Error::BadOption { option: "one_in", .. })));
}
