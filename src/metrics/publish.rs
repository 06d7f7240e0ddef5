//! `publish`: hands the counters to the recorder of the `metrics` crate. The names are those of Python's Prometheus collector.

use super::{BUCKETS, Histogram, Series, snapshot};
use crate::error::Error;
use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

/// The exponents of the buckets' upper ends: 4 KiB, 16 KiB, ... 64 GiB.
const POWERS: std::ops::RangeInclusive<usize> = 12..=36;

/// Hands all counters, and what requests have in use, to the recorder that the program has installed for the
/// [`metrics`](::metrics) crate. Call it before each export: where the endpoint renders, or from a timer.
///
/// Without a recorder nothing happens. Each metric has the label `name`, of which there are at most 128 with
/// [`OTHER`](super::OTHER) and [`UNNAMED`](super::UNNAMED). A recorder forgets nothing by itself: a name that was folded into
/// `other` keeps its last values there until the recorder's own idle timeout.
///
/// Histograms of that crate take single values, which the counters do not keep. So the peaks are published as Prometheus has
/// them in the end: one counter for each bucket, labelled `le` in bytes, a sum and a count.
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
    snapshot.series.iter().for_each(publish_series);
    let all = snapshot.processes.iter().map(|process| process.gauges);
    let [active, live, escaped] = all.fold([0, 0, 0], |[active, live, escaped], process| {
        [active + process.live_requests, live + process.live_bytes, escaped + process.escaped_bytes]
    });
    gauge!("ctxalloc_requests_active").set(active as f64);
    gauge!("ctxalloc_memory_used_bytes", "state" => "live").set(live as f64);
    gauge!("ctxalloc_memory_used_bytes", "state" => "escaped").set(escaped as f64);
    gauge!("ctxalloc_processes").set(snapshot.processes.len() as f64);
    Ok(())
}

fn publish_series(series: &Series) {
    let counters = [
        ("ctxalloc_requests_total", series.requests),
        ("ctxalloc_requests_refused_total", series.refused_requests),
        ("ctxalloc_allocations_refused_total", series.refused_allocations),
        ("ctxalloc_requests_escaped_total", series.escaped_requests),
        ("ctxalloc_escaped_bytes_total", series.escaped_bytes),
    ];
    for (metric, value) in counters {
        counter!(metric, "name" => series.name.clone()).absolute(value);
    }
    gauge!("ctxalloc_request_memory_peak_max_bytes", "name" => series.name.clone()).set(series.max_peak_bytes as f64);
    let peaks = [
        "ctxalloc_request_memory_peak_bytes_bucket",
        "ctxalloc_request_memory_peak_bytes_sum",
        "ctxalloc_request_memory_peak_bytes_count",
    ];
    publish_histogram(peaks, &series.name, &series.peak_bytes);
    let totals = [
        "ctxalloc_request_memory_allocated_bytes_bucket",
        "ctxalloc_request_memory_allocated_bytes_sum",
        "ctxalloc_request_memory_allocated_bytes_count",
    ];
    publish_histogram(totals, &series.name, &series.total_bytes);
}

fn publish_histogram([bucket, sum, count]: [&'static str; 3], name: &str, histogram: &Histogram) {
    for power in POWERS.step_by(2) {
        let at_most: u64 = histogram.counts[..=power].iter().sum();
        counter!(bucket, "name" => name.to_owned(), "le" => (1_u64 << power).to_string()).absolute(at_most);
    }
    counter!(bucket, "name" => name.to_owned(), "le" => "+Inf").absolute(histogram.count());
    counter!(sum, "name" => name.to_owned()).absolute(histogram.sum);
    counter!(count, "name" => name.to_owned()).absolute(histogram.count());
}

/// Cheap, and each time: the recorder may have been installed since.
fn describe() {
    describe_counter!("ctxalloc_requests_total", Unit::Count, "Requests that have ended.");
    describe_counter!(
        "ctxalloc_requests_refused_total",
        Unit::Count,
        "Ended requests that were refused memory at least once."
    );
    describe_counter!("ctxalloc_allocations_refused_total", Unit::Count, "Allocations that a limit refused.");
    describe_counter!("ctxalloc_requests_escaped_total", Unit::Count, "Ended requests that left blocks behind.");
    describe_counter!(
        "ctxalloc_escaped_bytes_total",
        Unit::Bytes,
        "Bytes in blocks that were alive at their request's end."
    );
    describe_gauge!("ctxalloc_request_memory_peak_max_bytes", Unit::Bytes, "The largest peak of one request.");
    describe_gauge!("ctxalloc_requests_active", Unit::Count, "Requests that have not ended.");
    describe_gauge!(
        "ctxalloc_memory_used_bytes",
        Unit::Bytes,
        "Bytes in live blocks of requests, by whether they have ended."
    );
    describe_gauge!("ctxalloc_processes", Unit::Count, "Processes that count.");
}

const _: () = assert!(*POWERS.end() < BUCKETS);
