//! The layer that `ctxalloc recommend` gives to paste: tests/python/test_tune_snippets.py compares the two.

use axum::extract::MatchedPath;
use ctxalloc::source::HugePages;
use ctxalloc::strategy::{Aligned, Arena, Pool, PoolOptions, System, Tracked};
use ctxalloc::tower::RequestLayer;

use ctxalloc::strategy::Budget;
use ctxalloc::tower::WaitingLayer;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::any;
use tokio::sync::Barrier;
use tower::ServiceExt as _;

#[allow(clippy::let_and_return, reason = "what is pasted ends with a name")]
fn layer() -> RequestLayer {
    let hugepages = Pool::over(HugePages::transparent(), PoolOptions::default());
    // What a route has beside these terms it keeps: a budget, a timeout, a handler.
    let layer = RequestLayer::new().terms(move |parts, terms| {
        let route = parts.extensions.get::<MatchedPath>()?.as_str();
        let terms = terms.name(format!("{} {route}", parts.method));
        Some(match (parts.method.as_str(), route) {
            ("POST", "/resize/{name}") => terms.limit_bytes(8388608).reserve_bytes(4194304),
            ("GET", "/report") => terms.limit_bytes(2097152).strategy(Arena::over(Pool::shared())),
            ("GET", "/table") => terms.limit_bytes(67108864).reserve_bytes(33554432).strategy(hugepages.clone()),
            ("GET", "/plain") => terms.limit_bytes(1048576).strategy(System),
            ("GET", "/aligned") => terms.strategy(Aligned::new(128).expect("a power of two")), // and the limit that it has
            ("GET", "/t") => terms.limit_bytes(3145728).strategy(Tracked::new(Pool::shared().clone()).expect("a pool")),
            ("GET", "/resize/{name}") => terms.limit_bytes(7340032),
            ("GET", "/\u{1b}\u{202e}\"\\") => terms.limit_bytes(1048576),
            (_, "/files/{*rest}") => terms.limit_bytes(1048576), // and the strategy that it has
            _ => terms,
        })
    });
    // By hand: ctxalloc::request().name("nightly 'sums'").limit_bytes(1048576)
    layer
}

/// The one where large requests wait for a common budget.
#[allow(clippy::let_and_return, reason = "what is pasted ends with a name")]
fn waiting_layer() -> WaitingLayer {
    // Who finds no room here waits in line. A route that has a budget or a tenant keeps that: leave reserve_bytes,
    // budget and timeout out of its line. All that is charged to this budget must reserve of it.
    let at_once = Budget::new("at once", Some(62914560));
    at_once.set_max_waiting(4000);
    // What a route has beside these terms it keeps: a budget, a timeout, a handler.
    let layer = RequestLayer::new().terms(move |parts, terms| {
        let route = parts.extensions.get::<MatchedPath>()?.as_str();
        let terms = terms.name(format!("{} {route}", parts.method));
        Some(match (parts.method.as_str(), route) {
            ("GET", "/large") => terms.limit_bytes(31457280).reserve_bytes(31457280).budget(&at_once),
            ("GET", "/small") => terms.limit_bytes(1048576).reserve_bytes(1048576),
            _ => terms,
        })
    });
    let layer = layer.waiting().timeout(Duration::from_secs(60));
    layer
}

/// Whether 6 MiB are refused, and what the request is called.
async fn asked() -> String {
    let name = ctxalloc::current_request().map(|request| request.name().into_owned()).unwrap_or_default();
    format!("{name} {}", ctxalloc::Buffer::zeroed(6 << 20).is_err())
}

#[tokio::test]
async fn each_route_gets_what_was_advised() {
    let paths = ["/resize/{name}", "/report", "/table", "/plain", "/aligned", "/t", "/files/{*rest}", "/other"];
    let app = paths.into_iter().fold(Router::new(), |app, path| app.route(path, any(asked))).route_layer(layer());
    let gets = paths.into_iter().zip([false, true, false, true, false, true, true, false]);
    let each = gets.map(|(path, is_refused)| ("GET", path, is_refused));
    let posts = [("POST", "/resize/{name}", false), ("POST", "/report", false), ("POST", "/files/{*rest}", true)];
    for (method, path, is_refused) in each.chain(posts) {
        let request = http::Request::builder().method(method).uri(path.replace(['{', '}', '*'], ""));
        let answer = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let body = to_bytes(answer.into_body(), 1000).await.unwrap();
        assert_eq!(std::str::from_utf8(&body).unwrap(), format!("{method} {path} {is_refused}"));
    }
}

#[tokio::test]
async fn as_many_run_as_have_room_and_the_others_wait() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let two = Arc::new(Barrier::new(2)); // as many as are to run at once wait for each other
    let counted = {
        let most = Arc::clone(&most);
        async move || {
            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            let held = ctxalloc::Buffer::zeroed(20 << 20);
            tokio::time::timeout(Duration::from_secs(60), two.wait()).await.expect("another one runs beside it");
            now.fetch_sub(1, SeqCst);
            held.is_ok().to_string()
        }
    };
    let app = Router::new().route("/large", any(counted)).route_layer(waiting_layer());
    let each =
        (0..6).map(|_| tokio::spawn(app.clone().oneshot(http::Request::get("/large").body(Body::empty()).unwrap())));
    for one in each.collect::<Vec<_>>() {
        let answer = one.await.unwrap().unwrap();
        assert_eq!(to_bytes(answer.into_body(), 1000).await.unwrap(), "true");
    }
    assert_eq!(most.load(SeqCst), 2);
}
