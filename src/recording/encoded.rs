//! The bodies of frames: a process that begins to record, names, the rate, and events.
//!
//! A body of events stands for itself: its first event gives time, thread, request and block as changes from zero, each
//! further one as changes from the one before it.

use super::event::{Event, Sums, Told, What};
use super::wire::{Bytes, MAX_EVENT_BYTES, put, put_change, put_text};

/// The first byte of a body.
pub(super) const PROCESS: u8 = 0;
pub(super) const EVENTS: u8 = 1;
pub(super) const NAME: u8 = 2;
pub(super) const HANDLER: u8 = 3;
/// From now on one request in so many is recorded.
pub(super) const RATE: u8 = 4;
/// The process records no more: nothing is missing.
pub(super) const CLOSED: u8 = 5;
/// The name before it (or the handler's: its kind follows) is that of all which have no room.
pub(super) const OTHERS: u8 = 6;
/// What the process has used until now.
pub(super) const USED: u8 = 7;

/// The first byte of an event: what it is in the lowest four bits, and these.
const OTHER_REQUEST: u8 = 0x10;
const OTHER_THREAD: u8 = 0x20;
/// Of an allocation: zeroed. Of a resize: moved. Of a refusal: whose limit it was follows. Of an end: page faults do.
const FLAG: u8 = 0x40;
/// Of an end: the account includes others. A reader that does not know it takes the sums for those of the events.
const OTHERS_TOO: u8 = 0x80;
const BEGIN: u8 = 0;
const ALLOCATE: u8 = 1;
const RESIZE: u8 = 2;
const FREE: u8 = 3;
const REFUSED: u8 = 4;
const END: u8 = 5;
const THREAD_END: u8 = 6;
/// An end with page faults and with processor time: the flag would be with the former alone.
const END_USED: u8 = 7;

/// What a process says when it begins to record into a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    /// Its number in the system, and with `began_unix_ns` its name.
    pub(super) pid: u64,
    pub(super) version: String,
    pub(super) system: String,
    pub(super) page_bytes: u64,
    pub(super) cores: u64,
    /// Nanoseconds since 1970 when its clock was 0.
    pub(super) began_unix_ns: u64,
    pub(super) one_in: u64,
    pub(super) share_ppm: u64,
    /// Whether it says when threads end.
    pub(super) tells_ends: bool,
    /// Whether its first request is a program (`ctxalloc run --record`), with all others inside of it.
    pub(super) is_program: bool,
    /// The highest number of a request before this recording: its own follow without a gap. `None`: it does not say.
    pub(super) requests_before: Option<u64>,
}

impl Process {
    pub(super) fn body(&self) -> Vec<u8> {
        let mut bytes = vec![PROCESS];
        put(&mut bytes, self.pid);
        put_text(&mut bytes, &self.version);
        put_text(&mut bytes, &self.system);
        let flags = u64::from(self.tells_ends) | u64::from(self.is_program) << 1;
        for number in [self.page_bytes, self.cores, self.began_unix_ns, self.one_in, self.share_ppm, flags] {
            put(&mut bytes, number);
        }
        if let Some(before) = self.requests_before {
            put(&mut bytes, before);
        }
        bytes
    }

    /// From a body without its first byte. What a later release adds at its end is not read.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut bytes = Bytes { rest: body };
        let found = Self {
            pid: bytes.number()?,
            version: bytes.text()?.to_owned(),
            system: bytes.text()?.to_owned(),
            page_bytes: bytes.number()?,
            cores: bytes.number()?,
            began_unix_ns: bytes.number()?,
            one_in: bytes.number()?,
            share_ppm: bytes.number()?,
            tells_ends: false,
            is_program: false,
            requests_before: None,
        };
        let [tells_ends, is_program] = bytes.number().map_or([false; 2], |flags| [1, 2].map(|bit| flags & bit != 0));
        Some(Self { tells_ends, is_program, requests_before: bytes.number(), ..found })
    }
}

/// What a process has used since it began. None of the numbers falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Used {
    /// Of all threads, in the program and in the kernel.
    pub(super) processor_ns: u64,
    /// Requests that could have been recorded, and those that were; without those inside of others.
    pub(super) seen: u64,
    pub(super) chosen: u64,
    /// The highest number of a request that began: where no file has anything of it, it is missing all the same. 0: an
    /// older version wrote it.
    pub(super) highest: u64,
}

impl Used {
    pub(super) fn body(&self) -> Vec<u8> {
        let mut bytes = vec![USED];
        [self.processor_ns, self.seen, self.chosen, self.highest]
            .into_iter()
            .for_each(|number| put(&mut bytes, number));
        bytes
    }

    /// From a body without its first byte. What a later release adds at its end is not read.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut bytes = Bytes { rest: body };
        let [processor_ns, seen, chosen] = [bytes.number()?, bytes.number()?, bytes.number()?];
        Some(Self { processor_ns, seen, chosen, highest: bytes.number().unwrap_or(0) })
    }

    /// What of the processor's time between these two falls to requests that were recorded, if all took as much.
    /// `None`: none was.
    pub(super) fn for_chosen_since(&self, before: &Self) -> Option<u64> {
        let [time, seen, chosen] = [
            self.processor_ns.saturating_sub(before.processor_ns),
            self.seen.saturating_sub(before.seen),
            self.chosen.saturating_sub(before.chosen),
        ];
        let is_told = chosen > 0 && chosen <= seen;
        is_told.then(|| (u128::from(time) * u128::from(chosen) / u128::from(seen)) as u64)
    }
}

/// The body that gives a name (or a handler) its number.
pub(super) fn named(kind: u8, number: u32, name: &str) -> Vec<u8> {
    let mut bytes = vec![kind];
    put(&mut bytes, u64::from(number));
    put_text(&mut bytes, name);
    bytes
}

/// The body that says how many requests there are for each that is recorded.
pub(super) fn rate(one_in: u64) -> Vec<u8> {
    let mut bytes = vec![RATE];
    put(&mut bytes, one_in);
    bytes
}

/// A body of events that grows.
#[derive(Debug)]
pub(super) struct Events {
    bytes: Vec<u8>,
    before: Before,
}

/// What the next event is told by.
#[derive(Debug, Default, Clone)]
pub(super) struct Before {
    at_ns: u64,
    thread: u32,
    request: u64,
    block: u64,
}

impl Events {
    pub(super) const fn new() -> Self {
        Self { bytes: Vec::new(), before: Before { at_ns: 0, thread: 0, request: 0, block: 0 } }
    }

    /// With room for a body that is a little longer than `bytes`, and for each that follows.
    pub(super) fn with_room(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes + MAX_EVENT_BYTES), ..Self::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The body, complete; the next event begins another one.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.before = Before::default();
        let next = Vec::with_capacity(self.bytes.capacity());
        std::mem::replace(&mut self.bytes, next)
    }

    pub(super) fn push(&mut self, event: &Event) {
        let Self { bytes, before } = self;
        if bytes.is_empty() {
            bytes.push(EVENTS);
        }
        let (kind, flag) = match event.what {
            What::Begin { .. } => (BEGIN, false),
            What::Allocate { zeroed, .. } => (ALLOCATE, zeroed),
            What::Resize { moved, .. } => (RESIZE, moved),
            What::Free { .. } => (FREE, false),
            What::Refused { by, .. } => (REFUSED, by > 0),
            What::End { page_faults: Some(_), processor_ns: Some(_), .. } => (END_USED, false),
            What::End { page_faults, .. } => (END, page_faults.is_some()),
        };
        let (other_request, other_thread) = (event.request != before.request, event.thread != before.thread);
        let others_too = matches!(event.what, What::End { sums, .. } if sums.includes_others);
        let flags =
            [(other_request, OTHER_REQUEST), (other_thread, OTHER_THREAD), (flag, FLAG), (others_too, OTHERS_TOO)]
                .map(|(is, bit)| u8::from(is) * bit);
        bytes.push(flags.into_iter().fold(kind, |first, flag| first | flag));
        put(bytes, event.at_ns.saturating_sub(before.at_ns));
        if other_request {
            put_change(bytes, before.request, event.request);
        }
        if other_thread {
            put(bytes, u64::from(event.thread));
        }
        match event.what {
            What::Begin { name, handler, parent } => {
                put(bytes, u64::from(name));
                put(bytes, u64::from(handler));
                put(bytes, parent);
            }
            What::Allocate { block, bytes: size, align, .. } => {
                put_change(bytes, before.block, block);
                put(bytes, size);
                put(bytes, if align == 0 { 0 } else { u64::from(align.ilog2()) + 1 });
                before.block = block;
            }
            What::Resize { block, bytes: size, .. } => {
                put_change(bytes, before.block, block);
                put(bytes, size);
                before.block = block;
            }
            What::Free { block } => {
                put_change(bytes, before.block, block);
                before.block = block;
            }
            What::Refused { bytes: size, by } => {
                put(bytes, size);
                if by > 0 {
                    put_change(bytes, event.request, by);
                }
            }
            What::End { sums, page_faults, processor_ns } => {
                let Sums { peak_bytes, total_bytes, blocks, live_bytes, refused, includes_others: _ } = sums;
                let numbers = [peak_bytes, total_bytes, blocks, live_bytes, refused];
                let used = page_faults.into_iter().chain(page_faults.and(processor_ns));
                for number in numbers.into_iter().chain(used) {
                    put(bytes, number);
                }
            }
        }
        before.at_ns = event.at_ns.max(before.at_ns);
        before.request = event.request;
        before.thread = event.thread;
    }
}

impl Events {
    /// A thread ends.
    pub(super) fn push_thread_end(&mut self, at_ns: u64, thread: u32) {
        let Self { bytes, before } = self;
        if bytes.is_empty() {
            bytes.push(EVENTS);
        }
        let is_other = thread != before.thread;
        bytes.push(if is_other { THREAD_END | OTHER_THREAD } else { THREAD_END });
        put(bytes, at_ns.saturating_sub(before.at_ns));
        if is_other {
            put(bytes, u64::from(thread));
        }
        before.at_ns = at_ns.max(before.at_ns);
        before.thread = thread;
    }
}

/// Reads events from a body without its first byte, and calls `each` with every one. False: something else is there.
pub(super) fn read_events(body: &[u8], mut each: impl FnMut(Told)) -> bool {
    let (mut bytes, mut before) = (Bytes { rest: body }, Before::default());
    while !bytes.rest.is_empty() {
        match read_event(&mut bytes, &mut before) {
            Some(told) => each(told),
            None => return false,
        }
    }
    true
}

/// The next event of a body, or a thread's end.
pub(super) fn read_event(bytes: &mut Bytes<'_>, before: &mut Before) -> Option<Told> {
    let first = bytes.byte()?;
    before.at_ns = before.at_ns.checked_add(bytes.number()?)?;
    if first & OTHER_REQUEST != 0 {
        before.request = bytes.changed(before.request)?;
    }
    if first & OTHER_THREAD != 0 {
        before.thread = bytes.small()?;
    }
    let flag = first & FLAG != 0;
    let what = match first & 0x0f {
        THREAD_END => return Some(Told::ThreadEnd { at_ns: before.at_ns, thread: before.thread }),
        BEGIN => What::Begin { name: bytes.small()?, handler: bytes.small()?, parent: bytes.number()? },
        ALLOCATE => {
            before.block = bytes.changed(before.block)?;
            let size = bytes.size()?;
            let align = match bytes.number()? {
                0 => 0,
                log @ 1..=32 => 1 << (log - 1),
                _ => return None,
            };
            What::Allocate { block: before.block, bytes: size, align, zeroed: flag }
        }
        RESIZE => {
            before.block = bytes.changed(before.block)?;
            What::Resize { block: before.block, bytes: bytes.size()?, moved: flag }
        }
        FREE => {
            before.block = bytes.changed(before.block)?;
            What::Free { block: before.block }
        }
        REFUSED => {
            let size = bytes.number()?;
            What::Refused { bytes: size, by: if flag { bytes.changed(before.request)? } else { 0 } }
        }
        kind @ (END | END_USED) => {
            let sums = Sums {
                peak_bytes: bytes.number()?,
                total_bytes: bytes.number()?,
                blocks: bytes.number()?,
                live_bytes: bytes.number()?,
                refused: bytes.number()?,
                includes_others: first & OTHERS_TOO != 0,
            };
            let is_used = kind == END_USED;
            let page_faults = if flag || is_used { Some(bytes.number()?) } else { None };
            What::End { sums, page_faults, processor_ns: if is_used { Some(bytes.number()?) } else { None } }
        }
        _ => return None,
    };
    Some(Told::Event(Event { at_ns: before.at_ns, thread: before.thread, request: before.request, what }))
}

#[cfg(test)]
mod tests {
    use super::{Events, Process, Used, read_events};
    use crate::recording::event::{Event, Sums, Told, What};

    #[test]
    fn events_come_back_as_they_were() {
        let sums = Sums { peak_bytes: 1 << 40, total_bytes: u64::MAX, blocks: 3, refused: 9, ..Sums::default() };
        let with_others = Sums { includes_others: true, ..sums };
        let whats = [
            What::Begin { name: 7, handler: 0, parent: 3 },
            What::Allocate { block: 9, bytes: 800, align: 64, zeroed: true },
            What::Allocate { block: 10, bytes: 1 << 40, align: 0, zeroed: false },
            What::Resize { block: 9, bytes: 1 << 33, moved: true },
            What::Refused { bytes: 12, by: 0 },
            What::Refused { bytes: 13, by: 1 },
            What::Free { block: 9 },
            What::End { sums, page_faults: None, processor_ns: None },
            What::End { sums, page_faults: Some(u64::MAX), processor_ns: None },
            What::End { sums: with_others, page_faults: None, processor_ns: None },
            What::End { sums: with_others, page_faults: Some(7), processor_ns: Some(u64::MAX) },
            What::End { sums, page_faults: Some(0), processor_ns: Some(0) },
        ];
        let numbers = (0..).map(|number: u64| (number * 1_000_007, number as u32 / 3, 5 - number / 2));
        let events: Vec<_> =
            whats.into_iter().zip(numbers).map(|(what, (at, thread, on))| Event::new(at, thread, on, what)).collect();
        let mut body = Events::new();
        events.iter().for_each(|event| body.push(event));
        let body = body.take();
        let mut found = Vec::new();
        assert!(read_events(&body[1..], |told| match told {
            Told::Event(event) => found.push(event),
            Told::ThreadEnd { .. } => unreachable!("none was told"),
        }));
        assert_eq!(found, events);
        for length in 2..body.len() {
            let mut begun = 0;
            let is_whole = read_events(&body[1..length], |told| {
                assert_eq!(told, Told::Event(events[begun]));
                begun += 1;
            });
            assert!(!is_whole || begun < events.len(), "{length} bytes");
        }
    }

    #[test]
    fn an_event_has_few_bytes() {
        let mut body = Events::new();
        for number in 1..=1000_u64 {
            let block = What::Allocate { block: number, bytes: 1 << 20, align: 64, zeroed: false };
            body.push(&Event::new(number * 2000, 1, 1, block));
            body.push(&Event::new(number * 2000 + 1000, 1, 1, What::Free { block: number }));
        }
        assert!(body.len() < 2000 * 8, "{} bytes", body.len());
    }

    #[test]
    fn a_process_comes_back_as_it_was() {
        let process = Process {
            pid: 17,
            version: "1.2.3".to_owned(),
            system: "linux x86_64".to_owned(),
            page_bytes: 4096,
            cores: 2,
            began_unix_ns: 1 << 60,
            one_in: 10,
            share_ppm: 10_000,
            tells_ends: true,
            is_program: true,
            requests_before: Some(300),
        };
        assert_eq!(Process::read(&process.body()[1..]), Some(process));
    }

    #[test]
    fn of_the_processors_time_recorded_requests_have_their_share() {
        let used = |processor_ns, seen, chosen| Used { processor_ns, seen, chosen, highest: 3 };
        let first = used(1_000, 7, 3);
        assert_eq!(Used::read(&first.body()[1..]), Some(first));
        assert_eq!(Used::read(&first.body()[1..3]), None, "it is not complete");
        assert_eq!(used(41_000, 107, 13).for_chosen_since(&first), Some(4_000), "ten of a hundred");
        assert_eq!(used(41_000, 17, 13).for_chosen_since(&first), Some(40_000), "all");
        assert_eq!(used(41_000, 107, 3).for_chosen_since(&first), None, "none was recorded");
        assert_eq!(used(41_000, 10, 10).for_chosen_since(&first), None, "more than there were");
        assert_eq!(used(u64::MAX, u64::MAX, u64::MAX).for_chosen_since(&used(0, 0, 0)), Some(u64::MAX));
    }
}
