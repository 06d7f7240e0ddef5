//! `Error` as an answer of axum's handlers: `async fn handler() -> Result<Bytes, ctxalloc::Error>`.

use super::problem::{answer_to, document, headers, status_of};
use crate::error::Error;
use axum_core::body::Body;
use axum_core::response::{IntoResponse, Response};

impl IntoResponse for Error {
    /// 413 or 503 with a problem document for memory that was refused; 500 for all others. A
    /// [`RequestLayer`](super::RequestLayer) knows more, and answers what its tenant's budget refused with 429.
    fn into_response(self) -> Response {
        let answer = answer_to(&self, None);
        let mut response = Response::new(Body::from(document(answer)));
        *response.status_mut() = status_of(answer);
        *response.headers_mut() = headers(answer, 1);
        response.extensions_mut().insert(self);
        response
    }
}
