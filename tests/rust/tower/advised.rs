//! The layer that `ctxalloc recommend` gives to paste: tests/python/test_tune_snippets.py compares the two.

use axum::extract::MatchedPath;
use ctxalloc::source::HugePages;
use ctxalloc::strategy::{Aligned, Arena, Pool, PoolOptions, System, Tracked};
use ctxalloc::tower::RequestLayer;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::get;
use tower::ServiceExt as _;

#[allow(clippy::let_and_return, reason = "what is pasted ends with a name")]
fn layer() -> RequestLayer {
    let hugepages = Pool::over(HugePages::transparent(), PoolOptions::default());
    let layer = RequestLayer::new().terms(move |parts, terms| {
        let route = parts.extensions.get::<MatchedPath>()?.as_str().to_owned();
        let terms = terms.name(route.clone());
        Some(match route.as_str() {
            "/resize/{name}" => terms.limit_bytes(8388608).reserve_bytes(4194304),
            "/report" => terms.limit_bytes(2097152).reserve_bytes(1048576).strategy(Arena::over(Pool::shared())),
            "/table" => terms.limit_bytes(67108864).reserve_bytes(33554432).strategy(hugepages.clone()),
            "/plain" => terms.limit_bytes(1048576).strategy(System),
            "/aligned" => terms.strategy(Aligned::new(128).expect("a power of two")),
            "/tracked" => terms.limit_bytes(3145728).strategy(Tracked::new(Pool::shared().clone()).expect("a pool")),
            _ => terms,
        })
    });
    layer
}

/// Whether 6 MiB are refused, and what the request is called.
async fn asked() -> String {
    let name = ctxalloc::current_request().map(|request| request.name().into_owned()).unwrap_or_default();
    format!("{name} {}", ctxalloc::Buffer::zeroed(6 << 20).is_err())
}

#[tokio::test]
async fn each_route_gets_what_was_advised() {
    let paths = ["/resize/{name}", "/report", "/table", "/plain", "/aligned", "/tracked", "/other"];
    let app = paths.into_iter().fold(Router::new(), |app, path| app.route(path, get(asked))).route_layer(layer());
    for (path, is_refused) in paths.into_iter().zip([false, true, false, true, false, true, false]) {
        let request = http::Request::get(path.replace("{name}", "one")).body(Body::empty()).unwrap();
        let answer = app.clone().oneshot(request).await.unwrap();
        let body = to_bytes(answer.into_body(), 1000).await.unwrap();
        assert_eq!(std::str::from_utf8(&body).unwrap(), format!("{path} {is_refused}"));
    }
}
