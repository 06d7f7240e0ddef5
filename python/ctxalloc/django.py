"""Memory, an account and a limit for each request of Django, under WSGI and ASGI.

::

    MIDDLEWARE = ["ctxalloc.django.AllocatorMiddleware", ...]
    CTXALLOC = {"routes": {"POST /fft": ctxalloc.request(limit_bytes=64 * ctxalloc.MiB)}}

Needs Django (it is imported here and in ``_django_end``). It encloses ``get_response``; signals cannot do that: they
come from other Contexts. Neighbours: ``asgi`` has the same options; docs/services.md is the guide.
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

try:
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction
    from django.http import HttpRequest, HttpResponse
    from django.http.response import HttpResponseBase
except ImportError:
    raise ImportError("ctxalloc.django needs Django, and its import fails: pip install django") from sys.exception()

from ctxalloc import _frameworks, _serving, problems
from ctxalloc._choices import ACCOUNT
from ctxalloc._django_end import Closing, closers_of
from ctxalloc._errors import BudgetExceeded, NoRoom
from ctxalloc._serving import KEY, Serving, Step
from ctxalloc._waiting import Waiting

__all__ = ["AllocatorMiddleware"]

_Content = TypeVar("_Content")

_OPTIONS = {
    "routes",
    "default",
    "unmatched",
    "tenant",
    "on_end",
    "answers",
    "retry_after_seconds",
    "sites",
    "record",
}


class AllocatorMiddleware:
    """Serves each request in a ``ctxalloc.request()``, or under a handler.

    First in ``MIDDLEWARE``, it takes all others in.
    The setting ``CTXALLOC`` is a dict with the options of ``ctxalloc.asgi.AllocatorMiddleware`` but ``ends``; the
    functions get Django's HttpRequest's ``META``. The account closes with the response, which Django closes when it was
    sent.

    A view finds its Request in ``request.META["ctxalloc.request"]``, and by ``ctxalloc.current_request()``. TypeError:
    the setting has what is no option.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        from django.conf import settings  # noqa: PLC0415 - a tool that looks at this module need not have settings

        self.get_response = get_response
        options = dict(getattr(settings, "CTXALLOC", {}))
        unknown = set(options) - _OPTIONS
        if unknown:
            raise TypeError(f"CTXALLOC has {sorted(unknown)}; its options are {sorted(_OPTIONS)}")
        self._answers = options.pop("answers", True)
        self._service = _serving.Service(
            routes=options.get("routes"),
            default=options.get("default", ACCOUNT),
            unmatched=options.get("unmatched", "default"),
            tenant=options.get("tenant"),
            on_end=options.get("on_end"),
            retry_after_seconds=options.get("retry_after_seconds", 1),
            sites=options.get("sites"),
            record=options.get("record"),
        )
        _frameworks.note_what_frameworks_answer()
        self._is_attached = not options.get("routes")
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """The middleware's step, of either kind."""
        if self._is_async:
            return self._asynchronous(request)
        serving = self._begin(request, is_async=False)
        assert not isinstance(serving, Waiting)  # noqa: S101 - it has waited in this thread
        if serving is None:
            return self._checked(self.get_response(request))
        if serving.unadmitted is not None:
            return self._refused(serving, serving.unadmitted)
        self._note(request, serving)
        with _Ends(serving):
            response: HttpResponseBase | None = None
            try:
                with Step(serving):
                    response = self._checked(self.get_response(request))
            except BaseException as error:
                _drop(response)
                answer = self._answer_to(serving, error)
                if answer is None:
                    raise
                response = answer
            else:
                response = self._instead_of(serving, response)
        return self._answered(serving, response)

    async def _asynchronous(self, request: HttpRequest) -> HttpResponseBase:
        serving = self._begin(request, is_async=True)
        if isinstance(serving, Waiting):
            serving, unadmitted = await serving.begin()
            if isinstance(unadmitted, NoRoom):
                return self._refused(serving, unadmitted)
        if serving is None:
            return self._checked(await self.get_response(request))
        self._note(request, serving)
        with _Ends(serving):
            response: HttpResponseBase | None = None
            try:
                with Step(serving):
                    response = self._checked(await self.get_response(request))
            except BaseException as error:
                _drop(response)
                answer = self._answer_to(serving, error)
                if answer is None:
                    raise
                response = answer
            else:
                response = self._instead_of(serving, response)
        return self._answered(serving, response)

    def _answer_to(self, serving: Serving, error: BaseException) -> HttpResponseBase | None:
        """Answer a refusal that Django has not made a response of: one that cancelled the task, or met its handlers."""
        refused = serving.refusal_of(error) if self._answers else None
        if refused is None:
            return None
        serving.close_after(error)
        return self._problem(serving, refused)

    def _instead_of(self, serving: Serving, response: HttpResponseBase) -> HttpResponseBase:
        """The response; or the answer to the refusal that it is the 500 of."""
        refused = serving.refused_inside if self._answers and response.status_code == 500 else None
        if refused is None:
            return response
        serving.close_after(refused)
        return self._problem(serving, refused)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer a refusal that a view did not catch, and that no middleware further in has answered."""
        serving: Serving | None = request.META.get(KEY)
        if serving is None:
            return None
        refused = serving.refusal_of(exception) if self._answers else None
        if refused is None:
            serving.answered = exception  # by somebody further out
            return None
        serving.close_after(exception)
        return self._problem(serving, refused)

    def _refused(self, serving: Serving, refused: NoRoom) -> HttpResponse:
        """The answer to one that got no reservation."""
        serving.refusal_of(refused)  # which tells a middleware around this one
        if self._answers:
            return self._problem(serving, refused)
        serving.end("refused", refused)
        serving.forget()
        raise refused

    @staticmethod
    def _problem(serving: Serving, refused: BudgetExceeded) -> HttpResponse:
        problem = problems.of(refused, serving)
        # Its traceback has the view's frames, hence their arrays: `on_end` gets it, and then nobody has it.
        serving.status = problem.status
        serving.end("refused", refused)
        serving.forget()
        return HttpResponse(problem.body, status=problem.status, headers=dict(problem.headers))

    def _begin(self, request: HttpRequest, *, is_async: bool) -> Serving | Waiting[Serving] | None:
        if not self._is_attached:
            django = _frameworks.Django(self._service.rows)
            self._service.routes.attach(django.ask, django.special(), None, [])
            self._is_attached = True  # now, for other threads
        request.META[_frameworks.DJANGO_PATH] = request.path_info
        return self._service.begin(request.META, "REQUEST_METHOD", request.path_info, is_async=is_async)

    @staticmethod
    def _note(request: HttpRequest, serving: Serving) -> None:
        request.META[KEY] = serving
        if serving.request is not None:
            request.META[_serving.REQUEST_KEY] = serving.request

    @staticmethod
    def _checked(response: Any) -> HttpResponseBase:
        assert isinstance(response, HttpResponseBase)  # noqa: S101 - Django's own chain sees to it
        return response

    def _answered(self, serving: Serving, response: HttpResponseBase) -> HttpResponseBase:
        if serving.request is None:
            return response
        serving.let_go_of_handled()
        serving.status = response.status_code
        # A file is sent by the server, which knows it by `file_to_stream`.
        if not response.streaming or getattr(response, "file_to_stream", None) is not None:
            Closing(serving, response, is_whole=True)
            return response
        content: Any = response
        streamed = (_AsyncStream if content.is_async else _Stream)(serving, content.streaming_content)
        content.streaming_content = streamed
        streamed.closing = Closing(serving, response, is_whole=False)
        return response


def _drop(response: HttpResponseBase | None) -> None:
    """Close what a response has open, which was made and is not sent; that the request is over its answer says."""
    for close in () if response is None else closers_of(response):
        _serving.closed(close)


class _Ends:
    """Around a step of Django, of either kind: what leaves it as an exception ends the request."""

    __slots__ = ("serving",)

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (StopIteration, StopAsyncIteration)):
            return
        serving = self.serving
        refused = serving.refusal_of(error)
        try:
            if refused is None:
                serving.end_unanswered(error)
            else:
                serving.end("refused", refused)
                if refused is not error:
                    raise refused from refused.__cause__
        finally:
            serving.forget()
            del error, refused  # their tracebacks have this frame


class _Streamed(Generic[_Content]):
    """Streamed content, each of whose steps is in the request, which ends with the response."""

    closing: Closing

    def __init__(self, serving: Serving, content: _Content) -> None:
        self._serving = serving
        self._content = content


class _Stream(_Streamed[Iterator[bytes]]):
    """Content of a synchronous view."""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            with _Ends(self._serving), Step(self._serving):
                return next(self._content)
        except StopIteration:
            self.closing.is_whole = True
            raise
        finally:
            self._serving.let_go_of_handled()


class _AsyncStream(_Streamed[AsyncIterator[bytes]]):
    """Content of an asynchronous view."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            with _Ends(self._serving), Step(self._serving):
                return await anext(self._content)
        except StopAsyncIteration:
            self.closing.is_whole = True
            raise
        finally:
            self._serving.let_go_of_handled()
