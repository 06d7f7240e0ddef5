//! Files that change while a recording is read: events are read as they are asked for.

use super::damage::{MAGIC_BYTES, file, frame, frames, process, written};
use super::{Folder, all_of, everything, in_turn};
use ctxalloc::recording::{Recording, record};
use ctxalloc::tune::{Plan, routes};
use ctxalloc::{Buffer, Error, request};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

/// A recording of some bodies.
fn recorded(folder: &Folder) -> Recording {
    let recorder = record(folder.file(), everything()).unwrap();
    for at in 0..20_000 {
        let request = request().root().name("route").begin().unwrap();
        drop(Buffer::zeroed_in(request.handler(), 100 + at % 7).unwrap());
        request.end();
    }
    recorder.stop().unwrap();
    Recording::open(folder.file()).unwrap()
}

fn place(error: &Error, path: &Path) -> u64 {
    let Error::BadRecording { file, offset, reason, .. } = error else { panic!("{error}") };
    assert_eq!((Path::new(file), *reason), (path, "it was changed while it was read"));
    *offset
}

/// The middle of the events around the file's middle: what stands between events is read when the file is opened.
fn in_events(file: &[u8]) -> usize {
    let mut end = MAGIC_BYTES;
    let events = frames(file).into_iter().find_map(|frame| {
        end += frame.len();
        (end > file.len() / 2 && frame[12] == 1).then(|| end - frame.len() / 2)
    });
    events.expect("there are events behind the middle")
}

#[test]
fn a_file_that_is_changed_or_cut_short_is_an_error_with_the_place() {
    let _turn = in_turn();
    let folder = Folder::new("changed");
    let (path, read) = (folder.file(), recorded(&folder));
    let good = fs::read(&path).unwrap();
    let middle = in_events(&good);
    let mut flipped = good.clone();
    flipped[middle] ^= 1;
    for (bad, is_flipped) in [(flipped.as_slice(), true), (&good[..middle], false), (&[], false)] {
        fs::write(&path, bad).unwrap(); // the same file
        let errors = [
            read.events().find_map(Result::err).expect("an event is read from the file"),
            routes(&read).expect_err("all events are read"),
            Plan::new(&read, None, false).expect_err("all events are read"),
            Plan::new(&read, None, true).expect_err("all events are read"),
        ];
        for error in &errors {
            let offset = place(error, &path);
            assert!(
                !is_flipped || offset <= middle as u64 && offset + (20 << 10) > middle as u64,
                "{offset}, {middle}"
            );
        }
        assert!(read.events().last().unwrap().is_err(), "nothing comes behind an error");
    }
    fs::write(&path, &good).unwrap();
    assert_eq!(all_of(&read).count(), 20_000 * 4);
}

#[test]
fn a_file_that_grows_or_is_renamed_is_read_as_it_was() {
    let _turn = in_turn();
    let folder = Folder::new("renamed");
    let (path, read) = (folder.file(), recorded(&folder));
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
    fs::rename(&path, folder.0.join("trace.old")).unwrap();
    fs::write(&path, "another").unwrap();
    assert_eq!(all_of(&read).count(), 20_000 * 4);
}

/// More workers than files stay open.
#[test]
fn a_recording_of_many_files_keeps_some_of_them_open() {
    let _turn = in_turn();
    let folder = Folder::new("many");
    let one = |number: u64| {
        let events = frame(&[1, 0x10, number as u8 & 0x7f, 2, 0, 0, 0]);
        file(&[process(number), events])
    };
    let path = written(&folder, "trace", &one(1));
    (1..300).for_each(|at| drop(written(&folder, &format!("trace.{at}"), &one(1 + at))));
    let before = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let read = Recording::open(&path).unwrap();
    let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count).saturating_sub(before);
    assert!(open < 160, "{open}");
    assert_eq!((all_of(&read).count(), read.header().processes), (300, 300));
    // One of those that are opened by name is another file now.
    let last = folder.0.join("trace.299");
    fs::rename(&last, folder.0.join("elsewhere")).unwrap();
    fs::write(&last, one(300)).unwrap();
    place(&read.events().find_map(Result::err).expect("an error"), &last);
    fs::remove_file(&last).unwrap();
    let error = read.events().find_map(Result::err).expect("an error");
    assert!(matches!(&error, Error::NoRecording { file, .. } if Path::new(file) == last), "{error}");
}
