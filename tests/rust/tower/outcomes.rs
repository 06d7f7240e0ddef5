//! Each way in which a request of a service may end.

use crate::support::{Scripted, Step, answer, assert_outcome, get, now, once, poll, reporting};
use ctxalloc::tower::{Outcome, RequestLayer};
use ctxalloc::{Buffer, RequestHandle, current_request, default_handler};
use http::{Method, Request, Response, StatusCode};
use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

/// A service that answers with this body.
macro_rules! answered {
    ($layer:expr, $body:expr) => {
        $layer.layer(service_fn(|_: Request<()>| async { answer($body).await }))
    };
}

#[test]
fn a_streamed_body_ends_its_request_where_it_ends() {
    let (layer, ends) = reporting();
    let service = answered!(layer, Scripted::new([Step::Data("a"), Step::Data("b")]));
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    for _ in 0..2 {
        assert!(matches!(poll(&mut body), Poll::Ready(Some(Ok(_)))));
        assert!(ends.try_recv().is_err(), "it is not over");
    }
    assert!(matches!(poll(&mut body), Poll::Ready(None)));
    let ended = assert_outcome(&ends, Outcome::Completed);
    assert_eq!(ended.status, Some(StatusCode::OK));
    // What it held is gone before the end, and what it allocated while it was polled was the request's.
    assert_eq!((ended.report.stats.peak_bytes, ended.report.stats.total_blocks), (1100, 4));
    assert_eq!(ended.report.escaped_blocks, 0);
    drop(body);
    assert!(ends.try_recv().is_err(), "reported a second time");
}

#[test]
fn a_body_that_is_over_at_once_is_dropped_in_its_request() {
    struct Over(#[allow(dead_code, reason = "it is dropped")] Buffer, Arc<AtomicUsize>);
    impl http_body::Body for Over {
        type Data = bytes::Bytes;
        type Error = Infallible;
        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Self::Data>, Infallible>>> {
            Poll::Ready(None)
        }
        fn is_end_stream(&self) -> bool {
            true
        }
    }
    impl Drop for Over {
        fn drop(&mut self) {
            self.1.store(1 + usize::from(current_request().is_some()), Ordering::SeqCst);
        }
    }
    let (layer, ends) = reporting();
    let seen = Arc::new(AtomicUsize::new(0));
    let service = layer.layer(service_fn(|_: Request<()>| {
        let seen = Arc::clone(&seen);
        async move { Ok::<_, Infallible>(Response::new(Over(Buffer::zeroed(1000).unwrap(), seen))) }
    }));
    let answered = now(service.oneshot(get())).unwrap();
    let ended = assert_outcome(&ends, Outcome::Completed);
    assert_eq!((ended.report.escaped_blocks, seen.load(Ordering::SeqCst)), (0, 2));
    drop(answered);
}

#[test]
fn a_request_dropped_while_something_else_unwinds_is_dropped() {
    let (layer, ends) = reporting();
    let mut service = answered!(layer, Scripted::new([Step::Data("a")]));
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _future = Box::pin(service.call(get()));
        panic!("something else")
    }));
    assert!(unwound.is_err());
    assert_outcome(&ends, Outcome::Dropped);
}

#[test]
fn what_on_end_panics_with_may_panic_in_turn() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a bomb")
        }
    }
    let layer = RequestLayer::new().on_end(|_| std::panic::panic_any(Bomb));
    let service = answered!(layer, Scripted::new([Step::Data("a")]));
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    assert!(catch_unwind(AssertUnwindSafe(|| while let Poll::Ready(Some(_)) = poll(&mut body) {})).is_ok());
}

#[test]
fn a_body_of_known_length_is_complete_without_a_poll_to_none() {
    for by_header in [false, true] {
        let (layer, ends) = reporting();
        let service = layer.layer(service_fn(move |_: Request<()>| async move {
            let mut response = Response::new(Scripted::new([Step::Data("ab"), Step::Data("c")]));
            if by_header {
                response.headers_mut().insert("content-length", 3.into());
            } else {
                response.body_mut().length = Some(3);
            }
            Ok::<_, Infallible>(response)
        }));
        let mut body = Box::pin(now(service.clone().oneshot(get())).unwrap().into_body());
        let _ = poll(&mut body);
        let _ = poll(&mut body);
        drop(body); // as hyper does when it has all bytes
        assert_outcome(&ends, Outcome::Completed);

        let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
        let _ = poll(&mut body);
        drop(body);
        assert_outcome(&ends, Outcome::Dropped); // one byte is missing
    }
}

#[test]
fn a_body_that_says_that_it_is_over_ends_its_request_then() {
    let (layer, ends) = reporting();
    let service = answered!(layer, Scripted { says_so: true, ..Scripted::new([Step::Data("a")]) });
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    assert!(!http_body::Body::is_end_stream(&*body));
    let _ = poll(&mut body);
    assert!(http_body::Body::is_end_stream(&*body));
    assert_outcome(&ends, Outcome::Completed);

    let (layer, ends) = reporting();
    let service = answered!(layer, Scripted { says_so: true, ..Scripted::new([]) });
    let response = now(service.oneshot(get())).unwrap();
    assert_outcome(&ends, Outcome::Completed); // before anybody polls it, which nobody does
    drop(response);
}

#[test]
fn a_body_ends_its_request_with_its_trailers() {
    let (layer, ends) = reporting();
    let service = answered!(layer, Scripted::new([Step::Data("a"), Step::Trailers]));
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    let _ = poll(&mut body);
    assert!(ends.try_recv().is_err(), "it is not over");
    let _ = poll(&mut body);
    drop(body); // as hyper does over HTTP/2: nothing comes after trailers
    assert_outcome(&ends, Outcome::Completed);
}

#[test]
fn an_answer_whose_body_nobody_asks_for_is_complete() {
    let (layer, ends) = reporting();
    let service = answered!(layer, Scripted::new([Step::Data("a")]));
    let head = Request::builder().method(Method::HEAD).body(()).unwrap();
    drop(now(service.oneshot(head)).unwrap());
    assert_outcome(&ends, Outcome::Completed);
    for status in [204, 304, 101] {
        let (layer, ends) = reporting();
        let service = layer.layer(service_fn(move |_: Request<()>| async move {
            let mut response = Response::new(Scripted::new([]));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok::<_, Infallible>(response)
        }));
        drop(now(service.oneshot(get())).unwrap());
        assert_outcome(&ends, Outcome::Completed);
    }
}

#[test]
fn a_body_that_is_dropped_early_fails_or_panics_is_told_once() {
    for (step, outcome) in
        [(Step::Wait, Outcome::Dropped), (Step::Fail, Outcome::Failed), (Step::Panic, Outcome::Panicked)]
    {
        let (layer, ends) = reporting();
        let step = std::sync::Mutex::new(Some(step));
        let service = layer.layer(service_fn(|_: Request<()>| {
            answer(Scripted::new([Step::Data("a"), step.lock().unwrap().take().unwrap()]))
        }));
        let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
        let _ = poll(&mut body);
        let _ = catch_unwind(AssertUnwindSafe(|| poll(&mut body).map(drop)));
        drop(body);
        let ended = assert_outcome(&ends, outcome);
        assert_eq!(ended.report.escaped_blocks, 0, "what the body held goes before the end");
    }
}

#[test]
fn an_error_a_panic_and_a_dropped_future_are_told_once() {
    let (layer, ends) = reporting();
    let fails = layer
        .clone()
        .layer(service_fn(|_: Request<()>| async { Err::<Response<Scripted>, _>(io::Error::other("no")) }));
    assert!(now(fails.oneshot(get())).is_err());
    let ended = assert_outcome(&ends, Outcome::Failed);
    assert_eq!(ended.status, None);

    let panics = layer.clone().layer(service_fn(|_: Request<()>| async {
        let _held = Buffer::zeroed(10).unwrap();
        if current_request().is_some() {
            panic!("it panics");
        }
        answer(Scripted::new([])).await
    }));
    assert!(catch_unwind(AssertUnwindSafe(|| now(panics.oneshot(get())).is_ok())).is_err());
    assert_eq!(assert_outcome(&ends, Outcome::Panicked).report.escaped_blocks, 0);

    let panics_at_once = layer.clone().layer(service_fn(|_: Request<()>| {
        if current_request().is_some() {
            panic!("it panics");
        }
        answer(Scripted::new([]))
    }));
    let mut panics_at_once = panics_at_once;
    assert!(catch_unwind(AssertUnwindSafe(|| drop(panics_at_once.call(get())))).is_err());
    assert_outcome(&ends, Outcome::Panicked);

    let waits = layer.layer(service_fn(|_: Request<()>| async {
        let _held = Buffer::zeroed(10).unwrap();
        std::future::pending::<()>().await;
        answer(Scripted::new([])).await
    }));
    let mut future = Box::pin(waits.oneshot(get()));
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(ends.try_recv().is_err());
    drop(future);
    let ended = assert_outcome(&ends, Outcome::Dropped);
    assert_eq!((ended.report.stats.peak_bytes, ended.report.escaped_blocks), (10, 0));
    assert_eq!(ctxalloc::current(), default_handler(), "whatever became of it, nothing is selected here");
}

#[test]
fn the_service_is_called_polled_and_dropped_in_its_request() {
    struct Look(&'static str);
    impl Drop for Look {
        fn drop(&mut self) {
            assert!(current_request().is_some(), "{}", self.0);
        }
    }
    let (layer, ends) = reporting();
    let service = layer.terms(|_, terms| Some(terms.name("upload"))).layer(service_fn(|request: Request<()>| {
        let called_in = current_request().unwrap();
        let handle = request.extensions().get::<RequestHandle>().unwrap().clone();
        assert_eq!(called_in.handler(), handle.handler());
        // An async block drops what it has in its last poll; other futures keep it until they are dropped.
        let look = Look("where the future is dropped");
        std::future::poll_fn(move |_| {
            let _ = &look;
            assert_eq!(current_request().unwrap().name(), handle.name());
            Poll::Ready(now(answer(Scripted::new([]))))
        })
    }));
    drop(now(service.oneshot(get())).unwrap());
    assert_eq!(once(&ends).name, "upload");
}

#[test]
fn terms_of_none_leave_a_request_as_it_is() {
    let (layer, ends) = reporting();
    let service = layer.terms(|_, _| None).layer(service_fn(|request: Request<()>| async move {
        assert!(request.extensions().get::<RequestHandle>().is_none() && current_request().is_none());
        answer(Scripted::new([Step::Data("a")])).await
    }));
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    assert!(matches!(poll(&mut body), Poll::Ready(Some(Ok(_)))));
    drop(body);
    assert!(ends.try_recv().is_err());
}

#[test]
fn an_inner_layer_is_a_request_inside_and_a_server_task_is_not() {
    let ((outer, outer_ends), (inner, inner_ends)) = (reporting(), reporting());
    let service =
        ServiceBuilder::new().layer(outer).layer(inner).service(service_fn(|_: Request<()>| answer(Scripted::new([]))));
    drop(now(service.clone().oneshot(get())).unwrap());
    assert_eq!(once(&outer_ends).report.stats.peak_bytes, 100);
    assert_eq!(once(&inner_ends).report.stats.peak_bytes, 100);

    // What the server's own task happens to carry is not around its requests.
    let accident = ctxalloc::request().begin().unwrap();
    drop(now(accident.scope(service.oneshot(get()))).unwrap());
    assert_eq!(accident.stats().total_blocks, 0);
}

#[test]
fn the_service_that_was_ready_is_the_one_that_is_called() {
    /// Refuses calls for which it was not asked before; a clone was not asked.
    struct Requested(bool, Arc<AtomicUsize>);
    impl Clone for Requested {
        fn clone(&self) -> Self {
            Self(false, Arc::clone(&self.1))
        }
    }
    impl Service<Request<()>> for Requested {
        type Response = Response<Scripted>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Self::Response, Infallible>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            self.0 = true;
            if self.1.fetch_add(1, Ordering::Relaxed) == 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
        }
        fn call(&mut self, _: Request<()>) -> Self::Future {
            assert!(std::mem::take(&mut self.0), "called without being ready");
            std::future::ready(Ok(Response::new(Scripted::new([]))))
        }
    }
    let asked = Arc::new(AtomicUsize::new(0));
    let mut service = RequestLayer::new().layer(Requested(false, Arc::clone(&asked)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut cx).is_pending(), "what is not ready is not said to be");
    assert!(service.poll_ready(&mut cx).is_ready());
    assert!(now(service.call(get())).is_ok());
}

#[test]
fn a_panic_of_on_end_harms_nobody() {
    let layer = RequestLayer::new().on_end(|_| panic!("whoever counts is broken"));
    let service = answered!(layer, Scripted::new([]));
    let mut body = Box::pin(now(service.oneshot(get())).unwrap().into_body());
    assert!(matches!(poll(&mut body), Poll::Ready(None)));
}
