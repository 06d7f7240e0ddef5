//! What a recording says of itself.

/// How and where a recording was made.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Header {
    /// The version of ctxalloc that wrote it.
    pub version: String,
    /// The system and the processor: `linux x86_64`.
    pub system: String,
    /// The machine's pages, in bytes.
    pub page_bytes: u64,
    /// How many processors the first process might use.
    pub cores: u64,
    /// When the recording began: nanoseconds since 1970. Times of events are counted from here by a clock that only
    /// goes forward; each process's clock is set by the system's when it begins.
    pub began_unix_ns: u64,
    /// One request in so many was to be recorded.
    pub one_in: u64,
    /// One in so many was, while recording took more than its share of the time.
    pub highest_one_in: u64,
    /// Its share: at most this part of one processor's time was to be spent on recording.
    pub share: f64,
    /// How many processes recorded.
    pub processes: usize,
    /// How many of its requests are called `(other)`, or have a handler that is: names may take a quarter of a file,
    /// and 4096 are told apart.
    pub other_requests: u64,
    /// How many requests were recorded whose beginning no file has: it was in a file that rotation replaced or that was
    /// removed, is in a gap, or was not written yet, or never since its process was killed. Those of processes that do
    /// not say how many they numbered before (a gap is there, or an older version wrote it) are not known and not here.
    pub missing_requests: u64,
    /// The bytes of its files.
    pub file_bytes: u64,
}
