//! What the client hears of a refusal: a problem document (RFC 9457), or a status of gRPC. It names no budget and no number,
//! because strangers read it.

use crate::error::Error;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// gRPC's RESOURCE_EXHAUSTED.
const EXHAUSTED: HeaderValue = HeaderValue::from_static("8");

/// Whether memory was refused by a budget or was not there. Other errors are mistakes in the program.
pub(super) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::BudgetExceeded { .. } | Error::RequestEnded { .. } | Error::OutOfMemory { .. })
}

/// The status that tells a client of a refusal in the request called `request`, which is charged to `tenant`. 413: a second try
/// cannot succeed. 429: the tenant's budget refused. 503: memory is short for others too.
pub(super) fn status_of(error: &Error, request: Option<&str>, tenant: Option<&str>) -> StatusCode {
    match error {
        Error::BudgetExceeded { budget, limit_bytes, requested_bytes, .. } => {
            if request == Some(budget) || requested_bytes > limit_bytes {
                StatusCode::PAYLOAD_TOO_LARGE
            } else if tenant == Some(budget) {
                StatusCode::TOO_MANY_REQUESTS
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
        Error::RequestEnded { .. } | Error::OutOfMemory { .. } => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The body that goes with a status of [`status_of`].
pub(super) fn document(status: StatusCode) -> &'static str {
    match status {
        StatusCode::PAYLOAD_TOO_LARGE => {
            r#"{"type":"about:blank","title":"Content Too Large","status":413,"detail":"The request needs more memory than it may have."}"#
        }
        StatusCode::TOO_MANY_REQUESTS => {
            r#"{"type":"about:blank","title":"Too Many Requests","status":429,"detail":"The memory that this client may have is in use."}"#
        }
        StatusCode::SERVICE_UNAVAILABLE => {
            r#"{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"The memory of this service is in use."}"#
        }
        _ => r#"{"type":"about:blank","title":"Internal Server Error","status":500}"#,
    }
}

/// The headers that go with it.
pub(super) fn headers(status: StatusCode, retry_after_seconds: u32) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CONTENT_LENGTH, document(status).len().into());
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        headers.insert(RETRY_AFTER, retry_after_seconds.into());
    }
    headers
}

/// The status of gRPC that these headers, or trailers, tell.
fn grpc_status(headers: &HeaderMap) -> Option<&str> {
    headers.get("grpc-status")?.to_str().ok()
}

/// Whether the service says of its answer no more than that something went wrong: 500, or UNKNOWN or INTERNAL of gRPC.
pub(super) fn is_unexplained(status: StatusCode, headers: &HeaderMap, is_grpc: bool) -> bool {
    status == StatusCode::INTERNAL_SERVER_ERROR || (is_grpc && matches!(grpc_status(headers), Some("2" | "13")))
}

/// Whether the service's own answer tells of a refusal.
pub(super) fn tells_of_refusal(status: StatusCode, headers: &HeaderMap, is_grpc: bool) -> bool {
    let statuses = [StatusCode::PAYLOAD_TOO_LARGE, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    statuses.contains(&status) || (is_grpc && is_exhausted(headers))
}

/// Whether headers or trailers of gRPC say that a resource is exhausted.
pub(super) fn is_exhausted(headers: &HeaderMap) -> bool {
    headers.get("grpc-status") == Some(&EXHAUSTED)
}

/// The headers of an answer to a gRPC request, which has no body: gRPC's "Trailers-Only".
pub(super) fn grpc_headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(HeaderName::from_static("grpc-status"), EXHAUSTED);
    headers.insert(HeaderName::from_static("grpc-message"), HeaderValue::from_static("out of memory"));
    headers
}

#[cfg(test)]
mod tests {
    use super::{document, status_of};
    use crate::error::Error;
    use http::StatusCode;

    fn refused(budget: &str, requested_bytes: usize) -> Error {
        Error::BudgetExceeded { budget: budget.into(), limit_bytes: 100, in_use_bytes: 90, requested_bytes }
    }

    #[test]
    fn the_status_says_whether_a_second_try_may_succeed() {
        let status = |error: &Error| status_of(error, Some("upload"), Some("red")).as_u16();
        assert_eq!(status(&refused("upload", 20)), 413);
        assert_eq!(status(&refused("red", 20)), 429);
        assert_eq!(status(&refused("red", 101)), 413);
        assert_eq!(status(&refused("service", 20)), 503);
        assert_eq!(status(&Error::OutOfMemory { handler: "pool".into(), requested_bytes: 1 }), 503);
        assert_eq!(status(&Error::TokenUsed), 500);
    }

    #[test]
    fn each_document_has_the_status_that_it_goes_with() {
        for status in [413, 429, 503, 500] {
            let text = document(StatusCode::from_u16(status).expect("a status"));
            assert!(text.contains(&format!("\"status\":{status}")), "{text}");
        }
    }
}
