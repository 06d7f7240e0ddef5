//! `publish`: hands the counters to the recorder of the `metrics` crate. The names are those of Python's Prometheus
//! collector.

use super::ends::buckets;
use super::{Series, made_room, snapshot};
use crate::error::Error;
use crate::settings;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};
use std::collections::BTreeMap;
use std::sync::Arc;

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

/// What whole requests have beside these. Whose processes have none has no such metrics.
const WHOLE: &str = "ctxalloc_requests_whole_total";
const PARTS: &str = "ctxalloc_request_memory_part_bytes_total";
#[cfg(ctxalloc_whole)]
const NOBODYS: &str = "ctxalloc_memory_nobodys_bytes";

const PEAK_MAX: &str = "ctxalloc_request_memory_peak_max_bytes";
const WAITING: &str = "ctxalloc_requests_waiting";
const VICTIMS: &str = "ctxalloc_room_victims_total";
const RECLAIMED: &str = "ctxalloc_room_reclaimed_bytes_total";
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
/// Prometheus has them in the end: one counter for each bucket, labelled `le` in bytes, a sum and a count. A name has
/// buckets that end at 4 KiB, 64 KiB, ... 64 GiB, and four for each doubling in which it has values.
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
    let all = published().values.with(|published| published.add(pid, &snapshot.series));
    all.iter().for_each(publish_series);
    publish_whole(&all);
    for series in &snapshot.series {
        gauge!(PEAK_MAX, "name" => series.name.clone()).set(series.max_peak_bytes as f64);
    }
    let gauges = snapshot.processes.iter().map(|process| process.gauges);
    let [active, live, escaped, waiting] = gauges.fold([0; 4], |[active, live, escaped, waiting], process| {
        [
            active + process.live_requests,
            live + process.live_bytes,
            escaped + process.escaped_bytes,
            waiting + process.waiting_requests,
        ]
    });
    gauge!(WAITING).set(waiting as f64);
    let made = made_room();
    counter!(VICTIMS).absolute(made.victims);
    counter!(RECLAIMED).absolute(made.reclaimed_bytes);
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

fn publish_series(series: &Series) {
    for (metric, .., value) in COUNTERS {
        counter!(metric, "name" => series.name.clone()).absolute(value(series));
    }
    for ([bucket, sum, count], histogram) in
        HISTOGRAMS.into_iter().zip([&series.peak_bytes, &series.total_bytes, &series.waited_micros])
    {
        for (end, at_most) in buckets(histogram) {
            counter!(bucket, "name" => series.name.clone(), "le" => end.to_string()).absolute(at_most);
        }
        counter!(bucket, "name" => series.name.clone(), "le" => "+Inf").absolute(histogram.count());
        counter!(sum, "name" => series.name.clone()).absolute(histogram.sum);
        counter!(count, "name" => series.name.clone()).absolute(histogram.count());
    }
}

/// Of requests that counted native memory and Python objects too: how many, and what their peaks were made of.
fn publish_whole(all: &[Series]) {
    if all.iter().any(|series| series.whole_requests > 0) {
        describe_whole();
        for series in all {
            counter!(WHOLE, "name" => series.name.clone()).absolute(series.whole_requests);
        }
    }
    for series in all.iter().filter(|series| series.whole_requests > 0) {
        for (part, bytes) in [
            ("arrays", series.whole_array_bytes),
            ("native", series.whole_native_bytes),
            ("objects", series.whole_object_bytes),
        ] {
            counter!(PARTS, "name" => series.name.clone(), "part" => part).absolute(bytes);
        }
    }
    #[cfg(ctxalloc_whole)]
    for (thread, bytes) in crate::whole::by_group() {
        describe_gauge!(
            NOBODYS,
            Unit::Bytes,
            "Native memory and objects that this process asked for and that no request was charged, so far."
        );
        gauge!(NOBODYS, "thread" => thread).set(bytes as f64);
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
#[derive(Default)]
struct Counted {
    /// What this process's parents had counted.
    before: Series,
    /// What the counters have.
    now: Series,
}

impl Published {
    /// What to publish for these.
    fn add(&mut self, pid: u32, all: &[Series]) -> Vec<Series> {
        if self.pid != pid {
            // A child of `fork`: its recorder is a copy, and its counters begin anew, except where they are shared.
            self.pid = pid;
            let own = if settings::metrics_dir().is_none() { &mut self.names } else { &mut BTreeMap::new() };
            own.values_mut().for_each(Counted::begin_anew);
        }
        for series in all {
            self.names.entry(series.name.clone()).or_default().now = series.clone();
        }
        self.names.iter().map(|(name, counted)| Series { name: name.clone(), ..counted.sum() }).collect()
    }
}

impl Counted {
    fn begin_anew(&mut self) {
        self.before = self.sum();
        self.now = Series::default();
    }

    fn sum(&self) -> Series {
        let mut sum = self.before.clone();
        sum.add(&self.now);
        sum
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
    describe_counter!(VICTIMS, Unit::Count, "Requests of this process that were chosen to make room for others.");
    describe_counter!(RECLAIMED, Unit::Bytes, "Bytes that came back in this process while reclaimers ran.");
    describe_gauge!(WAITING, Unit::Count, "Requests that wait for their reservation.");
    describe_gauge!(ACTIVE, Unit::Count, "Requests that have not ended.");
    describe_gauge!(USED, Unit::Bytes, "Bytes in live blocks of requests, by whether they have ended.");
    describe_gauge!(PROCESSES, Unit::Count, "Processes that count.");
}

fn describe_whole() {
    describe_counter!(WHOLE, Unit::Count, "Ended requests that counted native memory and objects too.");
    describe_counter!(
        PARTS,
        Unit::Bytes,
        "What of the peaks of requests that counted it was arrays, native memory and objects."
    );
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use crate::counters::{Sample, record};

    fn rendered() -> String {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        ::metrics::with_local_recorder(&recorder, publish).expect("CTXALLOC_METRICS_DIR is not set");
        recorder.handle().render()
    }

    /// Only the binding begins such requests. A program of Rust reads them where its process has one, and where
    /// workers of Python share their counters with it.
    #[test]
    fn whole_requests_and_their_parts_are_published_as_in_python() {
        record(Some("arrays only"), &Sample { peak_bytes: 700, ..Sample::default() });
        for _ in 0..2 {
            let whole = Some([100, 20, 3]);
            record(Some("decode"), &Sample { peak_bytes: 123, whole, ..Sample::default() });
        }
        let page = rendered();
        for line in [
            "ctxalloc_requests_whole_total{name=\"decode\"} 2",
            "ctxalloc_requests_whole_total{name=\"arrays only\"} 0",
            "ctxalloc_request_memory_part_bytes_total{name=\"decode\",part=\"arrays\"} 200",
            "ctxalloc_request_memory_part_bytes_total{name=\"decode\",part=\"native\"} 40",
            "ctxalloc_request_memory_part_bytes_total{name=\"decode\",part=\"objects\"} 6",
        ] {
            assert!(page.lines().any(|found| found == line), "no line {line:?} in {page}");
        }
        assert!(!page.contains("part_bytes_total{name=\"arrays only\""), "it has no parts: {page}");
    }

    #[cfg(ctxalloc_whole)]
    #[test]
    fn what_is_nobodys_is_published_by_thread() {
        crate::unattributed::join_nobodys(0).fetch_add(5000, std::sync::atomic::Ordering::Relaxed);
        let page = rendered();
        let line = "ctxalloc_memory_nobodys_bytes{thread=\"other threads\"} 5000";
        assert!(page.lines().any(|found| found == line), "no line {line:?} in {page}");
    }
}
