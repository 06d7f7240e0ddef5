//! A service of axum under load: keep-alive, hang-ups, panics, time-outs, streamed bodies, refusals, all at once.

use axum::Router;
use axum::body::Body;
use axum::error_handling::HandleErrorLayer;
use axum::extract::{Extension, Path};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use bytes::Bytes;
use ctxalloc::metrics::request_counts;
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Outcome, RequestLayer};
use ctxalloc::{Buffer, RequestHandle, task};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{BoxError, ServiceBuilder};

const CLIENTS: usize = 4;

type Ends = Arc<Mutex<BTreeMap<(String, &'static str), usize>>>;

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Refused => "refused",
        Outcome::Failed => "failed",
        Outcome::Panicked => "panicked",
        Outcome::Dropped => "dropped",
        _ => "unknown",
    }
}

async fn work(Path(bytes): Path<usize>, Extension(own): Extension<RequestHandle>) -> Result<String, ctxalloc::Error> {
    let _first = Buffer::zeroed(1000)?;
    tokio::task::yield_now().await;
    let second = task::spawn_blocking(move || Buffer::zeroed(bytes)).await.unwrap()?;
    assert_eq!((second.handler(), own.stats().live_bytes), (own.handler(), 1000 + bytes));
    Ok(second.len().to_string())
}

async fn stream(Path(chunks): Path<usize>) -> Body {
    Body::from_stream(futures::stream::unfold(0, move |number| async move {
        let pixels = Buffer::zeroed(5000).unwrap();
        tokio::task::yield_now().await;
        (number < chunks).then(|| (Ok::<_, Infallible>(Bytes::copy_from_slice(&pixels)), number + 1))
    }))
}

async fn boom() -> String {
    let held = Buffer::zeroed(3000).unwrap();
    tokio::task::yield_now().await;
    panic!("as the test wants, with {} bytes", held.len())
}

async fn forever() -> &'static str {
    let _held = Buffer::zeroed(2000).unwrap();
    pending().await
}

fn service(budget: &Budget, ends: &Ends) -> Router {
    let account = |name: &'static str| {
        let ends = Arc::clone(ends);
        RequestLayer::new().limit_bytes(100_000).budget(budget).terms(move |_, terms| Some(terms.name(name))).on_end(
            move |ended| {
                *ends.lock().unwrap().entry((ended.name.clone(), outcome(ended.outcome))).or_default() += 1;
            },
        )
    };
    let in_time = ServiceBuilder::new()
        .layer(account("late"))
        .layer(HandleErrorLayer::new(|_: BoxError| async { StatusCode::REQUEST_TIMEOUT }))
        .timeout(Duration::from_millis(1));
    Router::new()
        .route("/sums/{bytes}", post(work).layer(account("work")))
        .route("/stream/{chunks}", get(stream).layer(account("stream")))
        .route("/boom", get(boom).layer(account("boom")))
        .route("/late", get(forever).layer(in_time))
        .route("/forever", get(forever).layer(account("forever")))
}

/// A connection of its own that is cut after so many bytes of the answer.
async fn hang_up(address: std::net::SocketAddr, path: &str, after: usize) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: here\r\n\r\n").as_bytes()).await.unwrap();
    stream.read_exact(&mut vec![0; after]).await.unwrap();
}

/// What one client asks for, round after round, on a connection that is kept alive.
async fn client(address: std::net::SocketAddr, rounds: usize) {
    let mut open = None;
    for round in 0..rounds {
        for (method, path, status) in [
            ("POST", "/sums/5000", 200),
            ("POST", "/sums/200000", 413),
            ("GET", "/stream/3", 200),
            ("HEAD", "/stream/3", 200),
            ("GET", "/late", if round % 10 == 0 { 408 } else { 0 }),
            ("POST", "/sums/1", 200),
            ("GET", "/boom", if round % 10 == 0 { 1 } else { 0 }),
        ] {
            if status == 0 {
                continue;
            }
            if open.is_none() {
                let stream = TcpStream::connect(address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
                tokio::spawn(connection);
                open = Some(sender);
            }
            let sender = open.as_mut().unwrap();
            let request = http::Request::builder().method(method).uri(path).header("host", "here");
            sender.ready().await.unwrap();
            let sent = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await;
            match sent {
                Ok(response) => {
                    assert_eq!(response.status().as_u16(), status, "{method} {path}");
                    let body = response.into_body().collect().await.unwrap().to_bytes();
                    if (method, path) == ("GET", "/stream/3") {
                        assert_eq!(body.len(), 15_000);
                    }
                }
                Err(_) => {
                    assert_eq!(status, 1, "{method} {path}"); // a panic ends its connection
                    open = None;
                }
            }
        }
        if round % 10 == 0 {
            hang_up(address, "/stream/1000000", 20_000).await;
            // The server ends what was hung up when it notices. Until then few more begin, however slow the machine is.
            until(|| request_counts().present <= 3 * CLIENTS).await;
        }
    }
}

/// Requested until it is so: the server notices a hang-up, and drops what it has, when it next looks.
async fn until(what: impl Fn() -> bool) {
    tokio::time::timeout(Duration::from_secs(60), async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("it becomes so");
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn each_request_is_reported_once_and_nothing_grows() {
    let times: usize = std::env::var("CTXALLOC_STRESS").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    let rounds = 100 * times;
    std::panic::set_hook(Box::new(|info| {
        let text = info.payload_as_str().unwrap_or_default();
        if !text.starts_with("as the test wants") {
            eprintln!("{info}");
        }
    }));
    let budget = Budget::new("service", Some(64 << 20));
    let ends = Ends::default();
    let app = service(&budget, &ends);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
        tokio::spawn(axum::serve(listener, app).into_future());
        let mut seen = Vec::new();
        for part in 1..=4 {
            let clients: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(client(address, rounds))).collect();
            // One that is cut while its service is under way.
            let mut cut = TcpStream::connect(address).await.unwrap();
            cut.write_all(b"GET /forever HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
            for client in clients {
                client.await.unwrap();
            }
            drop(cut);
            let all = part * CLIENTS * rounds;
            let some = part * CLIENTS * rounds.div_ceil(10);
            let expected = BTreeMap::from([
                (("boom".to_owned(), "panicked"), some),
                (("forever".to_owned(), "dropped"), part),
                (("late".to_owned(), "completed"), some),
                (("stream".to_owned(), "completed"), 2 * all),
                (("stream".to_owned(), "dropped"), some),
                (("work".to_owned(), "completed"), 2 * all),
                (("work".to_owned(), "refused"), all),
            ]);
            let total: usize = expected.values().sum();
            until(|| ends.lock().unwrap().values().sum::<usize>() >= total).await;
            assert_eq!(*ends.lock().unwrap(), expected);
            until(|| budget.in_use_bytes() == 0).await;
            until(|| request_counts().present == 0).await;
            seen.push((request_counts().slots, resident_bytes()));
        }
        // The first chunks of slots are enough (threads that begin requests at one time may each make one), and no part
        // needs more memory.
        assert_eq!(seen[3].0, seen[0].0, "{seen:?}");
        assert!(seen[3].1 < seen[1].1 + (8 << 20), "{seen:?}");
        eprintln!("{} requests: {seen:?}", ends.lock().unwrap().values().sum::<usize>());
    });
    let _ = std::panic::take_hook();
    assert!(ctxalloc::handler("pool").is_some());
}
