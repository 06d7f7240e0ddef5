//! `RequestLayer::waiting`: requests wait for their reservation before the service is called.

use super::support::{Scripted, Step, once, reporting};
use ctxalloc::strategy::Budget;
use ctxalloc::tower::{Outcome, RequestLayer, WaitingLayer};
use ctxalloc::{Buffer, current_request};
use http::{Request, Response};
use http_body_util::BodyExt;
use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tower::{ServiceExt, service_fn};
use tower_layer::Layer;

fn get() -> Request<()> {
    Request::new(())
}

async fn answer(_: Request<()>) -> Result<Response<Scripted>, Infallible> {
    assert!(current_request().is_some(), "called inside of its request");
    drop(Buffer::zeroed(500).expect("it is reserved"));
    Ok(Response::new(Scripted::new([Step::Data("a")])))
}

fn waiting(budget: &Budget) -> WaitingLayer {
    RequestLayer::new().budget(budget).reserve_bytes(1500).waiting()
}

fn is_pending<F: Future>(future: std::pin::Pin<&mut F>) -> bool {
    matches!(future.poll(&mut Context::from_waker(Waker::noop())), Poll::Pending)
}

#[tokio::test]
async fn requests_wait_in_line_before_the_service_is_called() {
    let budget = Budget::new("process", Some(2500));
    let called = Arc::new(AtomicUsize::new(0));
    let service = waiting(&budget).layer(service_fn({
        let (called, budget) = (Arc::clone(&called), budget.clone());
        move |request| {
            called.fetch_add(1, Ordering::SeqCst);
            assert!(budget.in_use_bytes() + budget.reserved_bytes() <= 2500);
            answer(request)
        }
    }));
    let held = budget.charge(1200).unwrap();
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let future = service.clone().oneshot(get());
            tokio::spawn(async move { future.await.unwrap().into_body().collect().await.unwrap().to_bytes() })
        })
        .collect();
    while budget.waiting() < 20 {
        tokio::task::yield_now().await;
    }
    assert_eq!(called.load(Ordering::SeqCst), 0);
    drop(held);
    for task in tasks {
        assert_eq!(tokio::time::timeout(Duration::from_secs(20), task).await.unwrap().unwrap(), "a");
    }
    assert_eq!((called.load(Ordering::SeqCst), budget.in_use_bytes(), budget.reserved_bytes()), (20, 0, 0));
}

#[tokio::test]
async fn one_that_gets_no_room_is_answered_and_the_service_not_called() {
    let process = Budget::new("process", Some(1000));
    let tenant = process.child("tenant", Some(700));
    let promised = process.guaranteed_child("promised", None, 350).unwrap();
    let of_tenant = tenant.clone();
    let layer = RequestLayer::new().tenant(move |_| Some(of_tenant.clone())).retry_after_seconds(7);
    let asked = async |bytes| {
        let layer = layer.clone().reserve_bytes(bytes).waiting().timeout(Duration::from_millis(5));
        let service = layer.layer(service_fn(|_: Request<()>| async { answer(get()).await }));
        let response = service.oneshot(get()).await.unwrap();
        let retry = response.headers().get("retry-after").map(|seconds| seconds.to_str().unwrap().to_owned());
        (response.status().as_u16(), retry)
    };
    let later = Some("7".to_owned());
    assert_eq!(asked(600).await, (200, None));
    assert_eq!(asked(701).await, (413, None));
    assert_eq!(asked(651).await, (413, None), "350 of the process are another one's for good");
    let held = process.charge(600).unwrap();
    assert_eq!(asked(600).await, (503, later.clone()));
    drop(held);
    let held = tenant.charge(650).unwrap();
    assert_eq!(asked(600).await, (429, later));
    drop((held, promised));
    assert_eq!((process.in_use_bytes(), process.waiting()), (0, 0));
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_the_line_and_passes_its_turn_on() {
    let budget = Budget::new("process", Some(2500));
    let (layer, ends) = reporting();
    let service = layer.budget(&budget).reserve_bytes(1500).waiting().layer(service_fn(answer));
    let held = budget.charge(1200).unwrap();
    let mut first = Box::pin(service.clone().oneshot(get()));
    let mut second = pin!(service.oneshot(get()));
    assert!(is_pending(first.as_mut()) && is_pending(second.as_mut()));
    assert_eq!(budget.waiting(), 2);
    drop(first);
    assert_eq!(budget.waiting(), 1);
    assert!(ends.try_recv().is_err(), "it never began");
    drop(held);
    let response = tokio::time::timeout(Duration::from_secs(20), second).await.unwrap().unwrap();
    response.into_body().collect().await.unwrap();
    assert_eq!(once(&ends).outcome, Outcome::Completed);
    assert_eq!((budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting()), (0, 0, 0));
}

#[tokio::test]
async fn its_place_is_taken_by_the_call_and_not_by_the_first_poll() {
    let budget = Budget::new("process", Some(2500));
    let mut service = waiting(&budget).layer(service_fn(answer));
    let held = budget.charge(1200).unwrap();
    let first = tower_service::Service::call(&mut service, get());
    assert_eq!(budget.waiting(), 1);
    drop((first, held));
    assert_eq!(budget.waiting(), 0);
}

#[tokio::test]
async fn terms_without_a_reservation_do_not_wait_and_no_terms_are_no_request() {
    let budget = Budget::new("process", Some(100));
    let _held = budget.charge(100).unwrap();
    let free = RequestLayer::new().waiting().layer(service_fn(answer));
    assert_eq!(free.oneshot(get()).await.unwrap().status(), 200);
    let none = RequestLayer::new().terms(|_, _| None).waiting().layer(service_fn(|_: Request<()>| async {
        assert!(current_request().is_none());
        Ok::<_, Infallible>(Response::new(Scripted::new([])))
    }));
    assert_eq!(none.oneshot(get()).await.unwrap().status(), 200);
}
