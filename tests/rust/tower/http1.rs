//! hyper's server and hyper's client over HTTP/1.1: what ends a request is what the server does with its future and its
//! body.

use crate::support::{Scripted, Step};
use bytes::Bytes;
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Ended, Outcome, RequestLayer};
use ctxalloc::{Buffer, current_request};
use futures::stream::{StreamExt, poll_fn, unfold};
use http::header::HOST;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;
use tower::{BoxError, ServiceBuilder, service_fn};

type Answer = UnsyncBoxBody<Bytes, BoxError>;

fn whole(text: impl Into<Bytes>) -> Answer {
    Full::new(text.into()).map_err(BoxError::from).boxed_unsync()
}

/// Chunks that are made while they are sent, each with memory of its own.
fn chunks(count: usize) -> Answer {
    let chunks = unfold(0, move |number| async move {
        let pixels = Buffer::zeroed(5000).ok()?;
        tokio::task::yield_now().await;
        let frame = Frame::data(Bytes::copy_from_slice(&pixels));
        (number < count).then(|| (Ok::<_, BoxError>(frame), number + 1))
    });
    StreamBody::new(chunks).boxed_unsync()
}

async fn serve(request: Request<Incoming>, begun: Arc<Notify>) -> Result<Response<Answer>, BoxError> {
    assert!(current_request().is_some());
    let body = match request.uri().path() {
        "/whole" => whole(Bytes::from(Buffer::copy_from_slice(&[b'x'; 1000])?)),
        "/chunks" => chunks(3),
        "/endless" => chunks(usize::MAX),
        "/much" => whole(Buffer::zeroed(200_000)?.len().to_string()),
        "/trailers" => {
            let mut trailers = http::HeaderMap::new();
            trailers.insert("sum", 7.into());
            let frames = [Frame::data(Bytes::from_static(b"x")), Frame::trailers(trailers)];
            StreamBody::new(futures::stream::iter(frames.map(Ok))).boxed_unsync()
        }
        "/fails" => return Err("as the test wants".into()),
        "/breaks" => Scripted::new([Step::Data("x"), Step::Fail]).map_err(BoxError::from).boxed_unsync(),
        "/waits" => {
            let _held = Buffer::zeroed(2000)?;
            begun.notify_one();
            pending().await
        }
        "/upload" => {
            let mut body = request.into_body();
            let mut upload = Buffer::with_capacity(0)?;
            while let Some(frame) = body.frame().await {
                if let Ok(data) = frame?.into_data() {
                    upload.extend_from_slice(&data)?;
                }
            }
            whole(upload.len().to_string())
        }
        _ => return Ok(Response::builder().status(404).body(whole("not here"))?),
    };
    Ok(Response::new(body))
}

struct Running {
    address: SocketAddr,
    ends: UnboundedReceiver<Ended>,
    budget: Budget,
    begun: Arc<Notify>,
}

impl Running {
    async fn new() -> Self {
        let (report, ends) = unbounded_channel();
        let (budget, begun) = (Budget::new("service", None), Arc::new(Notify::new()));
        let layer = RequestLayer::new()
            .limit_bytes(100_000)
            .budget(&budget)
            .on_end(move |ended| drop(report.send(ended.clone())));
        let service = ServiceBuilder::new().layer(layer).service(service_fn({
            let begun = Arc::clone(&begun);
            move |request| serve(request, Arc::clone(&begun))
        }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let connection = hyper::server::conn::http1::Builder::new();
                let service = TowerToHyperService::new(service.clone());
                tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, ends, budget, begun }
    }

    async fn connect<B>(&self) -> SendRequest<B>
    where
        B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// A connection that speaks for itself.
    async fn raw(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    /// The next end, and no other after it.
    async fn ended(&mut self, outcome: Outcome) -> Ended {
        let ended = timeout(Duration::from_secs(30), self.ends.recv()).await.expect("its end was reported").unwrap();
        assert_eq!(ended.outcome, outcome, "{ended:?}");
        assert!(self.ends.try_recv().is_err(), "its end was reported twice");
        ended
    }
}

fn ask(method: Method, path: &str) -> Request<Empty<Bytes>> {
    Request::builder().method(method).uri(path).header(HOST, "here").body(Empty::new()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_on_a_connection_that_is_kept_alive_are_told_once_each() {
    let mut running = Running::new().await;
    let mut sender = running.connect().await;
    for _ in 0..50 {
        for (method, path, status, length, outcome, peak) in [
            (Method::GET, "/whole", 200, 1000, Outcome::Completed, 1000),
            (Method::GET, "/chunks", 200, 15_000, Outcome::Completed, 5000),
            (Method::HEAD, "/chunks", 200, 0, Outcome::Completed, 0),
            (Method::GET, "/trailers", 200, 1, Outcome::Completed, 0),
            (Method::GET, "/elsewhere", 404, 8, Outcome::Completed, 0),
            (Method::GET, "/much", 413, 122, Outcome::Refused, 0), // the problem document
            (Method::HEAD, "/much", 413, 0, Outcome::Refused, 0),
        ] {
            sender.ready().await.unwrap();
            let response = sender.send_request(ask(method, path)).await.unwrap();
            assert_eq!(response.status().as_u16(), status, "{path}");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body.len(), length, "{path}: {body:?}");
            let ended = running.ended(outcome).await;
            assert_eq!((ended.status.unwrap().as_u16(), ended.report.stats.peak_bytes), (status, peak), "{path}");
        }
    }
    drop(sender); // the last answers' bytes are the connection's until it has sent them
    assert_eq!(running.budget.in_use_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_sent_all_at_once_are_told_once_each() {
    let mut running = Running::new().await;
    let requests: String = ["/chunks", "/whole", "/much", "/chunks"]
        .map(|path| format!("GET {path} HTTP/1.1\r\nhost: here\r\n\r\n"))
        .concat();
    let mut stream = running.raw(&requests).await;
    let mut answers = String::new();
    while answers.matches("0\r\n\r\n").count() < 2 {
        let mut part = [0; 4096];
        let length = stream.read(&mut part).await.unwrap();
        assert!(length > 0, "{answers}");
        answers.push_str(&String::from_utf8_lossy(&part[..length]));
    }
    for outcome in [Outcome::Completed, Outcome::Completed, Outcome::Refused, Outcome::Completed] {
        let ended = timeout(Duration::from_secs(30), running.ends.recv()).await.unwrap().unwrap();
        assert_eq!(ended.outcome, outcome);
    }
    assert!(running.ends.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_drops_what_is_under_way() {
    let mut running = Running::new().await;
    let stream = running.raw("GET /waits HTTP/1.1\r\nhost: here\r\n\r\n").await;
    running.begun.notified().await;
    drop(stream);
    let ended = running.ended(Outcome::Dropped).await;
    assert_eq!((ended.status, ended.report.stats.peak_bytes, ended.report.escaped_blocks), (None, 2000, 0));

    let mut stream = running.raw("GET /endless HTTP/1.1\r\nhost: here\r\n\r\n").await;
    stream.read_exact(&mut [0; 20_000]).await.unwrap();
    drop(stream);
    let ended = running.ended(Outcome::Dropped).await;
    assert_eq!((ended.status, ended.report.stats.peak_bytes), (Some(StatusCode::OK), 5000));
    assert_eq!(running.budget.in_use_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_service_and_of_its_body_are_failures() {
    let mut running = Running::new().await;
    for path in ["/fails", "/breaks"] {
        let mut sender = running.connect().await;
        if let Ok(response) = sender.send_request(ask(Method::GET, path)).await {
            assert!(response.into_body().collect().await.is_err(), "{path}: it is cut off");
        }
        running.ended(Outcome::Failed).await;
    }
    assert_eq!(running.budget.in_use_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_is_refused_in_the_middle() {
    let mut running = Running::new().await;
    // To the limit and to its end; and one byte more, after which nothing comes.
    for (piece, more, status, outcome) in [(4000, "", 200, Outcome::Completed), (5000, "x", 413, Outcome::Refused)] {
        let mut sender = running.connect().await;
        let pieces = (0..20).map(move |_| Bytes::from(vec![7; piece])).chain([Bytes::from_static(more.as_bytes())]);
        let pieces = futures::stream::iter(pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece))));
        let rest = poll_fn(move |_| if more.is_empty() { Poll::Ready(None) } else { Poll::Pending });
        let request = Request::post("/upload").header(HOST, "here").body(StreamBody::new(pieces.chain(rest))).unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        let ended = running.ended(outcome).await;
        assert!(ended.report.stats.peak_bytes <= 100_000);
    }
    assert_eq!(running.budget.in_use_bytes(), 0);
}
