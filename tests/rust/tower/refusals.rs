//! What a client gets where memory was refused.

use crate::support::{Scripted, answer, assert_outcome, get, now, poll, reporting};
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Outcome, RequestLayer};
use ctxalloc::{Buffer, Error};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use std::task::Poll;
use tower::{BoxError, Layer, ServiceExt, service_fn};

fn text<B>(response: Response<B>) -> String
where
    B: http_body::Body<Error: std::fmt::Debug>,
{
    let bytes = now(response.into_body().collect()).unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn an_error_of_the_service_after_a_refusal_is_answered() {
    let (layer, ends) = reporting();
    let service = layer.limit_bytes(1000).layer(service_fn(|_: Request<()>| async {
        Buffer::zeroed(2000)?;
        Ok::<_, BoxError>(answer(Scripted::new([])).await?)
    }));
    let response = now(service.oneshot(get())).unwrap();
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    assert!(response.headers().get("retry-after").is_none(), "a second try cannot succeed");
    let length = response.headers()["content-length"].to_str().unwrap().parse::<usize>().unwrap();
    let body = text(response);
    assert!(body.contains("\"status\":413") && body.len() == length && !body.contains("1000"));
    let ended = assert_outcome(&ends, Outcome::Refused);
    assert_eq!((ended.status, ended.report.stats.refused), (Some(StatusCode::PAYLOAD_TOO_LARGE), 1));
    assert!(matches!(ended.report.refusal, Some(Error::BudgetExceeded { requested_bytes: 2000, .. })));
}

#[test]
fn a_500_after_a_refusal_is_answered_and_a_500_without_is_not() {
    let (layer, ends) = reporting();
    for (asked, went_on, status, outcome) in [
        (2000, false, 413, Outcome::Refused),
        (500, false, 500, Outcome::Completed),
        (2000, true, 500, Outcome::Completed), // it coped with the refusal, and failed later for another reason
    ] {
        let service = layer.clone().limit_bytes(1000).layer(service_fn(move |_: Request<()>| async move {
            let _ = Buffer::zeroed(asked);
            if went_on {
                let _ = Buffer::zeroed(10);
            }
            let body = http_body_util::Empty::<bytes::Bytes>::new();
            Response::builder().status(500).body(body)
        }));
        let response = now(service.oneshot(get())).unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_outcome(&ends, outcome);
    }
}

#[test]
fn a_refusal_that_the_service_answers_itself_is_one_in_its_own_words() {
    let (layer, ends) = reporting();
    for (asked, status, outcome) in
        [(2000, 503, Outcome::Refused), (2000, 404, Outcome::Completed), (500, 503, Outcome::Completed)]
    {
        let service = layer.clone().limit_bytes(1000).layer(service_fn(move |_: Request<()>| async move {
            drop(Buffer::zeroed(asked));
            let body = http_body_util::Full::new(bytes::Bytes::from_static(b"try later"));
            Response::builder().status(status).body(body)
        }));
        let response = now(service.oneshot(get())).unwrap();
        assert_eq!((response.status().as_u16(), text(response).as_str()), (status, "try later"));
        assert_outcome(&ends, outcome);
    }
}

#[test]
fn a_refusal_that_an_inner_layer_answers_is_one_for_the_outer_layer_too() {
    let ((outer, outer_ends), (inner, inner_ends)) = (reporting(), reporting());
    for (limited, other) in [(outer.clone(), inner.clone().limit_bytes(1000)), (outer.limit_bytes(1000), inner)] {
        let service = limited.layer(other.layer(service_fn(|_: Request<()>| async {
            Buffer::zeroed(2000)?;
            answer(Scripted::new([])).await.map_err(|_| unreachable!())
        })));
        let response = now(service.oneshot(get())).unwrap_or_else(|error: Error| panic!("{error}"));
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert!(text(response).contains("\"status\":413"));
        for ends in [&inner_ends, &outer_ends] {
            assert_eq!(assert_outcome(ends, Outcome::Refused).status, Some(StatusCode::PAYLOAD_TOO_LARGE));
        }
    }
}

#[test]
fn a_refusal_that_the_service_returns_is_answered_whatever_came_after() {
    let (layer, ends) = reporting();
    for status in [200, 500] {
        let service = layer.clone().limit_bytes(1000).layer(service_fn(move |_: Request<()>| async move {
            let refusal = Buffer::zeroed(2000).expect_err("past the limit");
            drop(Buffer::zeroed(10)); // so that it is not the last thing that happened
            let body = http_body_util::Empty::<bytes::Bytes>::new();
            Response::builder().status(status).extension(refusal).body(body)
        }));
        let response = now(service.oneshot(get())).unwrap();
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert!(text(response).contains("\"status\":413"));
        assert_outcome(&ends, Outcome::Refused);
    }
}

#[test]
fn an_error_that_is_no_refusal_passes_as_it_is() {
    let (layer, ends) = reporting();
    let service = layer.limit_bytes(1000).layer(service_fn(|_: Request<()>| async {
        let mut response = answer(Scripted::new([])).await?;
        *response.status_mut() = StatusCode::BAD_REQUEST;
        response.extensions_mut().insert(Error::NameEmpty);
        Ok::<_, std::convert::Infallible>(response)
    }));
    let response = now(service.oneshot(get())).unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    drop(response);
    assert_outcome(&ends, Outcome::Dropped);
}

#[test]
fn without_answers_the_services_own_passes() {
    let (layer, ends) = reporting();
    let service = layer.limit_bytes(1000).answers(false).layer(service_fn(|_: Request<()>| async {
        Buffer::zeroed(2000)?;
        answer(Scripted::new([])).await.map_err(|_| unreachable!())
    }));
    assert!(matches!(now(service.oneshot(get())), Err(Error::BudgetExceeded { .. })));
    assert_outcome(&ends, Outcome::Failed);
}

fn assert_says<B>(response: &Result<Response<B>, Error>, status: u16) {
    let Ok(response) = response else { panic!("it is not answered") };
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (status, &"7".parse().unwrap()));
}

#[test]
fn a_tenants_refusal_is_429_and_the_services_503() {
    let service = Budget::new("service", Some(10_000));
    let tenant = service.child("red", Some(5000));
    let others = tenant.charge(4000).unwrap();
    let more = service.charge(4000).unwrap();
    let (layer, ends) = reporting();
    // An inner layer knows the tenant of the one around it; and names do not count.
    let inner = layer.clone().retry_after_seconds(7).terms(|_, terms| Some(terms.name("service")));
    let layer = layer
        .budget(&service)
        .retry_after_seconds(7)
        .tenant(move |parts| parts.headers.contains_key("red").then(|| tenant.clone()));
    let works = service_fn(|request: Request<()>| async move {
        let _held = Buffer::zeroed(if request.headers().contains_key("much") { 4800 } else { 0 })?;
        Buffer::zeroed(3000)?;
        answer(Scripted::new([])).await.map_err(|_| unreachable!())
    });
    let asked = |names: &[&str]| {
        names.iter().fold(Request::builder(), |request, &name| request.header(name, "yes")).body(()).unwrap()
    };
    for (request, status) in [(&["red"][..], 429), (&[], 503)] {
        assert_says(&now(layer.layer(works).oneshot(asked(request))), status);
        assert_says(&now(layer.layer(inner.layer(works)).oneshot(asked(request))), status);
    }
    drop((others, more));
    let response = now(layer.layer(works).oneshot(asked(&["red", "much"])));
    let status = response.unwrap_or_else(|error: Error| panic!("{error}")).status();
    assert_eq!(status.as_u16(), 413, "alone, too, it has more than the tenant may");
    drop(ends);
    assert_eq!(service.in_use_bytes(), 0);
}

#[test]
fn grpc_hears_a_status_of_its_own() {
    let (layer, ends) = reporting();
    let service = layer.limit_bytes(10).layer(service_fn(|_: Request<()>| async {
        Buffer::zeroed(20)?;
        answer(Scripted::new([])).await.map_err(|_| unreachable!())
    }));
    let request = Request::builder().header("content-type", "application/grpc+proto").body(()).unwrap();
    let response = now(service.oneshot(request)).unwrap_or_else(|error: Error| panic!("{error}"));
    assert_eq!((response.status().as_u16(), &response.headers()["grpc-status"]), (200, &"8".parse().unwrap()));
    let mut body = Box::pin(response.into_body());
    assert!(matches!(poll(&mut body), Poll::Ready(None)));
    assert_outcome(&ends, Outcome::Refused);
}

#[test]
fn terms_that_cannot_be_kept_are_answered_with_500() {
    /// Aligns its blocks to less than a request promises.
    #[derive(Debug)]
    struct Unaligned;
    // SAFETY: it hands out nothing.
    #[allow(unsafe_code, reason = "a strategy")]
    unsafe impl ctxalloc::strategy::Strategy for Unaligned {
        fn alignment(&self) -> usize {
            1
        }
        fn allocate(&self, _: usize) -> Option<std::ptr::NonNull<u8>> {
            None
        }
        unsafe fn resize(&self, _: std::ptr::NonNull<u8>, _: usize) -> Option<std::ptr::NonNull<u8>> {
            None
        }
        unsafe fn release(&self, _: std::ptr::NonNull<u8>) {}
    }
    let (layer, ends) = reporting();
    let layer = layer.terms(|_, terms| Some(terms.strategy(Unaligned)));
    let service = layer.layer(service_fn(|_: Request<()>| answer(Scripted::new([]))));
    let response = now(service.oneshot(get())).unwrap();
    assert_eq!(response.status().as_u16(), 500);
    assert!(ends.try_recv().is_err(), "it never began, and the service was not called");
}

#[test]
fn what_exceeds_the_limit_of_the_heap_is_dropped_and_answered() {
    let (layer, ends) = reporting();
    let layer = layer.terms(|_, terms| Some(terms.name("upload").heap_limit_bytes(100_000)));
    let service = layer.layer(service_fn(|request: Request<()>| async move {
        let mut kept = Vec::new();
        for _ in 0..if request.headers().contains_key("much") { 20 } else { 5 } {
            kept.push(vec![0_u8; 10_000]);
            tokio::task::yield_now().await;
        }
        answer(Scripted::new([])).await
    }));
    let much = Request::builder().header("much", "yes").body(()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (request, status, outcome) in [(much, 413, Outcome::Refused), (get(), 200, Outcome::Dropped)] {
        let response = runtime.block_on(service.clone().oneshot(request)).unwrap();
        assert_eq!(response.status().as_u16(), status);
        drop(response);
        let ended = assert_outcome(&ends, outcome);
        let heap = ended.report.heap.unwrap();
        assert!(heap.peak_bytes < 115_000 && heap.live_bytes < 1000, "it was dropped at once: {heap:?}");
        assert_eq!(matches!(ended.report.refusal, Some(Error::BudgetExceeded { .. })), status == 413);
    }
}

#[test]
fn a_refusal_is_told_by_the_statuses_that_the_layer_is_given() {
    let answering = |status: u16| {
        move |request: Request<()>| async move {
            let own = request.extensions().get::<ctxalloc::RequestHandle>().unwrap().handler();
            assert!(Buffer::zeroed_in(own, 200).is_err());
            let mut response = Response::new(http_body_util::Empty::<bytes::Bytes>::new());
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok::<_, BoxError>(response)
        }
    };
    let usual = [(507, false), (503, true), (429, true), (413, true)];
    let given = [(507, true), (503, false), (429, false), (413, false)];
    for (is_given, statuses) in [(false, usual), (true, given)] {
        for (status, is_refused) in statuses {
            let (layer, ends) = reporting();
            let layer = layer.limit_bytes(100);
            let layer = if is_given { layer.refused_statuses([StatusCode::INSUFFICIENT_STORAGE]) } else { layer };
            let response = now(layer.layer(service_fn(answering(status))).oneshot(get())).unwrap();
            assert_eq!(response.status().as_u16(), status, "it passes");
            assert_eq!(text(response), "");
            let outcome = ends.try_recv().unwrap().outcome;
            assert_eq!(outcome == Outcome::Refused, is_refused, "{status}: {outcome:?}");
        }
    }
}

#[test]
fn a_reservation_without_room_is_refused_before_the_service_is_called() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.child("tenant", Some(500));
    let of_tenant = tenant.clone();
    let layer = RequestLayer::new().tenant(move |_| Some(of_tenant.clone())).retry_after_seconds(7);
    let asked = |bytes| {
        let service = layer.clone().terms(move |_, terms| Some(terms.reserve_bytes(bytes)));
        let service = service.layer(service_fn(|_: Request<()>| async { answer(Scripted::new([])).await }));
        let response = now(service.oneshot(get())).unwrap();
        let retry = response.headers().get("retry-after").map(|seconds| seconds.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        drop(response);
        (status, retry)
    };
    let later = Some("7".to_owned());
    assert_eq!(asked(100), (200, None));
    assert_eq!(asked(501), (413, None));
    let held = process.charge(950).unwrap();
    assert_eq!(asked(100), (503, later.clone()));
    drop(held);
    let held = tenant.charge(450).unwrap();
    assert_eq!(asked(100), (429, later));
    drop(held);
    assert_eq!((process.in_use_bytes(), process.reserved_bytes()), (0, 0));
}

#[test]
fn what_never_fits_beside_the_guarantees_of_others_is_413() {
    let process = Budget::new("process", Some(1000));
    let promised = process.guaranteed_child("promised", None, 600).unwrap();
    let tenant = process.child("tenant", None);
    let status = |bytes| {
        let of_tenant = tenant.clone();
        let layer = RequestLayer::new().tenant(move |_| Some(of_tenant.clone()));
        let service = layer.layer(service_fn(move |_: Request<()>| async move {
            let _held = Buffer::zeroed(100)?;
            Buffer::zeroed(bytes)?;
            Ok::<_, BoxError>(answer(Scripted::new([])).await?)
        }));
        let response = now(service.oneshot(get())).unwrap();
        (response.status().as_u16(), response.headers().contains_key("retry-after"))
    };
    assert_eq!(status(301), (413, false), "with the 100 that it holds it is one more than is ever there for it");
    assert_eq!(status(300), (200, false));
    let borrowed = process.charge(200).unwrap();
    assert_eq!(status(250), (503, true), "when the 200 come back there is room");
    drop((borrowed, promised));
    assert_eq!(status(900), (200, false), "nothing is guaranteed any more");
}
