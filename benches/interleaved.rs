//! How the Rust benches measure: every variant in turn, round after round, in one run; the median of each. Noise that
//! comes and goes then hits all of them alike, and the ratios hold where single times do not.

use std::fmt::Write as _;
use std::fs;
use std::time::Instant;

const ROUNDS: usize = 101;

/// One thing measured against others.
pub(crate) struct Group {
    name: String,
    repeats: u32,
    /// How many operations one run of a variant is.
    operations: usize,
    variants: Vec<Variant>,
}

type Variant = (&'static str, Box<dyn FnMut()>);

impl Group {
    /// A group whose variants run `repeats` times a round.
    pub(crate) fn new(name: impl Into<String>, repeats: u32) -> Self {
        Self { name: name.into(), repeats, operations: 1, variants: Vec::new() }
    }

    /// A run of a variant is that many operations; times are those of one.
    #[allow(dead_code, reason = "one of several benches needs it")]
    pub(crate) fn per(mut self, operations: usize) -> Self {
        self.operations = operations;
        self
    }

    /// Adds a variant; the first one is what the others are compared with.
    pub(crate) fn add(mut self, name: &'static str, work: impl FnMut() + 'static) -> Self {
        self.variants.push((name, Box::new(work)));
        self
    }

    /// Measures, prints a table, and returns the rows for the file.
    pub(crate) fn run(mut self) -> String {
        let mut rounds = vec![Vec::with_capacity(ROUNDS); self.variants.len()];
        for _ in 0..ROUNDS {
            for ((_, work), times) in self.variants.iter_mut().zip(&mut rounds) {
                let begun = Instant::now();
                for _ in 0..self.repeats {
                    work();
                }
                times.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(self.repeats) / self.operations as f64);
            }
        }
        println!("\n{}\n{:<44} {:>9} {:>9} {:>9} {:>7}", self.name, "", "median", "quarter", "three q.", "ratio");
        let mut rows = String::new();
        let mut base = None;
        for ((name, _), times) in self.variants.iter().zip(&mut rounds) {
            times.sort_by(f64::total_cmp);
            let [low, median, high] = [ROUNDS / 4, ROUNDS / 2, ROUNDS * 3 / 4].map(|at| times[at]);
            let base = *base.get_or_insert(median);
            println!("{name:<44} {median:>6.2} ns {low:>6.2} ns {high:>6.2} ns {:>6.2}x", median / base);
            let group = &self.name;
            let _ = writeln!(
                rows,
                "{{\"group\": \"{group}\", \"variant\": \"{name}\", \"median_ns\": {median:.3}, \"quarter_ns\": {low:.3}, \"three_quarters_ns\": {high:.3}}}"
            );
        }
        rows
    }
}

/// Keeps the rows of a bench in `target/bench/<name>.jsonl`.
pub(crate) fn keep(name: &str, rows: &str) -> std::io::Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/target/bench");
    fs::create_dir_all(folder)?;
    fs::write(format!("{folder}/{name}.jsonl"), rows)
}
