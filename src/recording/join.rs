//! Puts the events of all processes in the order of time, each request, block and thread with a number of its own.

use super::encoded::Process;
use super::event::{Event, What};
use super::gaps::Gap;
use super::run::Run;
use std::collections::{HashMap, HashSet};

/// All that the files say.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Those of whom it can be read.
    pub(super) processes: Vec<Process>,
    /// How many recorded.
    pub(super) process_count: usize,
    pub(super) names: Vec<String>,
    pub(super) handlers: Vec<String>,
    pub(super) events: Vec<Event>,
    /// The highest number that was one in so many.
    pub(super) highest_one_in: u64,
    /// Requests whose name, or whose handler's, stands for several.
    pub(super) other_requests: u64,
    pub(super) is_cut_off: bool,
    /// Events whose request or block began in what was dropped.
    pub(super) skipped: usize,
    pub(super) gaps: Vec<Gap>,
    /// Requests whose events may not all be there, though their end is.
    pub(super) torn: HashSet<u64>,
    pub(super) file_bytes: u64,
}

/// The events of all processes, each request, block and thread with a number that no other one has.
pub(super) fn join(mut read: Content, mut runs: Vec<Run>) -> Result<Content, &'static str> {
    const TOO_HIGH: &str = "the numbers of its requests, blocks or times are too high";
    let began_of = |run: &Run| run.process.as_ref().map(|process| process.began_unix_ns);
    let began = runs.iter().filter_map(began_of).min().unwrap_or_default();
    let unknown = |texts: &mut Vec<String>| {
        texts.push("?".to_owned());
        texts.len() as u32 - 1
    };
    let (mut no_name, mut no_handler) = (None, None);
    let (mut requests, mut blocks, mut threads) = (0_u64, 0_u64, 0_u32);
    for run in &mut runs {
        read.is_cut_off |= !run.is_closed;
        let later = began_of(run).unwrap_or(began) - began;
        let (mut highest_request, mut highest_block, mut highest_thread) = (requests, blocks, threads);
        for event in &mut run.events {
            event.at_ns = event.at_ns.checked_add(later).ok_or(TOO_HIGH)?;
            event.request = event.request.checked_add(requests).ok_or(TOO_HIGH)?;
            event.thread = event.thread.checked_add(threads).ok_or(TOO_HIGH)?;
            highest_request = highest_request.max(event.request);
            highest_thread = highest_thread.max(event.thread);
            match &mut event.what {
                What::Begin { name, handler, parent } => {
                    let is_other = |number: u32, other| Some(u64::from(number)) == other;
                    let is_one = is_other(*name, run.other_name) || is_other(*handler, run.other_handler);
                    read.other_requests += u64::from(is_one);
                    *name = match run.names.get(&u64::from(*name)) {
                        Some(&known) => known,
                        None => *no_name.get_or_insert_with(|| unknown(&mut read.names)),
                    };
                    *handler = match run.handlers.get(&u64::from(*handler)) {
                        Some(&known) => known,
                        None => *no_handler.get_or_insert_with(|| unknown(&mut read.handlers)),
                    };
                    if *parent > 0 {
                        *parent = parent.checked_add(requests).ok_or(TOO_HIGH)?;
                    }
                }
                What::Allocate { block, .. } | What::Resize { block, .. } | What::Free { block } => {
                    *block = block.checked_add(blocks).ok_or(TOO_HIGH)?;
                    highest_block = highest_block.max(*block);
                }
                What::Refused { by, .. } if *by > 0 => *by = by.checked_add(requests).ok_or(TOO_HIGH)?,
                What::Refused { .. } | What::End { .. } => {}
            }
        }
        // Not copied where it is all there is.
        if read.events.is_empty() {
            read.events = std::mem::take(&mut run.events);
        } else {
            read.events.append(&mut run.events);
        }
        read.torn.extend(run.torn.iter().filter_map(|request| request.checked_add(requests)));
        (requests, blocks, threads) = (highest_request, highest_block, highest_thread);
    }
    read.process_count = runs.len();
    read.processes = runs.into_iter().filter_map(|run| run.process).collect();
    read.events.sort_by_key(|event| event.at_ns);
    let before = read.events.len();
    keep_whole(&mut read.events);
    read.skipped = before - read.events.len();
    Ok(read)
}

/// Drops events of requests and blocks whose beginning is not there (it was in a file that rotation removed, or in a
/// gap), and those that are there twice: a request never has two at one time.
fn keep_whole(events: &mut Vec<Event>) {
    // When each request had its last event.
    let mut begun: HashMap<u64, u64> = HashMap::new();
    let (mut ended, mut live, mut made) = (HashSet::new(), HashMap::new(), HashSet::new());
    events.retain_mut(|event| {
        if let What::Begin { parent, .. } = &mut event.what {
            if !begun.contains_key(parent) {
                *parent = 0; // so nothing is inside of itself
            }
            let is_new = !begun.contains_key(&event.request);
            begun.entry(event.request).or_insert(event.at_ns);
            return is_new;
        }
        let Some(last) = begun.get_mut(&event.request) else { return false };
        if *last == event.at_ns {
            return false;
        }
        *last = event.at_ns;
        if let What::Refused { by, .. } = &mut event.what
            && !begun.contains_key(by)
        {
            *by = 0;
        }
        match event.what {
            What::Allocate { block, .. } => {
                let is_new = made.insert(block);
                if is_new {
                    live.insert(block, event.request);
                }
                is_new
            }
            What::Resize { block, .. } => live.get(&block) == Some(&event.request),
            What::Free { block } => {
                let is_its = live.get(&block) == Some(&event.request);
                if is_its {
                    live.remove(&block);
                }
                is_its
            }
            What::End { .. } => ended.insert(event.request),
            What::Begin { .. } | What::Refused { .. } => true,
        }
    });
}
