//! Layer 7: an account for each request of a [tower](https://docs.rs/tower) service: axum, hyper, tonic.
//!
//! [`RequestLayer`] begins a [request](crate::request()) of ctxalloc for each request of the service, keeps it selected
//! while the service's future and the answer's body are polled and dropped, and tells how it ended: once, however it
//! ends.
//!
//! ```
//! use ctxalloc::{Buffer, tower::{Outcome, RequestLayer}};
//! use http_body_util::{BodyExt, Full};
//! use std::sync::mpsc;
//! use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
//!
//! async fn resize(_: http::Request<()>) -> Result<http::Response<Full<bytes::Bytes>>, BoxError> {
//!     let pixels = Buffer::zeroed(100_000)?;
//!     Ok(http::Response::new(Full::new(bytes::Bytes::copy_from_slice(&pixels[..10]))))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let (sender, ended) = mpsc::channel();
//! let layer = RequestLayer::new()
//!     .limit_bytes(1 << 20)
//!     .on_end(move |end| sender.send(end.clone()).expect("a receiver"));
//! let service = ServiceBuilder::new().layer(layer).service_fn(resize);
//!
//! let response = service.oneshot(http::Request::new(())).await?;
//! assert!(ended.try_recv().is_err()); // the body is not there yet
//! response.into_body().collect().await?;
//! let end = ended.try_recv()?;
//! assert_eq!((end.outcome, end.report.stats.peak_bytes), (Outcome::Completed, 100_000));
//! # Ok(())
//! # }
//! ```
//!
//! # hyper
//!
//! It takes tower's services by `TowerToHyperService`:
//!
//! ```
//! use ctxalloc::{Buffer, Error, tower::RequestLayer};
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use hyper::body::{Bytes, Incoming};
//! use hyper_util::{rt::TokioIo, service::TowerToHyperService};
//! use tower::ServiceBuilder;
//!
//! async fn answer(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Error> {
//!     let pixels = Buffer::zeroed(1000)?;
//!     Ok(Response::new(Full::new(Bytes::copy_from_slice(&pixels))))
//! }
//!
//! async fn serve(stream: tokio::net::TcpStream) -> hyper::Result<()> {
//!     let service = ServiceBuilder::new().layer(RequestLayer::new().limit_bytes(1 << 20)).service_fn(answer);
//!     let connection = hyper::server::conn::http1::Builder::new();
//!     connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await
//! }
//! # let _ = serve;
//! ```
//!
//! # tonic
//!
//! It takes the layer as it is. Where a method returns INTERNAL or UNKNOWN, and nothing was allocated since a refusal,
//! the layer answers RESOURCE_EXHAUSTED for it:
//!
//! ```no_run
//! use ctxalloc::{Buffer, tower::RequestLayer};
//! use tonic::{Request, Response, Status, service::Routes, transport::Server};
//!
//! async fn thumbnail(request: Request<u32>) -> Result<Response<Vec<u8>>, Status> {
//!     let refused = |error: ctxalloc::Error| Status::resource_exhausted(error.to_string());
//!     let pixels = Buffer::zeroed(request.into_inner() as usize).map_err(refused)?;
//!     Ok(Response::new(pixels.to_vec()))
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), tonic::transport::Error> {
//! # let _ = thumbnail;
//! # let routes = Routes::default(); // your services: Routes::new(ThumbnailsServer::new(..))
//! Server::builder()
//!     .layer(RequestLayer::new().limit_bytes(1 << 20))
//!     .add_routes(routes)
//!     .serve("127.0.0.1:50051".parse().expect("an address"))
//!     .await
//! # }
//! ```
//!
//! The files from the bottom up: `problem` says how a refusal is answered, `serving` is one request from its
//! beginning to its one end, `body` and `future` carry it, `layer` is what services are given, and `waiting` one
//! whose requests wait for room first.

#[cfg(feature = "axum")]
mod axum;
mod body;
mod future;
mod layer;
mod problem;
mod serving;
mod waiting;

pub use body::ResponseBody;
pub use future::ResponseFuture;
pub use layer::{RequestLayer, RequestService};
pub use serving::{Ended, Outcome};
pub use waiting::{WaitingFuture, WaitingLayer, WaitingService};
