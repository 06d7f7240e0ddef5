//! A service of tonic and its own client: how a request ends for gRPC, where the answer's status comes after its body.

use bytes::{Buf, BufMut};
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Ended, Outcome, RequestLayer};
use ctxalloc::{Buffer, current_request};
use futures::stream::{BoxStream, StreamExt, unfold};
use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tower::{Service, service_fn};

/// Messages that are text, as they stand on the wire.
#[derive(Clone, Copy, Default)]
struct Plain;

impl Codec for Plain {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;
    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Plain {
    type Item = String;
    type Error = Status;
    fn encode(&mut self, text: String, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = String;
    type Error = Status;
    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        String::from_utf8(bytes.to_vec()).map(Some).map_err(|_| Status::invalid_argument("no text"))
    }
}

/// What a method does with memory: `(what, bytes)`.
fn asked(request: &Request<String>) -> (&str, usize) {
    let (what, bytes) = request.get_ref().split_once(' ').unwrap();
    (what, bytes.parse().unwrap())
}

fn status_of(error: ctxalloc::Error) -> Status {
    Status::resource_exhausted(error.to_string())
}

async fn make(request: Request<String>, begun: Arc<Notify>) -> Result<Response<String>, Status> {
    let (what, bytes) = asked(&request);
    let pixels = Buffer::zeroed(bytes);
    match what {
        "tells" => Ok(Response::new(pixels.map_err(status_of)?.len().to_string())),
        "hides" => Ok(Response::new(pixels.map_err(|_| Status::internal("no pixels"))?.len().to_string())),
        "minds" => Err(Status::invalid_argument("not with these colours")),
        "panics" => panic!("as the test wants"),
        "waits" => {
            begun.notify_one();
            pending().await
        }
        "hoards" => {
            let mut kept = Vec::new();
            for _ in 0..100 {
                kept.push(vec![0_u8; bytes]);
                tokio::task::yield_now().await;
            }
            Ok(Response::new(kept.len().to_string()))
        }
        _ => Err(Status::unimplemented(what)),
    }
}

/// Ten messages, for each of which it asks for so many bytes more; "endless", without an end.
async fn rows(request: Request<String>) -> Result<Response<BoxStream<'static, Result<String, Status>>>, Status> {
    let (what, bytes) = asked(&request);
    let is_endless = what == "endless";
    let rows = unfold(Vec::new(), move |mut kept: Vec<Buffer>| async move {
        if kept.len() == 10 && !is_endless {
            return None;
        }
        tokio::task::yield_now().await;
        if is_endless {
            kept.clear();
        }
        let row = Buffer::zeroed(bytes).map_err(status_of).map(|row| kept.push(row));
        Some((row.map(|()| "row".repeat(1000)), kept))
    });
    Ok(Response::new(rows.boxed()))
}

#[derive(Clone)]
struct Thumbnails(Arc<Notify>);

impl NamedService for Thumbnails {
    const NAME: &'static str = "images.Thumbnails";
}

impl Service<http::Request<Body>> for Thumbnails {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let begun = Arc::clone(&self.0);
        Box::pin(async move {
            assert!(current_request().is_some());
            let mut grpc = tonic::server::Grpc::new(Plain);
            Ok(match request.uri().path() {
                "/images.Thumbnails/Make" => {
                    grpc.unary(service_fn(|request| make(request, Arc::clone(&begun))), request).await
                }
                _ => grpc.server_streaming(service_fn(rows), request).await,
            })
        })
    }
}

const LIMIT: usize = 100_000;

/// A server with one client, and the ends that its layer reports.
struct Running {
    client: tonic::client::Grpc<Channel>,
    ends: UnboundedReceiver<Ended>,
    budget: Budget,
    begun: Arc<Notify>,
}

impl Running {
    async fn new(terms: fn(RequestLayer) -> RequestLayer) -> Self {
        let (report, ends) = unbounded_channel();
        let budget = Budget::new("service", None);
        let layer = terms(RequestLayer::new()).budget(&budget).on_end(move |ended| drop(report.send(ended.clone())));
        let begun = Arc::new(Notify::new());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = tonic::service::Routes::new(Thumbnails(Arc::clone(&begun)));
        let server = Server::builder().layer(layer).add_routes(routes);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        Self { client: tonic::client::Grpc::new(channel), ends, budget, begun }
    }

    async fn make(&mut self, message: impl Into<String>) -> Result<String, Status> {
        self.client.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/images.Thumbnails/Make");
        self.client.unary(Request::new(message.into()), path, Plain).await.map(Response::into_inner)
    }

    async fn rows(&mut self, message: &str) -> tonic::Streaming<String> {
        self.client.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/images.Thumbnails/Rows");
        self.client.server_streaming(Request::new(message.to_owned()), path, Plain).await.unwrap().into_inner()
    }

    async fn ended(&mut self, outcome: Outcome) -> Ended {
        let ended = timeout(Duration::from_secs(30), self.ends.recv()).await.expect("its end was reported").unwrap();
        assert_eq!(ended.outcome, outcome, "{ended:?}");
        assert_eq!(ended.report.escaped_blocks, 0);
        assert!(self.ends.try_recv().is_err(), "its end was reported twice");
        ended
    }
}

fn with_a_limit(layer: RequestLayer) -> RequestLayer {
    layer.limit_bytes(LIMIT)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_one_connection_are_told_once_each() {
    let mut running = Running::new(with_a_limit).await;
    for bytes in 1..=50 {
        assert_eq!(running.make(format!("tells {bytes}")).await.unwrap(), bytes.to_string());
        assert_eq!(running.ended(Outcome::Completed).await.report.stats.peak_bytes, bytes);
        let refused = running.make("minds 10").await.unwrap_err();
        assert_eq!(
            refused.code(),
            Code::InvalidArgument,
            "an error that has nothing to do with memory is the method's own"
        );
        running.ended(Outcome::Completed).await;
    }
    assert_eq!(running.budget.in_use_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_resource_exhausted_whether_the_method_says_so_or_not() {
    let mut running = Running::new(with_a_limit).await;
    let status = running.make("tells 200000").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("has no room for 200000"), "the method's own words pass: {status:?}");
    let ended = running.ended(Outcome::Refused).await;
    assert_eq!((ended.report.stats.refused, ended.report.stats.peak_bytes), (1, 0));

    let hidden = running.make("hides 200000").await.unwrap_err();
    assert_eq!((hidden.code(), hidden.message()), (Code::ResourceExhausted, "out of memory"));
    running.ended(Outcome::Refused).await;

    assert_eq!(running.make("hides 2000").await.unwrap(), "2000", "the connection goes on");
    running.ended(Outcome::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_answers_the_methods_own_status_passes() {
    let mut running = Running::new(|layer| layer.limit_bytes(LIMIT).answers(false)).await;
    assert_eq!(running.make("hides 200000").await.unwrap_err().code(), Code::Internal);
    running.ended(Outcome::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_exceeds_the_limit_of_the_heap_is_resource_exhausted() {
    let mut running = Running::new(|layer| layer.terms(|_, terms| Some(terms.heap_limit_bytes(1 << 20)))).await;
    assert_eq!(running.make("hoards 100000").await.unwrap_err().code(), Code::ResourceExhausted);
    let heap = running.ended(Outcome::Refused).await.report.heap.unwrap();
    assert!(heap.peak_bytes > 1 << 20 && heap.live_bytes < 100_000, "it was dropped: {heap:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_messages_is_complete_with_its_trailers() {
    let mut running = Running::new(with_a_limit).await;
    for _ in 0..20 {
        let mut rows = running.rows("rows 100").await;
        for _ in 0..10 {
            rows.message().await.unwrap().unwrap();
        }
        assert!(rows.message().await.unwrap().is_none());
        assert_eq!(running.ended(Outcome::Completed).await.report.stats.peak_bytes, 1000);
    }
    assert_eq!(running.budget.in_use_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_refused_says_so_in_its_trailers() {
    let mut running = Running::new(with_a_limit).await;
    let mut rows = running.rows("rows 30000").await;
    for _ in 0..3 {
        rows.message().await.unwrap().unwrap();
    }
    assert_eq!(rows.message().await.unwrap_err().code(), Code::ResourceExhausted);
    let ended = running.ended(Outcome::Refused).await;
    assert_eq!((ended.report.stats.peak_bytes, ended.report.stats.refused), (90_000, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_drops_its_call() {
    let mut running = Running::new(with_a_limit).await;
    // While the method is at work; the connection stays.
    let begun = Arc::clone(&running.begun);
    tokio::select! {
        _ = running.make("waits 5000") => panic!("it waits"),
        () = begun.notified() => {}
    }
    assert_eq!(running.ended(Outcome::Dropped).await.report.stats.peak_bytes, 5000);

    // In the middle of an answer that never ends.
    let mut rows = running.rows("endless 700").await;
    rows.message().await.unwrap().unwrap();
    drop(rows);
    assert_eq!(running.ended(Outcome::Dropped).await.report.stats.peak_bytes, 700);
    assert_eq!(running.budget.in_use_bytes(), 0);
    assert_eq!(running.make("tells 1").await.unwrap(), "1");
    running.ended(Outcome::Completed).await;

    // And with all of its connection.
    let mut rows = running.rows("endless 700").await;
    rows.message().await.unwrap().unwrap();
    let Running { client, mut ends, budget, .. } = running;
    drop((client, rows));
    let ended = timeout(Duration::from_secs(30), ends.recv()).await.expect("its end was reported").unwrap();
    assert_eq!((ended.outcome, budget.in_use_bytes()), (Outcome::Dropped, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_method_that_panics_harms_its_own_call_only() {
    let mut running = Running::new(with_a_limit).await;
    assert!(running.make("panics 5000").await.is_err());
    running.ended(Outcome::Panicked).await;
    assert_eq!((running.make("tells 1").await.unwrap().as_str(), running.budget.in_use_bytes()), ("1", 0));
    running.ended(Outcome::Completed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_drops_the_call() {
    let mut running = Running::new(with_a_limit).await;
    running.client.ready().await.unwrap();
    let mut request = Request::new("waits 5000".to_owned());
    request.set_timeout(Duration::from_secs(1)); // long enough to come to the service on a busy machine
    let path = http::uri::PathAndQuery::from_static("/images.Thumbnails/Make");
    let late = running.client.unary(request, path, Plain).await.map(Response::into_inner).unwrap_err();
    assert!(matches!(late.code(), Code::Cancelled | Code::DeadlineExceeded), "{late:?}");
    running.ended(Outcome::Dropped).await;
}
