"""What the middlewares share: the terms that a request of a server gets, its beginning and its one end.

``Service`` has the options, ``Serving`` is one request that is being served. The selection stays in NumPy's own
ContextVar; beside it, the Context carries the Serving, which says who selected, not what. Neighbours: ``_choices`` has
what a route may get; ``asgi``, ``wsgi`` and ``django`` drive it; ``problems`` makes answers;
``docs/decisions/0020-services-end-at-the-last-message.md`` has the reasons.
"""

import atexit
import contextlib
import contextvars
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from ctxalloc._choices import CHOICES, Choice, Scope, Unmatched, plain, table_of
from ctxalloc._errors import BudgetExceeded, NoRoom
from ctxalloc._frames import clear_frames, drop_tracebacks, leaves_of
from ctxalloc._native import (
    Budget,
    Handler,
    Request,
    _Sampler,
    _served_in,
    _ServingStep,
    current,
    use,
)
from ctxalloc._outcome import OnEnd, Outcome, Report
from ctxalloc._recording import record_once
from ctxalloc._sites import sites_of
from ctxalloc._told_later import Before, runs_a_loop

if TYPE_CHECKING:
    from ctxalloc._waiting import Waiting

KEY: Final = "ctxalloc.serving"
"""Where a scope has its Serving."""

REQUEST_KEY: Final = "ctxalloc.request"
"""Where a scope has its Request."""

log = logging.getLogger("ctxalloc")


_E = TypeVar("_E", bound="Served")

SERVING: ContextVar["Served | None"] = ContextVar("ctxalloc.serving", default=None)
"""Whose request the running Context serves."""

_served_in(SERVING)


class Service:
    """The options of a middleware."""

    def __init__(
        self,
        *,
        routes: Mapping[str, Choice] | None,
        default: Choice,
        unmatched: Unmatched,
        tenant: Callable[[Scope], Budget | None] | None,
        on_end: OnEnd | None,
        retry_after_seconds: int,
        sites: int | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        if sites is not None:
            if isinstance(sites, bool) or not isinstance(sites, int):
                raise TypeError(f"sites={sites!r}: give an int: one in so many requests is looked at; or None")
            if not 0 < sites < 1 << 63:
                raise ValueError(f"sites={sites!r}: give 1 for every request, 100 for one in a hundred; or None")
        for name, function in (("tenant", tenant), ("on_end", on_end)):
            if function is not None:
                plain(function, f"{name}=")
        if isinstance(retry_after_seconds, bool) or not isinstance(retry_after_seconds, int):
            raise TypeError(f"retry_after_seconds={retry_after_seconds!r}: give whole seconds, an int")
        if retry_after_seconds < 0:
            raise ValueError(f"retry_after_seconds={retry_after_seconds!r}: give 0 or more")
        self.routes, self.rows = table_of(routes or {}, default, unmatched)
        self.patterns = list(routes or {})
        self.tenant = tenant
        self.on_end = on_end
        self.retry_after_seconds = retry_after_seconds
        self.sampler = None if sites is None else _Sampler(sites)
        if record is not None:
            record_once(record)

    def begin(
        self,
        scope: Scope,
        method: str,
        path: str,
        *,
        is_plain: bool = True,
        around: "Callable[[str | None, Request, Handler], _E] | None" = None,
        is_async: bool = False,
    ) -> "Serving | _E | Waiting[Serving | _E] | None":
        """Begin to serve a request; None where there is nothing to do for it.

        ``method``: the key under which the scope has the method. ``is_plain``: see ``RouteTable.find``. ``around``:
        makes the record of a request that has an account. Its handler is selected then, until the record leaves the
        request. Where ``around`` is not used the record is a Serving, and each ``Step`` of it selects the handler.

        Where the terms reserve memory and ``is_async``, the caller has to wait for it; else this waits. A Serving has
        in ``unadmitted`` why it got no reservation.
        """
        route, choice, asked, has_budget, name = self.routes.find(scope, method, path, is_plain)
        here = SERVING.get()
        if here is None:
            base, is_inside = current(), False
        else:
            base, is_inside = here.base, scope.get(KEY) is here
        if asked is None:
            terms = choice if choice is None or isinstance(choice, (Request, Handler, str)) else choice(scope)
            if terms is None:
                if here is None or is_inside:
                    return None
                terms = base
            if not isinstance(terms, Request):
                if not isinstance(terms, (Handler, str)):
                    raise TypeError(f"route {route!r}: {terms!r} is no choice; {CHOICES}")
                serving = Serving(self, scope, route, None, base)
                serving.handler = terms
                return serving
            asked, has_budget = terms, terms._wanted_budget is not None  # noqa: SLF001 - made for this
        sites = self.sampler is not None and self.sampler.is_due()
        tenant = None
        if self.tenant is not None:
            tenant = self.tenant(scope)
            if tenant is not None:
                self.check_tenant(route, tenant, has_budget)
        # That of the request around it it is charged to as well.
        whose = here.tenant if tenant is None and is_inside and here is not None else tenant

        def made(begun: Request) -> Serving | _E:
            served: Serving | _E
            if around is not None:
                served = around(route, begun, base)
            else:
                served = serving = Serving(self, scope, route, begun, base)
                serving.handler = begun.handler
            if whose is not None:
                served.tenant = whose
            if is_inside:
                served.outer = here
            return served

        if is_async and asked._reserves:  # noqa: SLF001 - made for this
            from ctxalloc._waiting import Waiting  # noqa: PLC0415 - it needs asyncio, and few programs wait

            return Waiting(asked, not is_inside, name, tenant, sites, made, selects=around is not None)
        if around is not None:
            return made(asked._serve(not is_inside, name, tenant, sites))  # noqa: SLF001
        begun = asked._again(root=not is_inside, name=name, budget=tenant, sites=sites)  # noqa: SLF001
        refused: BaseException | None = None
        try:
            begun._begin()  # noqa: SLF001
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, NoRoom):
                raise
            refused = error.with_traceback(None)
            begun = asked._unreserved()._again(root=not is_inside, name=name, budget=tenant)  # noqa: SLF001
            begun._begin()  # noqa: SLF001
        served = made(begun)
        if isinstance(refused, NoRoom) and isinstance(served, Serving):
            served.unadmitted = refused
        elif refused is not None:  # the thread, or the greenlet, was interrupted while it waited
            assert isinstance(served, Serving)  # noqa: S101 - `around` returned above
            served.end_unanswered(refused)
            served.forget()
            raise refused
        return served

    def check_tenant(self, route: str | None, tenant: object, has_budget: bool) -> None:  # noqa: FBT001 - called from Rust
        """TypeError, ValueError: what ``tenant`` returned is no budget, or the terms name one."""
        if not isinstance(tenant, Budget):
            raise TypeError(f"route {route!r}: {tenant!r} is no budget; `tenant` gives a ctxalloc.Budget, or None")
        if has_budget:
            raise ValueError(
                f"route {route!r}: its terms name a budget and so does `tenant`; a request has one: leave the "
                "terms' out, or make it the parent of the tenants'"
            )


class Served:
    """One request of a server, from its beginning to its end: what all kinds of records of it have in common."""

    if not TYPE_CHECKING:  # the records have slots for what is named here, or have it in Rust
        __slots__ = ()

    service: Service
    scope: Scope | None
    route: str | None
    request: Request | None
    base: Handler
    """What is selected around the server."""
    tenant: Budget | None
    """The budget of its tenant; perhaps that of the request around it."""
    status: int | None
    """The status of the answer, once it is begun."""
    is_disconnected: bool
    """The client has gone, and ``receive`` or ``send`` has shown it."""
    answered: BaseException | None = None
    """An exception that the framework answers itself, inside of the middleware."""
    refused_inside: BudgetExceeded | None
    """The refusal that Django, Flask or Quart has made a 500 of."""
    outer: "Served | None"
    """That of the middleware around this one. Where there is none, an ``_Exchange`` has no such attribute."""
    untold: ClassVar[set["Served"]] = set()
    """Those whose ``on_end`` is still to be called. Whoever removes one calls it: ``remove`` succeeds in one thread.
    The class has it, since a response may be dropped when the module's names are gone: at the interpreter's end."""
    _began: float
    _before: Before
    _refusal: tuple[BudgetExceeded, ...] | None

    def _expect_telling(self) -> None:
        """``on_end`` has to be called for it."""
        self._began = time.perf_counter()
        self._before = Before.of(self.scope)
        self.untold.add(self)

    def close_after(self, error: BaseException | None) -> None:
        """End the request, if it has not ended. What exceptions hold of it has not escaped: their frames are cleared.

        Those are ``error``, one that the framework answers itself, and those that were asked whether they are refusals.
        """
        if self.request is not None:
            errors = [held for held in (error, self.answered, *(self._refusal or ())) if held is not None]
            if errors and self.request.stats.live_blocks:
                with use(self.base):  # what this takes is not the request's, which may have no room
                    for held in errors:
                        clear_frames(held)
            self.close()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if self.request is not None:
            self.request._close()  # noqa: SLF001 - made for this

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """End the request and call ``on_end``, unless that was done."""
        if self.request is not None:
            self.close_after(error)
            if outcome in ("completed", "unfinished"):
                outcome = self._answered(outcome)
                if outcome == "refused" and self._refusal:
                    error = self._refusal[-1]
            if self.service.on_end is not None:
                self._tell(outcome, error, self.request, self.service.on_end)

    def _answered(self, sent: Outcome) -> Outcome:
        """The outcome where no exception ended it: the answer was sent whole, or it was not."""
        status = self.status or 0
        if status == 101 and sent == "completed":  # a WebSocket, which either side may close
            return sent
        if self.is_disconnected:
            return "disconnected"
        if self._refusal and status >= 400:
            return "refused"  # and a handler inside has answered, whether or not that was read
        return "failed" if status >= 500 else sent

    def end_unanswered(self, error: BaseException | None) -> None:
        """The same, where no whole answer was sent: by an exception, or without one."""
        if error is None:
            self.end("unfinished")
        elif self.is_disconnected:
            self.end("disconnected", error)
        elif isinstance(error, Exception):
            self.end("failed", error)
        else:
            self.end("cancelled", error)

    def _tell(self, outcome: Outcome, error: BaseException | None, begun: Request, on_end: OnEnd) -> None:
        try:
            self.untold.remove(self)
        except KeyError:
            return
        scope, base, route, status = self.scope, self.base, self.route, self.status
        before = self._before
        del self._before
        assert scope is not None  # noqa: S101 - let go of after this only
        seconds, stats = time.perf_counter() - self._began, begun.stats
        waits = stats.live_blocks > 0 and runs_a_loop()
        given = before.scope_of(scope) if waits else scope

        def tell() -> None:
            _UNSETTLED.discard(begun)
            escaped = begun.escaped
            assert escaped is not None  # noqa: S101 - it has ended
            report = Report(route, outcome, status, seconds, stats, escaped, error, sites_of(begun, route))
            with use(base):  # what it makes is not the request's
                try:
                    on_end(given, report)
                except Exception:
                    log.exception("on_end raised; its request (route %r) has ended all the same", route)

        if not stats.live_blocks:
            tell()
            return
        _UNSETTLED.add(begun)
        context = before.context_now() if waits else contextvars.copy_context()
        begun._when_settled(functools.partial(context.run, tell))  # noqa: SLF001

    def _with_outer(self) -> list["Served"]:
        """This one, and those of the middlewares around it that are not over."""
        found, outer = [self], getattr(self, "outer", None)
        while outer is not None and outer.scope is not None:
            found.append(outer)
            outer = getattr(outer, "outer", None)
        return found

    def _note(self, *refusals: BudgetExceeded) -> None:
        for served in self._with_outer():
            served._refusal = (*(served._refusal or ()), *refusals)  # noqa: SLF001 - one of these

    def note_answered(self, refused: BudgetExceeded | None) -> None:
        """A framework inside handles an exception, with a 500: because of this refusal, or for another reason."""
        for served in self._with_outer():
            served.refused_inside = refused

    def refusal_of(self, error: BaseException) -> BudgetExceeded | None:
        """The refusal that led to an exception; None where another reason did."""
        with use(self.base):  # what this takes is not the request's, which may have no room
            return self._refusal_of(error)

    def _refusal_of(self, error: BaseException) -> BudgetExceeded | None:
        leaves = leaves_of(error)
        known: dict[int, BudgetExceeded] = {}
        for refused in self._refusal or ():
            known[id(refused)] = known[id(refused.__cause__)] = refused
        errors = [leaf for leaf in leaves if isinstance(leaf, Exception) and not isinstance(leaf, BudgetExceeded)]
        unknown: list[BaseException] = [error for error in errors if id(error) not in known]
        if unknown and self.request is not None:
            told = self.request._refusals_of(unknown)  # noqa: SLF001 - made for this
            new = [refused.with_traceback(None) for refused in told if refused is not None]
            known |= {id(refused.__cause__): refused for refused in new}
            if new:
                self._note(*new)
        for leaf in leaves:
            if not isinstance(leaf, Exception) and id(leaf) not in known and self.request is not None:
                chosen = self.request._chosen_of(leaf)  # noqa: SLF001 - made for this
                if chosen is not None:
                    known[id(leaf)] = chosen
                    self._note(chosen)
            elif isinstance(leaf, BudgetExceeded) and id(leaf) not in known:
                known[id(leaf)] = leaf  # as a whole request is told
                self._note(leaf)
        refusals = [known[id(leaf)] for leaf in leaves if id(leaf) in known]
        lasting = [refused for refused in refusals if refused.of_request or refused.never_fits]
        return (lasting or refusals)[0] if len(refusals) == len(leaves) else None


class Serving(Served):
    """The record of a request whose handler is selected in steps, or of a handler without an account."""

    __slots__ = (
        "_before",
        "_began",
        "_refusal",
        "answered",
        "answers",
        "base",
        "handler",
        "is_disconnected",
        "outer",
        "refused_inside",
        "request",
        "route",
        "scope",
        "service",
        "status",
        "tenant",
        "unadmitted",
    )

    def __init__(self, service: Service, scope: Scope, route: str | None, begun: Request | None, base: Handler) -> None:
        self.service = service
        self.scope = scope
        self.route = route
        self.request = begun
        self.base = base
        self.handler: Handler | str | None = None
        """What each ``Step`` selects."""
        self.tenant = None
        self.status = None
        self.is_disconnected = False
        self._refusal = None
        self.answered = None
        self.answers = False
        """A refusal is answered."""
        self.refused_inside = None
        self.outer = None
        self.unadmitted: NoRoom | None = None
        """Why it got no reservation: it is to be refused, and the application not called."""
        if service.on_end is not None and begun is not None:
            self._expect_telling()

    def check_admitted(self) -> None:
        """NoRoom: it got no reservation."""
        if self.unadmitted is not None:
            raise self.unadmitted

    def check_refused_inside(self) -> None:
        """BudgetExceeded: Django or Flask has made a 500 of it."""
        if self.refused_inside is not None and self.answers and self.status == 500:
            raise self.refused_inside

    def let_go_of_handled(self) -> None:
        """Let go of the frames of exceptions that were handled inside, all of which are over as the step is.

        A refusal is kept for the report. Its frames lead to the server's, hence to the body, whose last reference ends
        the request.
        """
        error, self.answered = self.answered, None
        if error is not None and self.request is not None and self.request.stats.live_blocks:
            clear_frames(error)
        for refused in self._refusal or ():
            drop_tracebacks(refused)

    def forget(self) -> None:
        """Let go of the scope and of exceptions, whose tracebacks hold arrays and may hold this."""
        self.scope = None
        self._refusal = None
        self.answered = None
        self.refused_inside = None
        self.outer = None
        self.unadmitted = None


def closed(close: Callable[[], object]) -> None:
    """Close what was made for an answer that is not sent. What that raises is logged: a refusal is told instead."""
    try:
        close()
    except Exception:
        log.exception("what a refused request had made for its answer could not be closed")


Step = _ServingStep
"""A stretch of a request's work, with its handler selected: the application's call, or one part of the body."""

_UNSETTLED: Final[set[Request]] = set()
"""Those that have ended on a loop that has not looked yet what escaped."""


def _tell_at_exit() -> None:
    """End what a program leaves behind at its exit: in a loop in a thread, in a task that nothing frees."""
    for untold in list(Served.untold):
        untold.end("cancelled")
    for unsettled in list(_UNSETTLED):
        unsettled._settle()  # noqa: SLF001 - made for this


def _forget_the_parents() -> None:
    """In a child of fork."""
    Served.untold.clear()
    _UNSETTLED.clear()


atexit.register(_tell_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)


def serving() -> Served | None:
    """The request of a server that the running Context serves."""
    return SERVING.get()


def refusal(error: BaseException) -> BudgetExceeded | None:
    """See ``problems.refusal``."""
    here = SERVING.get()
    if here is not None:
        return here.refusal_of(error)
    return error if isinstance(error, BudgetExceeded) else None


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Opts out of the request: what is started inside of the block belongs to no request.

    It selects what was selected around the server; outside of a middleware, NumPy's default handler. It is for work
    that outlives the request and is not part of it: a cache that is filled, a task that runs for ever::

        with ctxalloc.detached():
            asyncio.create_task(refresh_for_ever())
    """
    here = SERVING.get()
    mark = SERVING.set(None)
    try:
        with use(None if here is None else here.base):
            yield
    finally:
        SERVING.reset(mark)
