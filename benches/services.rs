//! What services in Rust pay: the tower layer for a request; a poll in a request, with and without its span; Rust's
//! heap by `GlobalScoped`, block by block, and for an application, alone and served over TCP, in processes that differ
//! in their allocator alone. Run by `make bench`.
#![allow(unsafe_code, reason = "a global allocator that is chosen when the program starts")]

mod interleaved;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::http::Request;
use axum::routing::get;
use ctxalloc::tower::RequestLayer;
use ctxalloc::{GlobalScoped, Handler, WithHandler, request};
use http_body_util::BodyExt;
use interleaved::{Group, keep};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::future::{Future, pending};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context as TaskContext, Waker};
use std::time::Instant;
use tower::{Service, ServiceExt};
use tracing::instrument::Instrument;

struct MiMalloc;

// SAFETY: mimalloc's functions keep these promises.
unsafe impl GlobalAlloc for MiMalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size, and an alignment that is a power of two.
        unsafe { libmimalloc_sys::mi_malloc_aligned(layout.size(), layout.align()).cast() }
    }
    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: the caller gives up a block of mimalloc's.
        unsafe { libmimalloc_sys::mi_free(block.cast()) }
    }
    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller passes a block of mimalloc's with this alignment.
        unsafe { libmimalloc_sys::mi_realloc_aligned(block.cast(), new_size, layout.align()).cast() }
    }
}

static SCOPED_SYSTEM: GlobalScoped = GlobalScoped::new(System);
static SCOPED_MIMALLOC: GlobalScoped<MiMalloc> = GlobalScoped::over_leaf(MiMalloc);

/// One of four allocators, by the environment when the program starts.
struct Chosen;

const VARIABLE: &std::ffi::CStr = c"CTXALLOC_BENCH_ALLOCATOR";
/// One more than its place, once the choice is made.
static CHOICE: AtomicU8 = AtomicU8::new(0);
/// Each is called by its address, so that what is compared differs in the allocator alone.
static ALLOCATORS: [&(dyn GlobalAlloc + Sync); 4] = [&System, &SCOPED_SYSTEM, &MiMalloc, &SCOPED_MIMALLOC];

#[cold]
fn choose() -> u8 {
    // SAFETY: nobody changes the environment; the program has one thread when it allocates first.
    let value = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    // SAFETY: NULL, or a string with at least its NUL.
    let choice = if value.is_null() { b'1' } else { unsafe { value.cast::<u8>().read() } };
    let choice = choice.clamp(b'1', b'4') - b'0';
    CHOICE.store(choice, Ordering::Relaxed);
    choice
}

#[inline]
fn chosen() -> &'static dyn GlobalAlloc {
    let choice = match CHOICE.load(Ordering::Relaxed) {
        0 => choose(),
        choice => choice,
    };
    ALLOCATORS[usize::from(choice - 1) % ALLOCATORS.len()]
}

// SAFETY: the choice is made once, before the first block.
unsafe impl GlobalAlloc for Chosen {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: a layout that the caller vouches for, handed on as it is.
        unsafe { chosen().alloc(layout) }
    }
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: a layout that the caller vouches for, handed on as it is.
        unsafe { chosen().alloc_zeroed(layout) }
    }
    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the choice is made once, so this allocator made the block, with the layout that the caller hands on.
        unsafe { chosen().dealloc(block, layout) }
    }
    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the choice is made once, so this allocator made the block, with the layout that the caller hands on.
        unsafe { chosen().realloc(block, layout, new_size) }
    }
}

#[global_allocator]
static GLOBAL: Chosen = Chosen;

/// What an answer of words takes: some two hundred blocks, a sort, a list that grows.
async fn words(Path(count): Path<usize>) -> String {
    let mut words: Vec<String> = (0..count).map(|number| format!("word {}", number * 7919 % 1000)).collect();
    words.sort_unstable();
    words.dedup();
    words.join(" ")
}

fn app(layer: Option<RequestLayer>) -> Router {
    let router = Router::new().route("/words/{count}", get(words));
    match layer {
        Some(layer) => router.layer(layer),
        None => router,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

/// One request after the other, from the service itself to the last byte of the answer.
fn requests(layer: Option<RequestLayer>, uri: &'static str) -> impl FnMut() {
    requests_of(app(layer), uri)
}

fn requests_of(mut app: Router, uri: &'static str) -> impl FnMut() {
    let runtime = runtime();
    move || {
        runtime.block_on(async {
            let request = Request::builder().uri(uri).body(Body::empty()).expect("a request");
            let response = ServiceExt::<Request<Body>>::ready(&mut app).await.expect("ready").call(request).await;
            black_box(response.expect("an answer").into_body().collect().await.expect("a body"));
        });
    }
}

fn layers() -> String {
    Group::new("a request of an axum service that does nothing", 1000)
        .add("with a layer that does nothing", {
            let layer = tower::util::MapRequestLayer::new(|request: Request<Body>| request);
            requests_of(app(None).layer(layer), "/words/0")
        })
        .add("without a layer", requests(None, "/words/0"))
        .add("tower::RequestLayer", requests(Some(RequestLayer::new()), "/words/0"))
        .add(
            "with a limit, a name and on_end",
            requests(
                Some(RequestLayer::new().limit_bytes(1 << 20).terms(|_, terms| Some(terms.name("words"))).on_end(
                    |ended| {
                        black_box(ended);
                    },
                )),
                "/words/0",
            ),
        )
        .run()
}

fn polled(future: impl Future<Output = ()> + 'static) -> impl FnMut() {
    let mut future = Box::pin(future);
    move || {
        let poll = future.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
        assert!(black_box(poll).is_pending());
    }
}

/// A subscriber that takes every span and does nothing.
struct Deaf;

impl tracing::Subscriber for Deaf {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn polls() -> String {
    let silent = request().begin().expect("memory");
    let listened = {
        let _listening = tracing::subscriber::set_default(Deaf);
        request().begin().expect("memory")
    };
    let handler = silent.handler();
    let (without, with) = (silent.span().clone(), listened.span().clone());
    let rows = Group::new("one poll of a future in a request", 20_000)
        .add("the future alone", polled(pending()))
        .add("request.scope()", polled(pending().with_handler(handler)))
        .add("in its span, no subscriber", polled(pending().with_handler(handler).instrument(without)))
        .add("in its span, idle subscriber", polled(pending().with_handler(handler).instrument(with)))
        .run();
    drop((silent, listened));
    rows
}

/// So many blocks made, and then all dropped.
fn blocks<A: GlobalAlloc>(by: &'static A, handler: Option<Handler>, kept: bool) -> impl FnMut() {
    let layout = Layout::from_size_align(64, 8).expect("a layout");
    move || {
        let work = || {
            let mut all = [std::ptr::null_mut(); 100];
            for block in &mut all {
                // SAFETY: the layout has a size above zero.
                *block = unsafe { by.alloc(black_box(layout)) };
                if !kept {
                    // SAFETY: made just now.
                    unsafe { by.dealloc(*block, layout) };
                }
            }
            if kept {
                // SAFETY: made above, each once.
                black_box(all).iter().for_each(|block| unsafe { by.dealloc(*block, layout) });
            }
        };
        match handler {
            Some(handler) => ctxalloc::scope(handler, work),
            None => work(),
        }
    }
}

fn heap() -> String {
    blocks(&SCOPED_SYSTEM, None, true)(); // from here on it counts
    let (own, limited) = (request().begin(), request().heap_limit_bytes(1 << 30).begin());
    let (own, limited) = (own.expect("memory"), limited.expect("GlobalScoped is at work"));
    let (handler, with_limit) = (own.handler(), limited.handler());
    let rows = Group::new("100 blocks of 64 B of Rust's heap", 100)
        .per(100)
        .add("system", blocks(&System, None, true))
        .add("GlobalScoped over it, nothing selected", blocks(&SCOPED_SYSTEM, None, true))
        .add("GlobalScoped over it, in a request", blocks(&SCOPED_SYSTEM, Some(handler), true))
        .add("GlobalScoped over it, with a limit", blocks(&SCOPED_SYSTEM, Some(with_limit), true))
        .add("mimalloc", blocks(&MiMalloc, None, true))
        .add("GlobalScoped over mimalloc, nothing selected", blocks(&SCOPED_MIMALLOC, None, true))
        .add("GlobalScoped over mimalloc, in a request", blocks(&SCOPED_MIMALLOC, Some(handler), true))
        .run();
    drop((own, limited));
    rows
}

const REQUESTS: u32 = 5000;

fn layer_of(how: &str) -> Option<RequestLayer> {
    match how {
        "none" => None,
        "request" => Some(RequestLayer::new()),
        _ => Some(RequestLayer::new().terms(|_, terms| Some(terms.heap_limit_bytes(1 << 30)))),
    }
}

/// What a child does: prints nanoseconds for a request to the application alone.
fn child(how: &str) {
    let mut one = requests(layer_of(how), "/words/200");
    (0..500).for_each(|_| one());
    let begun = Instant::now();
    (0..REQUESTS).for_each(|_| one());
    println!("{}", begun.elapsed().as_nanos() / u128::from(REQUESTS));
}

/// What a child does that serves: prints its port, and answers on one thread until it is killed.
fn server(how: &str) -> std::io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        println!("{}", listener.local_addr()?.port());
        axum::serve(listener, app(layer_of(how))).await
    })
}

/// A GET over a connection that stays open, to the last byte of the answer.
fn get_over(connection: &mut BufReader<TcpStream>) -> std::io::Result<()> {
    connection.get_mut().write_all(b"GET /words/200 HTTP/1.1\r\nhost: bench\r\n\r\n")?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        connection.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some(("content-length", value)) => length = value.parse().map_err(std::io::Error::other)?,
            None if line.trim_end().is_empty() => break,
            _ => {}
        }
    }
    connection.read_exact(&mut vec![0; length])
}

/// The nanoseconds of processor time that a process had so far.
fn processor_time(id: u32) -> std::io::Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/schedstat"))?;
    text.split_whitespace().next().and_then(|first| first.parse().ok()).ok_or_else(|| std::io::Error::other(text))
}

/// Processor time of a server for a request over TCP, in nanoseconds.
fn over_tcp(allocator: &str, how: &str) -> std::io::Result<f64> {
    let mut child = Command::new(std::env::current_exe()?)
        .env(VARIABLE.to_str().expect("ASCII"), allocator)
        .args(["--server", how])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut port = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut port)?;
    let port: u16 = port.trim().parse().map_err(std::io::Error::other)?;
    let mut connection = BufReader::new(TcpStream::connect(("127.0.0.1", port))?);
    for _ in 0..500 {
        get_over(&mut connection)?;
    }
    let before = processor_time(child.id())?;
    for _ in 0..REQUESTS {
        get_over(&mut connection)?;
    }
    let spent = processor_time(child.id())? - before;
    child.kill()?;
    child.wait()?;
    Ok(spent / f64::from(REQUESTS))
}

/// The application alone, timed by the child itself.
fn alone(allocator: &str, how: &str) -> std::io::Result<f64> {
    let mut child = Command::new(std::env::current_exe()?);
    let said = child.env(VARIABLE.to_str().expect("ASCII"), allocator).args(["--child", how]).output()?.stdout;
    String::from_utf8_lossy(&said).trim().parse().map_err(std::io::Error::other)
}

/// A service in processes that differ in their allocator alone, in turn. The first variant comes twice: by how much
/// these two differ, nothing can be told.
fn services(group: &str, measure: fn(&str, &str) -> std::io::Result<f64>) -> std::io::Result<String> {
    const ROUNDS: usize = 15;
    let variants = [
        ("system, no layer", "1", "none"),
        ("GlobalScoped over it, no layer", "2", "none"),
        ("system, no layer, again", "1", "none"),
        ("system, layer", "1", "request"),
        ("GlobalScoped over it, layer", "2", "request"),
        ("GlobalScoped over it, layer, limit", "2", "limit"),
        ("mimalloc, no layer", "3", "none"),
        ("GlobalScoped over mimalloc, no layer", "4", "none"),
        ("mimalloc, no layer, again", "3", "none"),
        ("mimalloc, layer", "3", "request"),
        ("GlobalScoped over mimalloc, layer", "4", "request"),
    ];
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..ROUNDS {
        for ((_, allocator, how), times) in variants.iter().zip(&mut times) {
            times.push(measure(allocator, how)?);
        }
    }
    let mut rows = String::new();
    println!("\n{group}, 200 words, in processes of their own");
    for ((name, ..), times) in variants.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let [low, median, high] = [ROUNDS / 4, ROUNDS / 2, ROUNDS * 3 / 4].map(|at| times[at]);
        println!("{name:<44} {median:>9.0} ns {low:>9.0} ns {high:>9.0} ns");
        let _ = writeln!(
            rows,
            "{{\"group\": \"{group}\", \"variant\": \"{name}\", \"median_ns\": {median:.3}, \"quarter_ns\": {low:.3}, \"three_quarters_ns\": {high:.3}}}"
        );
    }
    Ok(rows)
}

fn main() -> std::io::Result<()> {
    let arguments: Vec<_> = std::env::args().collect();
    // `cargo test --benches` runs this too: it asks whether there are tests, and there are none.
    if arguments.iter().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--child") {
        child(&arguments[at + 1]);
        return Ok(());
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--server") {
        return server(&arguments[at + 1]);
    }
    let served = services("an axum application", alone)? + &services("an axum service over TCP", over_tcp)?;
    keep("services-rust", &(layers() + &polls() + &heap() + &served))
}
