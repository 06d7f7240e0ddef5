"""What a signal's handler raises while a refusal leaves a request comes out, and the refusal with it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from whole_programs import check, needs_library

import ctxalloc
from ctxalloc import _serving
from ctxalloc.wsgi import AllocatorMiddleware

try:
    from numpy._core import _exceptions as of_numpy
except ImportError:  # NumPy 1.26
    from numpy.core import _exceptions as of_numpy  # type: ignore[no-redef]


class TooLate(Exception):  # noqa: N818 - as Celery's SoftTimeLimitExceeded
    """What a handler raises."""


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("attribute", ["__str__", "_total_size"])
def test_no_code_of_numpys_error_runs_when_a_refusal_leaves(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(_: object) -> Any:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(of_numpy._ArrayMemoryError, attribute, property(body) if attribute[1] == "t" else body)
    with pytest.raises(ctxalloc.BudgetExceeded) as raised, ctxalloc.request(limit_bytes=1000, strict=True):
        np.zeros(10_000)
    assert raised.value.requested_bytes == 80_000


@pytest.mark.usefixtures("alarm")
def test_what_a_handler_raises_while_a_refusal_is_made_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ctxalloc.BudgetExceeded.__init__

    def interrupted(self: ctxalloc.BudgetExceeded, *given: Any) -> None:
        monkeypatch.setattr(ctxalloc.BudgetExceeded, "__init__", plain)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ctxalloc.BudgetExceeded, "__init__", interrupted)
    with pytest.raises(TooLate) as raised, ctxalloc.request(limit_bytes=1000, strict=True):
        np.zeros(10_000)
    refused = raised.value.__context__
    assert isinstance(refused, ctxalloc.BudgetExceeded)
    assert isinstance(refused.__cause__, MemoryError)


@pytest.mark.skipif("CTXALLOC_STRESS" not in os.environ, reason="by chance, in `make stress`; those above are certain")
def test_stress_each_of_many_signals_comes_out_of_a_refusal() -> None:
    """The handler raises in whatever code runs; between two requests none does."""
    armed = False
    raised = 0

    def handler(*_: object) -> None:
        nonlocal raised
        if armed:
            raised += 1
            raise TooLate

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.00037)
    lost = []
    try:
        for _ in range(3000):
            known, error = raised, None
            try:
                armed = True
                try:
                    with ctxalloc.request(limit_bytes=1000):
                        np.zeros(10_000)
                finally:
                    armed = False
            except Exception as it:  # noqa: BLE001 - whatever comes
                error = it
            if raised > known:
                chain: list[BaseException] = []
                while error is not None and len(chain) < 9:
                    chain.append(error)
                    error = error.__context__ or error.__cause__  # type: ignore[assignment]
                if not any(isinstance(it, TooLate) for it in chain):
                    lost.append(chain)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not lost


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="`with` hears signals between `__enter__` and its block there")
def test_no_signal_leaves_a_thread_selected_in_a_request_of_wsgi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception may come wherever the middleware has bytecodes: before, between and after its steps."""
    armed = False

    def handler(*_: object) -> None:
        if armed:
            raise TooLate

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        start_response("200 OK", [])
        yield b"part"

    def serve() -> None:
        body = serves({"PATH_INFO": "/", "REQUEST_METHOD": "GET"}, lambda *_: None)
        try:
            list(body)
        finally:
            body.close()  # type: ignore[attr-defined]

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in `__del__`
    serves = AllocatorMiddleware(application, routes={"/": ctxalloc.request()})
    serve()
    here = ctxalloc.current()
    before = signal.signal(signal.SIGALRM, handler)
    left = came = 0
    signal.setitimer(signal.ITIMER_REAL, 0.00011, 0.00007)
    try:
        while came < 1500:
            try:
                armed = True
                try:
                    serve()
                finally:
                    armed = False
            except TooLate:
                came += 1
            left += ctxalloc.current() != here or _serving.serving() is not None
            if left:
                break
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not left, came


@pytest.mark.usefixtures("alarm")
def test_what_a_handler_raises_while_an_exemplar_is_noted_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import signal, numpy as np, ctxalloc
        from ctxalloc import _exemplars, _native

        class TooLate(Exception): pass

        def handler(*_):
            raise TooLate

        def note(*_, **__):
            signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, handler)
        _exemplars.note = note
        _native._note_ends(True)
        try:
            with ctxalloc.request(limit_bytes=1000, strict=True):
                np.zeros(10_000)
        except TooLate as error:
            print(type(error.__context__).__name__)
        try:
            with ctxalloc.request():
                pass
        except TooLate as error:
            print(error.__context__)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["BudgetExceeded", "None"]


def test_a_signal_while_one_waits_first_does_not_break_all_later_waits() -> None:
    code = """
        import signal, sys, numpy, ctxalloc

        class Boom(Exception): pass

        def handler(*_):
            raise Boom

        signal.signal(signal.SIGTERM, handler)
        assert "asyncio" not in sys.modules
        budget = ctxalloc.Budget(10)
        with ctxalloc.request(budget=budget, reserve_bytes=5, timeout=1):
            pass
        print("asyncio" in sys.modules)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@needs_library
def test_what_a_handler_raises_while_it_is_enabled_comes_out() -> None:
    """Here it is called at a known place. What modules raise that have not what is asked of them is a reason."""
    says = """
        import sysconfig
        class Deadline(Exception): pass

        plain, errors = sysconfig.get_config_var, []
        for raised in (KeyboardInterrupt, Deadline, MemoryError, AttributeError, ImportError):
            def ask(_):
                raise raised
            sysconfig.get_config_var = ask
            try:
                ctxalloc.request(whole=True).__enter__()
            except BaseException as error:
                print(type(error).__name__, type(error.__cause__).__name__)
        sysconfig.get_config_var = plain
        with ctxalloc.request(whole=True):
            print("works")
    """
    assert check(says).splitlines() == [
        "KeyboardInterrupt NoneType",
        "Deadline NoneType",
        "MemoryError NoneType",
        "RuntimeError AttributeError",
        "RuntimeError ImportError",
        "works",
    ]


def test_an_interrupt_in_what_is_called_at_the_end_stops_the_loop() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    async def main(*, waits: bool) -> None:
        with ctxalloc.request() as begun:
            kept.append(np.ones(1000))
        if waits:
            begun._when_settled(interrupted)
            await asyncio.sleep(30)
        begun._settle()
        begun._when_settled(interrupted)

    kept: list[Any] = []
    for waits in (True, False):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main(waits=waits))


def test_an_interrupt_while_an_end_is_put_on_the_loop_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        begun = ctxalloc.request()
        try:
            with begun, monkeypatch.context() as patched:
                patched.setattr(loop, "call_soon", interrupted)
                kept.append(np.ones(1000))
                begun._close()
        except TooLate:
            return str(begun.escaped)
        return "lost"

    def interrupted(*_: object, **__: object) -> None:
        raise TooLate

    kept: list[Any] = []
    assert asyncio.run(main()) != "lost"
