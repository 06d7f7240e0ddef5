//! How a refusal is answered: the headers and the body of the answer that `crate::answer` decides on, or a
//! status of gRPC.

use crate::answer::Answer;
use crate::error::Error;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// gRPC's RESOURCE_EXHAUSTED.
const EXHAUSTED: HeaderValue = HeaderValue::from_static("8");

/// Whether memory was refused by a budget or was not there. Other errors are mistakes in the program.
pub(super) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::BudgetExceeded { .. } | Error::RequestEnded { .. } | Error::OutOfMemory { .. })
}

/// The answer to an error of a request that is charged to `tenant`. None where memory has nothing to do with it: 500.
pub(super) fn answer_to(error: &Error, tenant: Option<u64>) -> Option<Answer> {
    match error {
        // Not because of a limit: other requests may meet the same.
        Error::RequestEnded { .. } | Error::OutOfMemory { .. } => Some(Answer::Busy),
        error => Answer::to(error, tenant),
    }
}

/// The status of such an answer.
pub(super) fn status_of(answer: Option<Answer>) -> StatusCode {
    let status = answer.and_then(|answer| StatusCode::from_u16(answer.status()).ok());
    status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// Its body.
pub(super) fn document(answer: Option<Answer>) -> &'static str {
    answer.map_or(r#"{"type":"about:blank","title":"Internal Server Error","status":500}"#, Answer::document)
}

/// The headers that go with it.
pub(super) fn headers(answer: Option<Answer>, retry_after_seconds: u32) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CONTENT_LENGTH, document(answer).len().into());
    if matches!(answer, Some(Answer::TenantBusy | Answer::Busy)) {
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

/// The statuses by which an answer tells of a refusal, unless the layer is given others.
pub(super) const REFUSED: [StatusCode; 3] =
    [StatusCode::PAYLOAD_TOO_LARGE, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];

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
    use super::{answer_to, document, status_of};
    use crate::error::Error;

    #[test]
    fn what_no_budget_refused_is_503_where_it_is_memory_and_500_else() {
        let status = |error: &Error| status_of(answer_to(error, None)).as_u16();
        assert_eq!(status(&Error::OutOfMemory { handler: "pool".into(), requested_bytes: 1 }), 503);
        assert_eq!(status(&Error::RequestEnded { request: "r".into(), requested_bytes: 1 }), 503);
        assert_eq!(status(&Error::TokenUsed), 500);
        assert!(document(None).contains("\"status\":500"));
    }
}
