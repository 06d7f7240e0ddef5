//! Recordings, from Python: `ctxalloc.record`, and what `ctxalloc trace` reads.

use super::options::{argument, no_bool};
use super::text::repr_of;
use crate::recording::{
    Event, Gap, Options, Reading, Recorder, Recording, Sums, What, record as record_into, record_as, stop_any,
};
use crate::tune::trace::{Export, Info, Perfetto, Pprof, Quantiles, Rmm};
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Records what requests of this process ask of memory, whole requests by name, into a file for ``ctxalloc trace`` and
/// ``ctxalloc replay``, until it is stopped::
///
///     with ctxalloc.record("service.trace"):
///         serve()
///
/// ``one_in``: one request in so many, chosen at random, with all requests inside of it. ``share``: which part of one
/// processor's time recording may take; where it takes more, fewer requests are recorded. 1: it is not looked at.
/// ``max_bytes``: the most bytes of this process's files; at half of it the file is put aside (``service.trace.old``),
/// in place of the one that was put aside before.
///
/// Requests that have begun already are not recorded. The file has names, sizes and times; no data and no addresses.
/// If it is a recording already it is appended to; other processes that record below the same name, and children of
/// ``fork``, have files of their own beside it (``service.trace.1``), which are read with it.
///
/// OSError: this process records already, or the file cannot be written. ValueError: a value is out of its range.
#[pyfunction]
#[pyo3(
    signature = (path, /, *, one_in=None, share=None, max_bytes=None),
    text_signature = "(path, /, *, one_in=10, share=0.01, max_bytes=268435456)"
)]
pub(super) fn record<'py>(
    py: Python<'py>,
    path: &Bound<'py, PyAny>,
    one_in: Option<&Bound<'py, PyAny>>,
    share: Option<&Bound<'py, PyAny>>,
    max_bytes: Option<&Bound<'py, PyAny>>,
) -> PyResult<PyRecorder> {
    let named = py.import("os")?.call_method1("fspath", (path,))?;
    if named.is_instance_of::<PyBytes>() {
        let named = repr_of(&named)?;
        let said = format!("record({named}): this is a path of bytes; give os.fsdecode({named})");
        return Err(PyTypeError::new_err(said));
    }
    let path: PathBuf = named.extract()?;
    let mut options = Options::default();
    let expected = format!("an int from 1 to {}: one request in so many", u32::MAX);
    if let Some(number) = argument("record", "one_in", one_in, expected, |value| no_bool(value)?.extract())? {
        options.one_in = number;
    }
    let expected = "a number above 0, and 1 at most";
    if let Some(part) = argument("record", "share", share, expected, |value| no_bool(value)?.extract())? {
        options.share = part;
    }
    let expected = format!("an int from 65536 to {}", u64::MAX);
    if let Some(bytes) = argument("record", "max_bytes", max_bytes, expected, |value| no_bool(value)?.extract())? {
        options.max_bytes = bytes;
    }
    let recorder = py.detach(|| record_into(path, options))?;
    Ok(PyRecorder(Mutex::new(Some(recorder))))
}

/// As ``record`` of all requests, for a program whose own request begins next and has all others inside of it.
///
/// OSError: as of ``record``.
#[pyfunction]
#[pyo3(name = "_record_program", signature = (path, /))]
pub(super) fn record_program(py: Python<'_>, path: PathBuf) -> PyResult<PyRecorder> {
    let options = Options { one_in: 1, ..Options::default() };
    let recorder = py.detach(|| record_as(&path, options, true))?;
    Ok(PyRecorder(Mutex::new(Some(recorder))))
}

/// Ends the recording that runs, at the interpreter's exit: nothing of it is missing then.
#[pyfunction]
#[pyo3(name = "_stop_recording")]
pub(super) fn stop_recording(py: Python<'_>) {
    py.detach(stop_any);
}

/// A recording that runs: what ``record`` returns. ``with`` stops it at its end.
#[pyclass(name = "Recorder", module = "ctxalloc", frozen)]
pub(super) struct PyRecorder(Mutex<Option<Recorder>>);

#[pymethods]
impl PyRecorder {
    /// Ends the recording; a second time does nothing. Requests that are open have no end in it. Where its file could
    /// not be written, a line on standard error has said so, and this does nothing. In a child of ``fork`` it ends the
    /// child's recording, and not that of its parent.
    fn stop(&self, py: Python<'_>) {
        let recorder = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(recorder) = recorder {
            let _ = py.detach(|| recorder.stop());
        }
    }

    /// RuntimeError: it was stopped.
    fn __enter__(this: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        if this.get().0.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return Err(PyRuntimeError::new_err("this recording was stopped; ctxalloc.record begins another one"));
        }
        Ok(this)
    }

    #[pyo3(signature = (kind, error, trace, /))]
    fn __exit__(&self, py: Python<'_>, kind: &Bound<'_, PyAny>, error: &Bound<'_, PyAny>, trace: &Bound<'_, PyAny>) {
        let _ = (kind, error, trace);
        self.stop(py);
    }
}

/// The numbers of an event, after its time, thread, request and kind.
type EventNumbers = (u64, u32, u64, &'static str, Vec<u64>);

fn numbers(event: Event) -> EventNumbers {
    let (kind, numbers) = match event.what {
        What::Begin { name, handler, parent } => ("begin", vec![u64::from(name), u64::from(handler), parent]),
        What::Allocate { block, bytes, align, zeroed } => {
            ("allocate", vec![block, bytes, u64::from(align), u64::from(zeroed)])
        }
        What::Resize { block, bytes, moved } => ("resize", vec![block, bytes, u64::from(moved)]),
        What::Free { block } => ("free", vec![block]),
        What::Refused { bytes, by } => ("refused", vec![bytes, by]),
        What::End { sums, page_faults, processor_ns } => {
            let Sums { peak_bytes, total_bytes, blocks, live_bytes, refused, .. } = sums;
            let sums = [peak_bytes, total_bytes, blocks, live_bytes, refused];
            ("end", sums.into_iter().chain(page_faults).chain(processor_ns).collect())
        }
    };
    (event.at_ns, event.thread, event.request, kind, numbers)
}

type HeaderNumbers = (String, String, u64, u64, u64, u64, u64, f64, usize, u64, u64, u64);

/// A gap: its file, offset, bytes, places and reason.
type GapNumbers = (String, u64, u64, u64, String);

fn gaps_of(recording: &Recording) -> Vec<GapNumbers> {
    let numbers = |gap: &Gap| (gap.file.clone(), gap.offset, gap.bytes, gap.places, gap.reason.clone());
    recording.gaps().iter().map(numbers).collect()
}

/// A recording that was read.
#[pyclass(name = "_Recording", module = "ctxalloc", frozen)]
pub(super) struct PyRecording {
    recording: Arc<Recording>,
    /// How many events were read last, and where that is: who goes on there need not begin anew.
    read: Mutex<(usize, Reading)>,
}

impl PyRecording {
    pub(super) fn recording(&self) -> &Recording {
        &self.recording
    }
}

#[pymethods]
impl PyRecording {
    /// OSError: there is none, or it cannot be read. ValueError: it is something else, or nothing of it can be read.
    #[new]
    #[pyo3(signature = (path, /))]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self { recording: Arc::new(py.detach(|| Recording::open(path))?), read: Mutex::default() })
    }

    #[getter]
    fn names(&self) -> Vec<String> {
        self.recording.names().to_vec()
    }

    #[getter]
    fn handlers(&self) -> Vec<String> {
        self.recording.handlers().to_vec()
    }

    #[getter]
    fn header(&self) -> HeaderNumbers {
        let header = self.recording.header();
        let (version, system) = (header.version.clone(), header.system.clone());
        let (page_bytes, cores, began) = (header.page_bytes, header.cores, header.began_unix_ns);
        let (one_in, highest, share) = (header.one_in, header.highest_one_in, header.share);
        let (processes, file_bytes) = (header.processes, header.file_bytes);
        let (other, missing) = (header.other_requests, header.missing_requests);
        (version, system, page_bytes, cores, began, one_in, highest, share, processes, file_bytes, other, missing)
    }

    #[getter]
    fn is_cut_off(&self) -> bool {
        self.recording.is_cut_off()
    }

    /// Whether a program was recorded, which is a request itself.
    #[getter]
    fn has_program(&self) -> bool {
        self.recording.has_program()
    }

    #[getter]
    fn skipped(&self) -> usize {
        self.recording.skipped()
    }

    #[getter]
    fn gaps(&self) -> Vec<GapNumbers> {
        gaps_of(&self.recording)
    }

    /// What the requests of each name did.
    fn info(&self) -> PyInfo {
        PyInfo(Mutex::new(Info::new(&self.recording)))
    }

    /// A file for another tool: ``rmm.csv``, ``perfetto``, or ``pprof`` before it is compressed, for which ``classes``
    /// says how sizes up to each power of two are called.
    #[pyo3(signature = (to, classes, /))]
    fn export(&self, to: &str, classes: Vec<String>) -> PyResult<PyExport> {
        let export: Box<dyn Export> = match to {
            "rmm.csv" => Box::new(Rmm::new(&self.recording)),
            "perfetto" => Box::new(Perfetto::new(&self.recording)),
            "pprof" => Box::new(Pprof::new(&self.recording, classes)),
            _ => return Err(PyValueError::new_err(format!("no recording is exported to {to:?}"))),
        };
        Ok(PyExport(Mutex::new(Some((export, Vec::new())))))
    }

    /// Some events, from this one on. OSError: a file cannot be read any more; ValueError: it was changed.
    #[pyo3(signature = (start, count, /))]
    fn events(&self, start: usize, count: usize) -> PyResult<Vec<EventNumbers>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.0 > start {
            *read = (0, Reading::default());
        }
        let mut found = Vec::new();
        while found.len() < count {
            let Some(event) = self.recording.next_event(&mut read.1)? else { break };
            if read.0 >= start {
                found.push(numbers(event));
            }
            read.0 += 1;
        }
        Ok(found)
    }
}

/// What the requests of each name did: read bit by bit, and told row by row, since there may be many.
#[pyclass(name = "_RecordedInfo", module = "ctxalloc", frozen)]
pub(super) struct PyInfo(Mutex<Info>);

impl PyInfo {
    fn lock(&self) -> MutexGuard<'_, Info> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyInfo {
    /// Reads some events; whether there are more. OSError: a file cannot be read any more. ValueError: it was changed,
    /// or would take more memory than it has bytes.
    fn read(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.lock().read())?)
    }

    #[getter]
    fn events(&self) -> u64 {
        self.lock().events
    }

    #[getter]
    fn span_ns(&self) -> u64 {
        self.lock().span_ns()
    }

    /// The bytes that the blocks of each row had: rows are in the order in which their names came first.
    fn total_bytes(&self) -> Vec<u64> {
        self.lock().rows().iter().map(|row| row.total_bytes).collect()
    }

    /// A row.
    #[pyo3(signature = (at, /))]
    fn row<'py>(&self, py: Python<'py>, at: usize) -> PyResult<Bound<'py, PyDict>> {
        let info = self.lock();
        let row = info.rows().get(at).ok_or_else(|| PyIndexError::new_err(at))?;
        let told = PyDict::new(py);
        told.set_item("name", info.name(row))?;
        let handlers = PyDict::new(py);
        for (name, count) in info.handlers(row) {
            handlers.set_item(name, count)?;
        }
        told.set_item("handlers", handlers)?;
        let classes = PyDict::new(py);
        for &(class, count) in row.classes() {
            classes.set_item(class, count)?;
        }
        told.set_item("classes", classes)?;
        for (name, value) in [
            ("requests", row.requests),
            ("ended", row.ended()),
            ("blocks", row.blocks),
            ("total_bytes", row.total_bytes),
            ("zeroed_blocks", row.zeroed),
            ("resizes", row.resizes),
            ("moved", row.moved),
            ("refused", row.refused),
            ("refused_allocations", row.refused_allocations),
            ("with_others", row.with_others),
            ("escaped_bytes", row.escaped_bytes),
            ("freed_on_other_threads", row.freed_elsewhere),
        ] {
            told.set_item(name, value)?;
        }
        told.set_item("escaped_blocks", row.escaped)?;
        let four = |found: Option<Quantiles>| found.map(|found| (found.p50, found.p95, found.p99, found.max));
        told.set_item("peak_bytes", four(row.peak_bytes()))?;
        told.set_item("nanoseconds", four(row.nanoseconds()))?;
        told.set_item("lifetime_nanoseconds", four(row.lifetimes()))?;
        Ok(told)
    }
}

/// The parts of a file for another tool, one after the other.
#[pyclass(name = "_Export", module = "ctxalloc", frozen)]
pub(super) struct PyExport(Mutex<Option<Making>>);

/// And the part that it made last.
type Making = (Box<dyn Export>, Vec<u8>);

#[pymethods]
impl PyExport {
    fn __iter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    /// OSError: a file cannot be read any more. ValueError: it was changed, or would take more memory than it has
    /// bytes.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((mut export, mut part)) = lock().take() else { return Ok(None) };
        part.clear();
        let has_more = py.detach(|| export.more(&mut part))?;
        let told = PyBytes::new(py, &part);
        *lock() = has_more.then_some((export, part));
        Ok(Some(told))
    }
}
