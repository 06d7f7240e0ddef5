//! `publish`: hands the counters to the recorder of the `metrics` crate. The names are those of Python's Prometheus
//! collector.

use super::{Histogram, Series, snapshot};
use crate::error::Error;
use crate::settings;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The exponents of the buckets' upper ends: 4 KiB, 16 KiB, ... 64 GiB.
const POWERS: [u32; 13] = [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36];

/// A counter's name, its unit, its help text, and where it stands.
type Counter = (&'static str, Unit, &'static str, fn(&Series) -> u64);

/// What is counted for each name.
const COUNTERS: [Counter; 7] = [
    ("ctxalloc_requests_total", Unit::Count, "Requests that have ended.", |series| series.requests),
    (
        "ctxalloc_requests_refused_total",
        Unit::Count,
        "Ended requests that were refused memory at least once.",
        |series| series.refused_requests,
    ),
    ("ctxalloc_allocations_refused_total", Unit::Count, "Allocations that a limit refused.", |series| {
        series.refused_allocations
    }),
    ("ctxalloc_requests_escaped_total", Unit::Count, "Ended requests that left blocks behind.", |series| {
        series.escaped_requests
    }),
    (
        "ctxalloc_escaped_bytes_total",
        Unit::Bytes,
        "Bytes in blocks that were alive at their request's end.",
        |series| series.escaped_bytes,
    ),
    (
        "ctxalloc_requests_timed_out_total",
        Unit::Count,
        "Requests that waited for their reservation until their time was over.",
        |series| series.timed_out,
    ),
    (
        "ctxalloc_requests_turned_away_total",
        Unit::Count,
        "Requests that could not wait for their reservation.",
        |series| series.turned_away,
    ),
];

const PEAK_MAX: &str = "ctxalloc_request_memory_peak_max_bytes";
const WAITING: &str = "ctxalloc_requests_waiting";
const ACTIVE: &str = "ctxalloc_requests_active";
const USED: &str = "ctxalloc_memory_used_bytes";
const PROCESSES: &str = "ctxalloc_processes";

/// Hands all counters, and what requests have in use, to the recorder that the program has installed for the
/// [`metrics`](::metrics) crate. Call it before each export: where the endpoint renders, or from a timer.
///
/// Without a recorder nothing happens. Each metric has the label `name`. A child of `fork`, whose counters begin anew,
/// adds to what its copy of the recorder has.
///
/// Histograms of that crate take single values, which the counters do not keep. So the peaks are published as
/// Prometheus has them in the end: one counter for each bucket, labelled `le` in bytes, a sum and a count.
///
/// ```
/// # let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
/// # let handle = recorder.handle();
/// # metrics::set_global_recorder(recorder).expect("the only one");
/// // let handle = PrometheusBuilder::new().install_recorder()?;
/// ctxalloc::request().name("thumbnail").begin()?.end();
/// ctxalloc::metrics::publish()?;
/// assert!(handle.render().contains(r#"ctxalloc_requests_total{name="thumbnail"} 1"#));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
///
/// # Errors
/// [`Error::Metrics`] if the directory that `CTXALLOC_METRICS_DIR` names cannot be used. Then nothing is published.
pub fn publish() -> Result<(), Error> {
    let snapshot = snapshot()?;
    describe();
    let pid = std::process::id();
    for (name, values) in published().values.with(|published| published.add(pid, &snapshot.series)) {
        publish_values(&name, &values);
    }
    for series in &snapshot.series {
        gauge!(PEAK_MAX, "name" => series.name.clone()).set(series.max_peak_bytes as f64);
    }
    let all = snapshot.processes.iter().map(|process| process.gauges);
    let [active, live, escaped, waiting] = all.fold([0; 4], |[active, live, escaped, waiting], process| {
        [
            active + process.live_requests,
            live + process.live_bytes,
            escaped + process.escaped_bytes,
            waiting + process.waiting_requests,
        ]
    });
    gauge!(WAITING).set(waiting as f64);
    gauge!(ACTIVE).set(active as f64);
    gauge!(USED, "state" => "live").set(live as f64);
    gauge!(USED, "state" => "escaped").set(escaped as f64);
    gauge!(PROCESSES).set(snapshot.processes.len() as f64);
    Ok(())
}

/// Metrics of a histogram: buckets, sum, count.
const HISTOGRAMS: [[&str; 3]; 3] = [
    [
        "ctxalloc_request_memory_peak_bytes_bucket",
        "ctxalloc_request_memory_peak_bytes_sum",
        "ctxalloc_request_memory_peak_bytes_count",
    ],
    [
        "ctxalloc_request_memory_allocated_bytes_bucket",
        "ctxalloc_request_memory_allocated_bytes_sum",
        "ctxalloc_request_memory_allocated_bytes_count",
    ],
    [
        "ctxalloc_request_wait_microseconds_bucket",
        "ctxalloc_request_wait_microseconds_sum",
        "ctxalloc_request_wait_microseconds_count",
    ],
];

/// The buckets of a histogram, its sum, and its count, of which the last bucket is another name.
const HISTOGRAM_VALUES: usize = POWERS.len() + 2;
const VALUES: usize = COUNTERS.len() + HISTOGRAMS.len() * HISTOGRAM_VALUES;

/// All that counts up for a name, in the order of [`publish_values`].
type Values = [u64; VALUES];

fn values_of(series: &Series) -> Values {
    let counters = COUNTERS.into_iter().map(|(.., value)| value(series));
    let histograms =
        [&series.peak_bytes, &series.total_bytes, &series.waited_micros].into_iter().flat_map(histogram_values);
    let mut all = [0; VALUES];
    all.iter_mut().zip(counters.chain(histograms)).for_each(|(place, value)| *place = value);
    all
}

fn histogram_values(histogram: &Histogram) -> impl Iterator<Item = u64> {
    let at_most = |power: u32| histogram.at_most(1 << power);
    POWERS.into_iter().map(at_most).chain([histogram.sum, histogram.count()])
}

fn publish_values(name: &str, values: &Values) {
    let (counters, histograms) = values.split_at(COUNTERS.len());
    for ((metric, ..), value) in COUNTERS.into_iter().zip(counters) {
        counter!(metric, "name" => name.to_owned()).absolute(*value);
    }
    for ([bucket, sum, count], values) in HISTOGRAMS.into_iter().zip(histograms.chunks(HISTOGRAM_VALUES)) {
        let (at_most, rest) = values.split_at(HISTOGRAM_VALUES - 2);
        for (power, value) in POWERS.into_iter().zip(at_most) {
            counter!(bucket, "name" => name.to_owned(), "le" => (1_u64 << power).to_string()).absolute(*value);
        }
        counter!(bucket, "name" => name.to_owned(), "le" => "+Inf").absolute(rest[1]);
        counter!(sum, "name" => name.to_owned()).absolute(rest[0]);
        counter!(count, "name" => name.to_owned()).absolute(rest[1]);
    }
}

/// What was published to the recorder.
#[derive(Default)]
struct Published {
    /// The process that was counted.
    pid: u32,
    names: BTreeMap<String, Counted>,
}

/// What was published under a name: `before + now`.
struct Counted {
    /// What this process's parents had counted.
    before: Values,
    /// What the counters have.
    now: Values,
}

impl Published {
    /// What to publish for these.
    fn add(&mut self, pid: u32, all: &[Series]) -> Vec<(String, Values)> {
        if self.pid != pid {
            // A child of `fork`: its recorder is a copy, and its counters begin anew, except where they are shared.
            self.pid = pid;
            let own = if settings::metrics_dir().is_none() { &mut self.names } else { &mut BTreeMap::new() };
            own.values_mut().for_each(Counted::begin_anew);
        }
        for series in all {
            let zeros = || Counted { before: [0; VALUES], now: [0; VALUES] };
            self.names.entry(series.name.clone()).or_insert_with(zeros).now = values_of(series);
        }
        self.names.iter().map(|(name, counted)| (name.clone(), counted.sum())).collect()
    }
}

impl Counted {
    fn begin_anew(&mut self) {
        self.before = self.sum();
        self.now = [0; VALUES];
    }

    fn sum(&self) -> Values {
        std::array::from_fn(|at| self.before[at].wrapping_add(self.now[at]))
    }
}

struct Recorder {
    values: Locked<Published>,
}

impl HeldAcrossFork for Recorder {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.values.lock());
    }
}

fn published() -> &'static Recorder {
    static PUBLISHED: Made<Arc<Recorder>> = Made::new();
    PUBLISHED.get_or_make(|| held_across_fork(Recorder { values: Locked::new(Published::default()) }))
}

/// Cheap, and each time: the recorder may have been installed since.
fn describe() {
    for (metric, unit, text, _) in COUNTERS {
        describe_counter!(metric, unit, text);
    }
    describe_gauge!(PEAK_MAX, Unit::Bytes, "The largest peak of one request.");
    describe_gauge!(WAITING, Unit::Count, "Requests that wait for their reservation.");
    describe_gauge!(ACTIVE, Unit::Count, "Requests that have not ended.");
    describe_gauge!(USED, Unit::Bytes, "Bytes in live blocks of requests, by whether they have ended.");
    describe_gauge!(PROCESSES, Unit::Count, "Processes that count.");
}
