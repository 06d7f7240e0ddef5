//! axum: each route has an account and a limit of its own; what does not fit is answered, and the service goes on.
//!
//! `cargo run --example axum_service --features axum` prints
//! ```text
//! POST /thumbnail 1000000  200  thumbnail Completed, 1000000 bytes at the peak
//! POST /thumbnail 9000000  413  thumbnail Refused, 0 bytes at the peak
//! GET  /stream             200  stream Completed, 64000 bytes at the peak
//! GET  /slow               408  slow Completed, 5000 bytes at the peak
//! GET  /health             200  no account
//! in use by the service: 0 bytes
//! ```

use axum::Router;
use axum::body::{Body, Bytes};
use axum::error_handling::HandleErrorLayer;
use axum::extract::{Extension, Path};
use axum::http::{Request, StatusCode};
use axum::routing::{get, post};
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Ended, RequestLayer};
use ctxalloc::{Buffer, RequestHandle, task};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error;
use std::io::{self, Write};
use std::sync::mpsc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tower::{BoxError, ServiceBuilder};

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

/// The service. `on_end` hears of each request that has an account.
fn service(budget: &Budget, on_end: impl Fn(&Ended) + Send + Sync + Clone + 'static) -> Router {
    // What a route gets: its name in the accounts, and its limit.
    let account = |name: &'static str, limit_bytes: usize| {
        RequestLayer::new()
            .limit_bytes(limit_bytes)
            .budget(budget)
            .terms(move |_, terms| Some(terms.name(name)))
            .on_end(on_end.clone())
    };
    // The time-out is inside of the account: what it drops is counted until it is gone.
    let in_time = ServiceBuilder::new()
        .layer(account("slow", 1 << 20))
        .layer(HandleErrorLayer::new(|_: BoxError| async { StatusCode::REQUEST_TIMEOUT }))
        .timeout(Duration::from_millis(20));
    Router::new()
        .route("/thumbnail/{bytes}", post(thumbnail).layer(account("thumbnail", 4 << 20)))
        .route("/stream", get(stream).layer(account("stream", 1 << 20)))
        .route("/slow", get(slow).layer(in_time))
        .route("/health", get(|| async { "ok" }))
}

/// `?` answers what is refused: `ctxalloc::Error` is an answer of axum's.
async fn thumbnail(
    Path(bytes): Path<usize>,
    Extension(request): Extension<RequestHandle>,
) -> Result<String, ctxalloc::Error> {
    // In a thread for long work, which belongs to the request too.
    let pixels = task::spawn_blocking(move || Buffer::zeroed(bytes)).await.expect("no panic")?;
    Ok(format!("{} of {}", pixels.len(), request.stats().live_bytes))
}

/// The body is made while it is sent, in the request, which ends with it.
async fn stream() -> Body {
    let lines = futures::stream::unfold(0, |number| async move {
        let pixels = Buffer::zeroed(64_000).ok()?;
        (number < 3).then(|| (Ok::<_, Infallible>(format!("{} pixels\n", pixels.len())), number + 1))
    });
    Body::from_stream(lines)
}

async fn slow() -> Result<&'static str, ctxalloc::Error> {
    let _held = Buffer::zeroed(5000)?;
    std::future::pending().await
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (sender, receiver) = mpsc::channel();
    let budget = Budget::new("service", Some(64 << 20));
    let app = service(&budget, move |ended: &Ended| drop(sender.send(ended.clone())));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let stream = TcpStream::connect(listener.local_addr()?).await?;
        tokio::spawn(axum::serve(listener, app).into_future());
        let (mut client, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        for (method, path, shown) in [
            ("POST", "/thumbnail/1000000", "/thumbnail 1000000"),
            ("POST", "/thumbnail/9000000", "/thumbnail 9000000"),
            ("GET", "/stream", "/stream"),
            ("GET", "/slow", "/slow"),
            ("GET", "/health", "/health"),
        ] {
            let request =
                Request::builder().method(method).uri(path).header("host", "here").body(Empty::<Bytes>::new())?;
            client.ready().await?;
            let response = client.send_request(request).await?; // one connection, kept alive
            let status = response.status().as_u16();
            response.into_body().collect().await?;
            let account = match shown {
                "/health" => "no account".to_owned(),
                _ => {
                    let Ended { name, outcome, report, .. } = receiver.recv()?;
                    format!("{name} {outcome:?}, {} bytes at the peak", report.stats.peak_bytes)
                }
            };
            writeln!(out, "{method:<4} {shown:<19} {status}  {account}")?;
        }
        Ok::<(), Box<dyn Error>>(())
    })?;
    drop(runtime); // and with it all that was under way
    writeln!(out, "in use by the service: {} bytes", budget.in_use_bytes())?;
    Ok(())
}

#[cfg(test)]
#[path = "../tests/examples/said.rs"]
mod said;

#[test]
fn it_prints_what_its_first_lines_say() {
    said::check(include_str!("axum_service.rs"), run);
}
