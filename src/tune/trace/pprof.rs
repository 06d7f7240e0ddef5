//! By name of request and by size, as pprof's `profile.proto`, which is compressed elsewhere.

use super::walk::class_of;
use super::{BYTES_AT_ONCE, EVENTS_AT_ONCE, Export, NameOf, Names, Walk, rooms};
use crate::error::Error;
use crate::recording::{Full, Recording, Room, What};
use std::collections::HashMap;
use std::sync::Arc;

/// Blocks that were made with one size, in requests of one name.
struct Stack {
    name: u32,
    class: u8,
    blocks: u64,
    total_bytes: u64,
    live_bytes: u64,
    at_peak_bytes: u64,
}

/// What one takes, with its place in a map that has just grown.
const STACK_BYTES: usize = 48;

pub(crate) struct Pprof {
    walk: Walk,
    names: Names,
    name_of: NameOf,
    stacks: Vec<Stack>,
    of: HashMap<(u32, u8), u32>,
    alive: u128,
    peak: u128,
    room: Room,
    doing: Doing,
    /// The texts of sizes, by class.
    classes: Vec<String>,
    /// Of each class and then of each name: its number as a location, and as a text, where one has been given.
    numbers: Vec<u32>,
    /// The location of this number is of this class or name.
    given: Vec<u32>,
}

/// What comes next. The peak is known once all events were read: what was alive then is found in a second reading.
#[derive(Clone, Copy)]
enum Doing {
    First,
    Second { is_past: bool },
    Samples(usize),
    Locations(usize),
    Functions(usize),
    Texts(usize),
}

/// The texts that are there in any case; each location has one more, in their order.
const KINDS: [(&str, &str); 4] =
    [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_space", "bytes"), ("peak_space", "bytes")];
const TEXTS: [&str; 7] = ["", "alloc_objects", "count", "alloc_space", "bytes", "inuse_space", "peak_space"];

impl Pprof {
    /// `classes`: how a size up to each power of two is called.
    pub(crate) fn new(recording: &Arc<Recording>, classes: Vec<String>) -> Self {
        let (mut room, blocks) = rooms(recording, 2);
        let numbers = vec![0; classes.len() + recording.names().len()];
        room.0 = room.0.saturating_sub(2 * size_of_val(numbers.as_slice()));
        let (walk, names) = (Walk::new(recording, blocks), Names::new(recording));
        Self {
            walk,
            names,
            name_of: NameOf::default(),
            stacks: Vec::new(),
            of: HashMap::new(),
            alive: 0,
            peak: 0,
            room,
            doing: Doing::First,
            classes,
            numbers,
            given: Vec::new(),
        }
    }

    /// Reads some events. False: there is none left.
    fn read(&mut self, mut is_past: Option<bool>) -> Result<(bool, bool), Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some((event, before)) = self.walk.next()? else { return Ok((false, true)) };
            if let What::Begin { name, .. } = event.what {
                let done = self.name_of.set(event.request, self.names.number(name), &mut self.room);
                done.map_err(|full| self.walk.full(full))?;
            }
            let name = self.name_of.get(event.request);
            if let What::Allocate { bytes, .. } = event.what {
                let at = self.stack(name, class_of(bytes)).map_err(|full| self.walk.full(full))?;
                let stack = &mut self.stacks[at];
                stack.blocks += 1;
                self.change(at, bytes, 0);
            } else if let What::Resize { bytes, .. } = event.what {
                let at = self.stack(name, before.class).map_err(|full| self.walk.full(full))?;
                self.change(at, bytes, before.bytes);
            } else if let What::Free { .. } = event.what {
                let at = self.stack(name, before.class).map_err(|full| self.walk.full(full))?;
                self.change(at, 0, before.bytes);
            }
            match &mut is_past {
                None => self.peak = self.peak.max(self.alive),
                Some(is_past) if !*is_past && self.alive == self.peak => {
                    *is_past = true;
                    self.stacks.iter_mut().for_each(|stack| stack.at_peak_bytes = stack.live_bytes);
                }
                Some(_) => {}
            }
        }
        Ok((true, is_past.unwrap_or(false)))
    }

    fn stack(&mut self, name: u32, class: u8) -> Result<usize, Full> {
        if let Some(&at) = self.of.get(&(name, class)) {
            return Ok(at as usize);
        }
        self.room.take(STACK_BYTES)?;
        let stack = Stack { name, class, blocks: 0, total_bytes: 0, live_bytes: 0, at_peak_bytes: 0 };
        self.room.push(&mut self.stacks, stack)?;
        self.of.insert((name, class), self.stacks.len() as u32 - 1);
        Ok(self.stacks.len() - 1)
    }

    fn change(&mut self, at: usize, bytes: u64, before: u64) {
        let stack = &mut self.stacks[at];
        stack.live_bytes = stack.live_bytes.wrapping_add(bytes).wrapping_sub(before);
        stack.total_bytes = stack.total_bytes.saturating_add(bytes.saturating_sub(before));
        self.alive = self.alive.wrapping_add(u128::from(bytes)).wrapping_sub(u128::from(before));
    }

    /// The number of a class or name as a location.
    fn location(&mut self, of: usize) -> u64 {
        if self.numbers[of] == 0 {
            self.given.push(of as u32);
            self.numbers[of] = self.given.len() as u32;
        }
        u64::from(self.numbers[of])
    }

    fn sample(&mut self, at: usize, out: &mut Vec<u8>) {
        let Stack { name, class, blocks, total_bytes, live_bytes, at_peak_bytes } = self.stacks[at];
        let (inner, outer) = (usize::from(class), self.classes.len() + name as usize);
        let ids = [self.location(inner), self.location(outer)];
        let mut body = packed(1, &ids);
        body.extend(packed(2, &[blocks, total_bytes, live_bytes, at_peak_bytes]));
        bytes(out, 2, &body);
    }
}

impl Export for Pprof {
    fn more(&mut self, out: &mut Vec<u8>) -> Result<bool, Error> {
        self.doing = match self.doing {
            Doing::First => match self.read(None)? {
                (true, _) => Doing::First,
                (false, _) => {
                    self.walk.again();
                    self.alive = 0;
                    for stack in &mut self.stacks {
                        (stack.blocks, stack.total_bytes, stack.live_bytes) = (0, 0, 0);
                    }
                    Doing::Second { is_past: false }
                }
            },
            Doing::Second { is_past } => match self.read(Some(is_past))? {
                (true, is_past) => Doing::Second { is_past },
                (false, _) => {
                    let text = |text: &str| TEXTS.iter().position(|one| *one == text).unwrap_or_default() as u64;
                    for (kind, unit) in KINDS {
                        let mut body = Vec::new();
                        number(&mut body, 1, text(kind));
                        number(&mut body, 2, text(unit));
                        bytes(out, 1, &body);
                    }
                    Doing::Samples(0)
                }
            },
            Doing::Samples(at) if at == self.stacks.len() => Doing::Locations(0),
            Doing::Locations(at) if at == self.given.len() => Doing::Functions(0),
            Doing::Functions(at) if at == self.given.len() => {
                TEXTS.iter().for_each(|text| bytes(out, 6, text.as_bytes()));
                Doing::Texts(0)
            }
            Doing::Texts(at) if at == self.given.len() => {
                number(out, 14, TEXTS.len() as u64 - 1);
                return Ok(false);
            }
            mut part => {
                while out.len() < BYTES_AT_ONCE {
                    match &mut part {
                        Doing::Samples(at) if *at < self.stacks.len() => {
                            self.sample(*at, out);
                            *at += 1;
                        }
                        // A location has one line of a function, of the same number.
                        Doing::Locations(at) if *at < self.given.len() => {
                            *at += 1;
                            let (mut line, mut body) = (Vec::new(), Vec::new());
                            number(&mut line, 1, *at as u64);
                            number(&mut body, 1, *at as u64);
                            bytes(&mut body, 4, &line);
                            bytes(out, 4, &body);
                        }
                        Doing::Functions(at) if *at < self.given.len() => {
                            let text = (TEXTS.len() + *at) as u64;
                            *at += 1;
                            let mut body = Vec::new();
                            number(&mut body, 1, *at as u64);
                            number(&mut body, 2, text);
                            number(&mut body, 3, text);
                            bytes(out, 5, &body);
                        }
                        Doing::Texts(at) if *at < self.given.len() => {
                            let of = self.given[*at] as usize;
                            let text = match self.classes.get(of) {
                                Some(class) => class.as_str(),
                                None => self.names.text((of - self.classes.len()) as u32),
                            };
                            bytes(out, 6, text.as_bytes());
                            *at += 1;
                        }
                        _ => break,
                    }
                }
                part
            }
        };
        Ok(true)
    }
}

fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// A field of a message; nothing for a 0, which is the default.
fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    if value > 0 {
        varint(out, field << 3);
        varint(out, value);
    }
}

fn bytes(out: &mut Vec<u8>, field: u64, content: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, content.len() as u64);
    out.extend(content);
}

fn packed(field: u64, values: &[u64]) -> Vec<u8> {
    let (mut content, mut out) = (Vec::new(), Vec::new());
    values.iter().for_each(|&value| varint(&mut content, value));
    bytes(&mut out, field, &content);
    out
}
