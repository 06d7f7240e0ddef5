"""`ctxalloc.wsgi.AllocatorMiddleware`: a step at a time, and one end. wsgiref's validator is the server's side."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import numpy as np
import pytest

import ctxalloc
from ctxalloc import BudgetExceeded, MiB, current, request
from ctxalloc.asgi import Report
from ctxalloc.wsgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

Environ = dict[str, Any]


class Server:
    """Calls an application as a server does: the body is consumed in the server's own selection, then closed."""

    def __init__(self) -> None:
        self.status = ""
        self.headers: dict[str, str] = {}
        self.starts = 0
        self.between: list[str] = []

    def get(self, app: Any, path: str = "/", *, closes: bool = True, **environ: Any) -> bytes:
        asked: Environ = {"PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": ""}
        setup_testing_defaults(asked)
        asked.update(environ)

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            self.status, self.headers = status, dict(headers)
            self.starts += 1
            return lambda _: None

        body = app(asked, start_response)
        parts = []
        try:
            self.between.append(current().name)
            for part in body:
                self.between.append(current().name)
                parts.append(part)
        finally:
            if closes and hasattr(body, "close"):
                body.close()
        self.between.append(current().name)
        return b"".join(parts)


def collected() -> tuple[list[Report], Any]:
    reports: list[Report] = []
    return reports, lambda _, report: reports.append(report)


class Stream:
    """A body that works in each of its steps, and says under which handler."""

    def __init__(self, seen: list[str], parts: int = 3, size: int = 1000) -> None:
        self.seen = seen
        self.left = parts
        self.size = size

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.seen.append(current().name)
        if not self.left:
            raise StopIteration
        self.left -= 1
        np.empty(self.size, np.uint8)
        return b"x"

    def close(self) -> None:
        self.seen.append("close " + current().name)


def test_each_step_of_a_streamed_body_and_nothing_else_is_in_the_request() -> None:
    seen: list[str] = []
    reports, on_end = collected()

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        seen.append(current().name)
        assert environ["ctxalloc.request"] == ctxalloc.current_request()
        start_response("200 OK", [("content-type", "text/plain")])
        return Stream(seen)

    server = Server()
    service = validator(AllocatorMiddleware(validator(app), routes={"/stream": request()}, on_end=on_end))
    assert server.get(service, "/stream") == b"xxx"
    assert seen == ["/stream"] * 5 + ["close /stream"]
    assert set(server.between) == {"default_allocator"}
    (report,) = reports
    assert (report.outcome, report.status, report.stats.total_bytes) == ("completed", 200, 3000)


def test_a_list_ends_with_the_call_and_stays_a_list() -> None:
    reports, on_end = collected()

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("204 No Content", [])
        return [b""]

    service = AllocatorMiddleware(app, on_end=on_end)
    body = service({"PATH_INFO": "/"}, lambda *_: None)
    assert body == [b""]
    assert reports[0].outcome == "completed"


def test_a_file_goes_to_the_server_as_it_is(tmp_path: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](path.open("rb"))
        return wrapped

    environ = {"PATH_INFO": "/", "wsgi.file_wrapper": FileWrapper}
    body = AllocatorMiddleware(app)(environ, lambda *_: None)
    assert isinstance(body, FileWrapper)
    body.close()


def test_a_refusal_in_the_middle_of_the_body_passes() -> None:
    reports, on_end = collected()

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"a"
        np.empty(20 * MiB, np.uint8)

    with pytest.raises(BudgetExceeded):
        Server().get(AllocatorMiddleware(app, default=request(limit_bytes=MiB), on_end=on_end))
    assert [report.outcome for report in reports] == ["refused"]
    with pytest.raises(BudgetExceeded):
        Server().get(AllocatorMiddleware(app, default=request(limit_bytes=MiB), answers=False))


def test_exceptions_early_closes_and_forgotten_closes_end_it_once() -> None:
    reports, on_end = collected()

    def fails(environ: Environ, start_response: Any) -> Iterable[bytes]:
        raise KeyError("mine")

    def streams(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return Stream([])

    with pytest.raises(KeyError, match="mine"):
        Server().get(AllocatorMiddleware(fails, on_end=on_end))
    body = AllocatorMiddleware(streams, on_end=on_end)({"PATH_INFO": "/"}, lambda *_: None)
    next(iter(body))
    body.close()  # type: ignore[attr-defined]
    del body
    Server().get(AllocatorMiddleware(streams, on_end=on_end), closes=False)
    gc.collect()
    assert [report.outcome for report in reports] == ["failed", "unfinished", "completed"]


def test_a_handler_and_none_work_as_under_asgi() -> None:
    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [current().name.encode()]

    service = AllocatorMiddleware(app, routes={"/pool": "pool", "GET /none": None}, default="system")
    server = Server()
    assert server.get(service, "/pool") == b"pool"
    assert server.get(service, "/none") == b"default_allocator"
    assert server.get(service, "/else") == b"system"


def test_a_route_that_is_not_ascii_has_its_limit() -> None:
    """PATH_INFO has the bytes of the path as Latin-1 (PEP 3333)."""
    reports, on_end = collected()

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [b""]

    service = AllocatorMiddleware(app, routes={"/größe": request(), "/größe/{name}": request()}, on_end=on_end)
    for path in ("/größe", "/größe/ä"):
        Server().get(service, path.encode().decode("latin-1"))
    Server().get(service, "/\xff")
    assert [report.route for report in reports] == ["/größe", "/größe/{name}", None]
