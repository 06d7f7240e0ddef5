"""The guards of the tower layer, each with what takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mutant import Mutant

BODY: Final = "src/tower/body.rs"
FUTURE: Final = "src/tower/future.rs"
LAYER: Final = "src/tower/layer.rs"
PROBLEM: Final = "src/tower/problem.rs"
SERVING: Final = "src/tower/serving.rs"


@dataclass(frozen=True, slots=True)
class UnderLoad(Mutant):
    """One that only the load test notices, which takes longer than all others."""


MUTANTS: Final = (
    # readiness
    Mutant("poll_ready does not ask", LAYER, "self.inner.poll_ready(cx)", "{ let _ = cx; Poll::Ready(Ok(())) }"),
    Mutant("poll_ready asks a clone", LAYER, "self.inner.poll_ready(cx)", "self.inner.clone().poll_ready(cx)"),
    Mutant(
        "a clone is called, not the ready one",
        LAYER,
        "context.run(|| inner.call(request))",
        "let mut clone = inner.clone();\n        context.run(|| clone.call(request))",
    ),
    # the request is selected
    Mutant(
        "the service is called outside",
        LAYER,
        "context.run(|| inner.call(request))",
        "let _ = &mut context;\n        inner.call(request)",
    ),
    Mutant(
        "the future is polled outside",
        FUTURE,
        """            context.run(|| {
                let inner = this""",
        """            let _ = &context;
            None.unwrap_or_else(|| {
                let inner = this""",
    ),
    Mutant(
        "the future is dropped after its poll's context",
        FUTURE,
        "                this.inner.set(None); // destructors of the future run in its request\n",
        "",
    ),
    Mutant(
        "a dropped future goes after its request",
        FUTURE,
        "            context.run(|| this.inner.set(None));\n            let outcome",
        "            let _ = &mut context;\n            let outcome",
    ),
    Mutant("the body is polled outside", BODY, "inside.context.run(|| inner.poll_frame(cx))", "inner.poll_frame(cx)"),
    Mutant(
        "a dropped body goes after its request",
        BODY,
        "            inside.context.run(|| this.inner.set(None));\n            inside.drop_early();",
        "            let _ = &mut inside;\n            inside.drop_early();",
    ),
    Mutant(
        "a body that is over goes after its request",
        BODY,
        "            inside.context.run(|| this.inner.set(None)); // before",
        "            let _ = &mut inside; // not before",
    ),
    Mutant(
        "a body that panicked goes after its request",
        BODY,
        "survived(|| context.run(|| this.inner.set(None)));",
        "let _ = &mut context;",
    ),
    Mutant("no handle in the extensions", LAYER, "    parts.extensions.insert(serving.request().handle());\n", ""),
    Mutant(
        "an inner layer is a root",
        LAYER,
        "let mut terms = if is_inside { request() }",
        "let mut terms = if false && is_inside { request() }",
    ),
    Mutant(
        "whatever is selected is around",
        LAYER,
        "let mut terms = if is_inside { request() }",
        "let mut terms = if is_inside || true { request() }",
    ),
    Mutant(
        "terms of none are terms",
        LAYER,
        "terms = choose(parts, terms)?;",
        "terms = choose(parts, terms).unwrap_or_else(|| request().root());",
    ),
    Mutant(
        "terms that cannot be kept are none",
        LAYER,
        "Begun::Failed(unbegun) => return ResponseFuture::unbegun(unbegun),",
        "Begun::Failed(_) => return ResponseFuture::plain(inner.call(Request::from_parts(parts, body))),",
    ),
    Mutant("the terms are not asked", LAYER, "terms = choose(parts, terms)?;", "let _ = choose;"),
    # where it ends
    Mutant("HEAD is as GET", LAYER, "is_head = parts.method == Method::HEAD", "is_head = false"),
    Mutant(
        "every status has a body",
        FUTURE,
        "let is_asked_for = !is_head && has_body(parts.status);",
        "let _ = has_body;\n                let is_asked_for = !is_head;",
    ),
    Mutant(
        "content-length is not looked at",
        BODY,
        "(inner.size_hint().exact().or(length), inner.is_end_stream())",
        "(inner.size_hint().exact(), inner.is_end_stream() && length.is_none_or(|_| true))",
    ),
    Mutant("a body's own length is not looked at", BODY, "(inner.size_hint().exact().or(length), ", "(length, "),
    Mutant(
        "bytes that were taken are not counted",
        BODY,
        "*left = left.saturating_sub(bytes::Buf::remaining(data) as u64);",
        "let _ = (left, data);",
    ),
    Mutant(
        "an unfinished body is complete",
        BODY,
        "matches!(self.left, Left::Nothing | Left::Bytes(0))",
        "matches!(self.left, Left::Nothing | Left::Bytes(_))",
    ),
    Mutant(
        "a body that nobody polls is awaited",
        BODY,
        "        if is_over {",
        "        if is_over && false {",
    ),
    Mutant(
        "a body that says that it is over is not believed",
        BODY,
        "frame.is_trailers() || this.inner.as_ref().as_pin_ref().is_some_and(|inner| inner.is_end_stream())",
        "frame.is_trailers()",
    ),
    Mutant("trailers are no end", BODY, "frame.is_trailers() || ", ""),
    Mutant(
        "the end of a body is none",
        BODY,
        "            None => Some(Outcome::Completed),\n        };\n        if let",
        "            None => None,\n        };\n        if let",
    ),
    Mutant(
        "a body's error is an end like others",
        BODY,
        "Some(Err(_)) => Some(Outcome::Failed),",
        "Some(Err(_)) => Some(Outcome::Completed),",
    ),
    Mutant("a body's panic is an error", BODY, "serving.end(Outcome::Panicked)", "serving.end(Outcome::Failed)"),
    Mutant(
        "a service's error is an end like others",
        FUTURE,
        "serving.end(Outcome::Failed)",
        "serving.end(Outcome::Completed)",
    ),
    Mutant("a service's panic is an error", FUTURE, "serving.end(Outcome::Panicked)", "serving.end(Outcome::Failed)"),
    Mutant(
        "a panic of the call is a hang-up",
        SERVING,
        "!self.is_known && std::thread::panicking()",
        "false && std::thread::panicking()",
    ),
    UnderLoad(
        "a hang-up is not reported",
        FUTURE,
        "            serving.end(outcome);\n        }\n    }",
        "            let _ = outcome;\n            std::mem::forget(serving);\n        }\n    }",
    ),
    Mutant(
        "an end is reported twice",
        SERVING,
        "if survived(|| on_end(&ended)).is_none()",
        "on_end(&ended);\n        if survived(|| on_end(&ended)).is_none()",
    ),
    Mutant(
        "a panic of on_end passes",
        SERVING,
        "if survived(|| on_end(&ended)).is_none()",
        "if { on_end(&ended); false }",
    ),
    # refusals
    Mutant(
        "an answer of the layer's own where it should not",
        SERVING,
        ".filter(|_| self.options.answers)",
        "",
    ),
    Mutant(
        "a refusal that was coped with is one",
        "src/tower/serving.rs",
        "let last = if returned.is_none() { self.request().last_refusal() }",
        "let last = if returned.is_none() && self.request().stats().refused > 0 "
        '{ Some(Error::OutOfMemory { handler: "x".into(), requested_bytes: 1 }) }',
    ),
    Mutant(
        "what the service returned is not answered",
        FUTURE,
        "Some(error) => serving.answer_to(Some(error)),",
        "Some(_) => None,",
    ),
    Mutant("a 500 is an answer", PROBLEM, "status == StatusCode::INTERNAL_SERVER_ERROR || ", ""),
    Mutant(
        "an error after a refusal is an error",
        FUTURE,
        "Some(Err(_)) => serving.answer_to(None),",
        "Some(Err(_)) => None,",
    ),
    Mutant(
        "the limit of the heap is not looked at",
        FUTURE,
        "let exceeded = serving.request().heap_exceeded();",
        "let exceeded = None::<Error>;",
    ),
    Mutant(
        "what exceeds the heap goes after its request",
        FUTURE,
        """                drop(answer);
                this.inner.set(None);
""",
        "                std::mem::forget(answer);\n",
    ),
    Mutant("gRPC is HTTP", FUTURE, "    if is_grpc {\n", "    if is_grpc && false {\n"),
    Mutant(
        "an internal error of gRPC is an answer",
        PROBLEM,
        '(is_grpc && matches!(grpc_status(headers), Some("2" | "13")))',
        '(is_grpc && grpc_status(headers) == Some("99"))',
    ),
    Mutant("every error of gRPC is unexplained", PROBLEM, 'Some("2" | "13")', "Some(_)"),
    Mutant(
        "a method's own refusal is an answer",
        SERVING,
        "contains(&parts.status) || (self.is_grpc && problem::is_exhausted(&parts.headers))",
        "contains(&parts.status)",
    ),
    Mutant(
        "a service's own refusal is an answer",
        SERVING,
        "self.options.refused_statuses.contains(&parts.status) || (self.is_grpc",
        "(self.is_grpc",
    ),
    Mutant("a busy service is a refusal", FUTURE, "&& serving.is_refused())", ")"),
    Mutant(
        "an inner layer's refusal is an answer",
        FUTURE,
        "response.extensions_mut().insert(Refused);\n            serving.status",
        "serving.status",
    ),
    Mutant(
        "trailers tell of no refusal",
        BODY,
        "is_over.then_some(if is_refused {",
        "is_over.then_some(if is_refused && false {",
    ),
    Mutant(
        "no retry-after",
        PROBLEM,
        "headers.insert(RETRY_AFTER, retry_after_seconds.into());",
        "let _ = (RETRY_AFTER, retry_after_seconds);",
    ),
)
