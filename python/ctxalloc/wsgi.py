"""Memory, an account and a limit for each request of a WSGI application (Flask, Django under threads, ...).

::

    app.wsgi_app = AllocatorMiddleware(app.wsgi_app, routes={"POST /fft": ctxalloc.request(limit_bytes=64 * MiB)})

A WSGI body is consumed after the application's call, and ``close`` ends it (PEP 3333). So the request is entered for
each step: the call, each ``next``, ``close``; what the server does between them is not in it. Neighbours: ``asgi`` has
the same options; docs/services.md is the guide.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias

from ctxalloc import _frameworks, _routing, _serving, problems
from ctxalloc._choices import ACCOUNT, Choice, Unmatched
from ctxalloc._errors import BudgetExceeded
from ctxalloc._native import Budget, Request
from ctxalloc._outcome import OnEnd
from ctxalloc._serving import KEY, REQUEST_KEY, Serving, Step

__all__ = ["AllocatorMiddleware"]

_Environ: TypeAlias = dict[str, Any]
_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
_StartResponse: TypeAlias = Callable[..., Any]
_Application: TypeAlias = Callable[[_Environ, _StartResponse], Iterable[bytes]]


class AllocatorMiddleware:
    """Serves each request of an application in a ``ctxalloc.request()``, or under a handler.

    The options are those of ``ctxalloc.asgi.AllocatorMiddleware`` but ``ends``; the functions get the WSGI environment.
    A request that waits for its reservation blocks its thread. The account closes with the body's ``close``; where the
    body is a list, when the application returns. Flask answers exceptions itself, inside; a refusal that none of its
    handlers takes is answered all the same.

    The application finds its Request in ``environ["ctxalloc.request"]``, and by ``ctxalloc.current_request()``.
    """

    def __init__(
        self,
        app: _Application,
        *,
        routes: Mapping[str, Choice] | None = None,
        default: Choice = ACCOUNT,
        unmatched: Unmatched = "default",
        tenant: Callable[[_Environ], Budget | None] | None = None,
        on_end: OnEnd | None = None,
        answers: bool = True,
        retry_after_seconds: int = 1,
        sites: int | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        for pattern, terms in [*(routes or {}).items(), ("default", default)]:
            if isinstance(terms, Request) and terms._cancels_if_chosen:  # noqa: SLF001 - made for this
                raise ValueError(
                    f"the terms of {pattern!r} have cancel_if_chosen=True, which cancels a task of asyncio, and a WSGI "
                    "server has none; leave it out: a request that is chosen is refused its next allocation anyway"
                )
        self.app = app
        self._answers = answers
        self._service = _serving.Service(
            routes=routes,
            default=default,
            unmatched=unmatched,
            tenant=tenant,  # type: ignore[arg-type]  # an environment is a dict
            on_end=on_end,
            retry_after_seconds=retry_after_seconds,
            sites=sites,
            record=record,
        )
        self._is_checked = False

    def __call__(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        """The WSGI entry point."""
        if not self._is_checked:
            _frameworks.attach(self._service.routes, self._service.rows, self.app)
            _note_what_flask_answers(self.app)
            _frameworks.note_what_frameworks_answer()
            self._is_checked = True  # now, for other threads
            if self._service.patterns:
                _routing.warn_of_typos(self._service.patterns, self.app)
        path: str = environ.get("PATH_INFO") or "/"
        if not path.isascii():
            path = path.encode("latin-1", "replace").decode("utf-8", "replace")  # PEP 3333 has its bytes as Latin-1
        serving = self._service.begin(environ, "REQUEST_METHOD", path)
        if serving is None:
            return self.app(environ, start_response)
        assert isinstance(serving, Serving)  # noqa: S101 - it has waited in this thread
        environ = {**environ, KEY: serving}
        if serving.request is not None:
            environ[REQUEST_KEY] = serving.request
        serving.answers = self._answers and serving.request is not None
        body = _Body(serving, start_response)
        content = body.begin(self.app, environ)
        # Without code of the application that runs later there is nothing left to enter.
        if isinstance(content, (list, tuple)) or _is_file(content, environ):
            body.is_whole = True
            body.finish(None)
            return content
        return body


def _note_what_flask_answers(app: _Application) -> None:
    """Have Flask tell the request of an exception of its own that it answers: with 500, or as ``abort(404)`` asks.

    A refusal that no handler of the application's answers is answered here: Flask would log it, and say 500.
    Flask's own frames refer to an ``HTTPException`` that they answer, so what a view had at the ``abort`` would live
    until Python collects garbage.
    """
    flask: Any = sys.modules.get("flask")
    if flask is None:
        return
    flask.got_request_exception.connect(_note)  # again is as once
    flask.got_request_exception.connect(_frameworks.note_refusal)
    found = _frameworks.application_of(app)
    answers = getattr(found, "handle_user_exception", None)
    if answers is None or hasattr(answers, "_is_noted"):
        return

    @functools.wraps(answers)
    def handle_user_exception(exception: Exception) -> Any:
        _note(found, exception)
        try:
            return answers(exception)
        except Exception:
            serving = _serving.serving()
            problem = problems.problem(exception) if isinstance(serving, Serving) and serving.answers else None
            if problem is None:
                raise
            return problem.body, problem.status, problem.headers

    handle_user_exception._is_noted = True  # type: ignore[attr-defined] # noqa: SLF001 - ours
    found.handle_user_exception = handle_user_exception


def _note(_: object, exception: BaseException | None = None, **__: object) -> None:
    serving = _serving.serving()
    if isinstance(serving, Serving):
        serving.answered = exception


def _is_file(content: object, environ: _Environ) -> bool:
    """Whether the server sends it by itself (``sendfile``), which it knows by the type."""
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(content, wrapper)


class _Body:
    """The body of an answer, each of whose steps is in the request."""

    def __init__(self, serving: Serving, start_response: _StartResponse) -> None:
        self._serving = serving
        self._start_response = start_response
        self._content: Iterable[bytes] = ()
        self._iterator: Iterator[bytes] | None = None
        self._is_sent = False
        """Something of the body: the headers are out."""
        self._said: tuple[str, list[tuple[str, str]]] | None = None
        """What the application has told ``start_response``, until a step of it ends well and the server hears it."""
        self._is_started = False
        """The server has heard it."""
        self._write: Callable[[bytes], object] | None = None
        """The server's."""
        self.is_whole = False

    def begin(self, app: _Application, environ: _Environ) -> Iterable[bytes]:
        """The application's call; or the answer to its refusal."""
        try:
            with Step(self._serving):
                self._serving.check_admitted()
                self._content = content = app(environ, self._start)
                self._serving.check_refused_inside()
            self._serving.let_go_of_handled()
            self._tell()
        except BaseException as error:
            close = getattr(self._content, "close", None)
            if close is not None:  # it was told beyond its limit once this was made
                _serving.closed(close)
            return self._failed(error)
        return content

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            with Step(self._serving):
                if self._iterator is None:
                    self._iterator = iter(self._content)
                part = next(self._iterator)
            self._serving.let_go_of_handled()
            self._tell()
        except StopIteration:
            self.is_whole = True
            self._serving.let_go_of_handled()
            self._tell()
            raise
        except BaseException as error:
            (part,) = self._failed(error)
            self._iterator = iter(())
        self._is_sent = self._is_sent or bool(part)
        return part

    def close(self) -> None:
        """The end of the request."""
        close = getattr(self._content, "close", None)
        error: BaseException | None = None
        try:
            with Step(self._serving):
                if close is not None:
                    close()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.finish(error)
            del error

    def __del__(self) -> None:
        """A server that does not close bodies: the account closes all the same."""
        self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Close the account."""
        serving = self._serving
        refused = None if error is None else serving.refusal_of(error)
        if refused is not None:
            serving.end("refused", refused)
        elif error is None and self.is_whole:
            serving.end("completed")
        else:
            serving.end_unanswered(error)
        serving.forget()

    def _failed(self, error: BaseException) -> Iterable[bytes]:
        """The answer to a refusal; else the exception goes on."""
        serving = self._serving
        refused = serving.refusal_of(error)
        try:
            if refused is None:
                serving.end_unanswered(error)
                raise error
            serving.close_after(error)
            if not serving.answers or self._is_sent:
                serving.end("refused", refused)
                if refused is error:
                    raise error
                raise refused from refused.__cause__
            return [self._answer(refused, problems.of(refused, serving))]
        finally:
            serving.forget()
            del error, refused  # their tracebacks have this frame

    def _tell(self) -> None:
        """Let the server hear what the application has said. With an answer of ours it never does."""
        if self._said is not None:
            (status, headers), self._said, self._is_started = self._said, None, True
            self._write = self._start_response(status, headers)

    def _write_now(self, part: bytes) -> None:
        """The application's ``write``."""
        self._tell()
        assert self._write is not None  # noqa: S101 - the server's `start_response` returned it
        self._is_sent = self._is_sent or bool(part)
        self._write(part)

    def _answer(self, refused: BudgetExceeded, problem: problems.Problem) -> bytes:
        self._serving.status = problem.status
        self.is_whole = True
        self._said = None
        try:
            # PEP 3333: with an exception only to replace what was said before. Without that, test clients raise it.
            replaces = (sys.exc_info(),) if self._is_started else ()
            self._start_response(f"{problem.status} {problems.phrase(problem.status)}", problem.headers, *replaces)
        finally:
            self._serving.end("refused", refused)
        return problem.body

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: _ExcInfo | None = None) -> Any:
        """The application's ``start_response``."""
        serving = self._serving
        code = status[:3]
        serving.status = int(code) if code.isdecimal() else None
        if not self._is_started and (exc_info is not None or self._said is None):
            self._said, exc_info = (status, headers), None
            return self._write_now
        self._tell()
        if exc_info is None:
            return self._start_response(status, headers)
        try:
            return self._start_response(status, headers, exc_info)
        finally:
            exc_info = None  # as PEP 3333 asks for
