//! Sums by the code that made blocks: what lives, what lived at the peak of all, and what was made at all. The profile
//! of a program (`profile`) and that of one request (`sited`) are such sums.

use crate::strategy::Place;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes that live, their peak, at the peak of all, in all, and how many blocks.
pub(super) type SumNumbers = (usize, usize, usize, u64, u64);
pub(super) type SiteNumbers = (Vec<(String, u32, String)>, SumNumbers);

/// What one site, one handler, or all of them allocated.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    live_bytes: usize,
    /// The largest value of `live_bytes`.
    peak_bytes: usize,
    /// `live_bytes` at the peak of all together with the number `seen_peak`; see [`Profile::peaks`].
    at_peak_bytes: usize,
    seen_peak: u64,
    total_bytes: u64,
    count: u64,
}

impl Sums {
    /// Notes what it had at the last peak of all. Before each change: since that peak nothing has changed.
    fn note(&mut self, peaks: u64) {
        if self.seen_peak < peaks {
            self.seen_peak = peaks;
            self.at_peak_bytes = self.live_bytes;
        }
    }

    fn add(&mut self, bytes: usize, blocks: u64, peaks: u64) {
        self.note(peaks);
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.total_bytes += bytes as u64;
        self.count += blocks;
    }

    fn numbers(&self) -> SumNumbers {
        (self.live_bytes, self.peak_bytes, self.at_peak_bytes, self.total_bytes, self.count)
    }
}

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Array = 0,
    #[cfg_attr(not(ctxalloc_whole), allow(dead_code, reason = "only whole requests have these"))]
    Native = 1,
    #[cfg_attr(not(ctxalloc_whole), allow(dead_code, reason = "only whole requests have these"))]
    Object = 2,
}

pub(super) struct Block {
    pub(super) bytes: usize,
    site: usize,
    handler: usize,
}

struct Site {
    place: Option<Arc<Place>>,
    part: Part,
    sums: Sums,
}

/// Who made what, among the blocks that it is told of.
#[derive(Default)]
pub(super) struct Profile {
    pub(super) blocks: HashMap<usize, Block>,
    /// By the address of the place, which is kept in `sites`; 0 where no Python code runs.
    sites_by_place: HashMap<(usize, Part), usize>,
    sites: Vec<Site>,
    handlers_by_name: HashMap<String, usize>,
    handlers: Vec<(String, Sums)>,
    /// By [`Part`].
    parts: [Sums; 3],
    all: Sums,
    pub(super) refused: u64,
    /// How often all sites together had more than ever before. What each had at the last of these peaks is exact, and
    /// costs no walk over the sites: [`Sums::note`].
    peaks: u64,
}

impl Profile {
    fn note_peak(&mut self) {
        let sites = self.sites.iter_mut().map(|site| &mut site.sums);
        let handlers = self.handlers.iter_mut().map(|(_, sums)| sums);
        sites.chain(handlers).chain(&mut self.parts).chain([&mut self.all]).for_each(|sums| sums.note(self.peaks));
    }

    pub(super) fn add(&mut self, address: usize, bytes: usize, blocks: u64, site: usize, handler: usize) {
        if let Some(forgotten) = self.blocks.insert(address, Block { bytes: 0, site, handler }) {
            self.subtract(&forgotten); // its end was not reported
        }
        if let Some(block) = self.blocks.get_mut(&address) {
            block.bytes = bytes;
        }
        let peak_bytes = self.all.peak_bytes;
        let (peaks, sums) = (self.peaks, self.sums_of(site, handler));
        sums.into_iter().for_each(|sums| sums.add(bytes, blocks, peaks));
        if self.all.peak_bytes > peak_bytes {
            self.peaks += 1;
        }
    }

    pub(super) fn subtract(&mut self, block: &Block) {
        let (peaks, sums) = (self.peaks, self.sums_of(block.site, block.handler));
        for sums in sums {
            sums.note(peaks);
            sums.live_bytes = sums.live_bytes.saturating_sub(block.bytes);
        }
    }

    /// All sums that a block is in.
    fn sums_of(&mut self, site: usize, handler: usize) -> [&mut Sums; 4] {
        let site = &mut self.sites[site];
        let part = &mut self.parts[site.part as usize];
        [&mut site.sums, part, &mut self.handlers[handler].1, &mut self.all]
    }

    pub(super) fn site(&mut self, place: Option<Arc<Place>>, part: Part) -> usize {
        let key = place.as_ref().map_or(0, |place| Arc::as_ptr(place).addr());
        *self.sites_by_place.entry((key, part)).or_insert_with(|| {
            self.sites.push(Site { place, part, sums: Sums::default() });
            self.sites.len() - 1
        })
    }

    pub(super) fn handler(&mut self, name: String) -> usize {
        if let Some(known) = self.handlers_by_name.get(&name) {
            return *known;
        }
        self.handlers.push((name.clone(), Sums::default()));
        self.handlers_by_name.insert(name, self.handlers.len() - 1);
        self.handlers.len() - 1
    }

    /// A block has moved to `address` and has so many bytes: it belongs to whoever made it, and adds what it grew by.
    pub(super) fn resize(&mut self, block: Block, address: usize, size_bytes: usize) {
        let grown = size_bytes.saturating_sub(block.bytes);
        self.subtract(&Block { bytes: block.bytes.saturating_sub(size_bytes), ..block });
        self.add(address, grown, 0, block.site, block.handler);
        if let Some(resized) = self.blocks.get_mut(&address) {
            resized.bytes = size_bytes;
        }
    }

    /// The sums of all.
    pub(super) fn all(&mut self) -> SumNumbers {
        self.note_peak();
        self.all.numbers()
    }

    /// The sums of arrays, of native memory and of objects.
    pub(super) fn parts(&mut self) -> Vec<SumNumbers> {
        self.note_peak();
        self.parts.iter().map(Sums::numbers).collect()
    }

    /// What each of [`sites`](Self::sites) is the site of, as a number of [`parts`](Self::parts).
    pub(super) fn parts_of_sites(&self) -> Vec<usize> {
        self.sites.iter().map(|site| site.part as usize).collect()
    }

    /// The sites, the innermost frame of each first.
    pub(super) fn sites(&mut self) -> Vec<SiteNumbers> {
        self.note_peak();
        let frames = |place: &Option<Arc<Place>>| {
            let frames = place.iter().flat_map(|place| &*place.frames);
            frames.map(|frame| (frame.file.to_string(), frame.line, frame.function.to_string())).collect()
        };
        self.sites.iter().map(|site| (frames(&site.place), site.sums.numbers())).collect()
    }

    pub(super) fn handlers(&mut self) -> Vec<(String, SumNumbers)> {
        self.note_peak();
        self.handlers.iter().map(|(name, sums)| (name.clone(), sums.numbers())).collect()
    }
}
