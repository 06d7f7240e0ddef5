"""A pytest plugin: what a test's arrays take, and limits for it.

``@pytest.mark.ctxalloc(limit="80 MB", escaped=0, handler="pool")``, the fixture ``ctxalloc_request``, the options
``--ctxalloc-report`` and ``--ctxalloc-compare``, and the setting ``ctxalloc_limit``. Its own package, which imports
ctxalloc (and NumPy) for the first test that asks for it: pytest loads this in every project of an environment.
docs/observe.md is the guide.
"""

import contextlib
import functools
import gc
import inspect
import sys
import unittest
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import pytest

if TYPE_CHECKING:
    from ctxalloc import Handler, Request
    from ctxalloc_pytest._baseline import Baseline

__all__: list[str] = []

_MARK: Final = (
    "ctxalloc(limit=None, total=None, escaped=None, handler=None, frames=5, whole=False): "
    "run the test in a ctxalloc.request(); "
    "limit: the most bytes of arrays at one time ('80 MB'); total: the most bytes in all; escaped: how many arrays may "
    "outlive it; handler: 'pool', 'system', ...; frames: how much of the stack a failure shows for each site; "
    "whole: limit and total are of native memory and Python objects too"
)
_SETTING: Final = "ctxalloc_limit"
_OPTIONS: Final = ("limit", "total", "escaped", "handler", "frames", "whole")
_REQUEST: Final = pytest.StashKey["Request"]()
_RUNNING: "Final[dict[Request, Handler]]" = {}
"""The requests of the tests that run, and what was selected around each."""
_BASELINE: "Final[pytest.StashKey[Baseline]]" = pytest.StashKey()
_PROPERTY: Final = "ctxalloc"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the setting."""
    group = parser.getgroup("ctxalloc")
    group.addoption(
        "--ctxalloc-report",
        action="store_true",
        help="measure the arrays of every test, and list the tests with the largest peaks",
    )
    group.addoption(
        "--ctxalloc-compare",
        metavar="FILE",
        help="measure the arrays of every test, and fail those that take more than this file says",
    )
    group.addoption(
        "--ctxalloc-update", action="store_true", help="write what the tests take to the file of --ctxalloc-compare"
    )
    group.addoption(
        "--ctxalloc-tolerance", metavar="PART", default="10%", help="how much more is no growth (default: 10%%)"
    )
    parser.addini(_SETTING, "the limit of tests whose mark has none: '500 MB'; those without a mark have none")


def pytest_configure(config: pytest.Config) -> None:
    """The mark, and the report where it is asked for."""
    config.addinivalue_line("markers", _MARK)
    if config.getoption("--ctxalloc-report"):
        config.pluginmanager.register(_Report(), "ctxalloc-report")
    if config.getoption("--ctxalloc-compare"):
        from ctxalloc_pytest._baseline import Baseline, tolerance_of  # noqa: PLC0415 - for who asks for it

        tolerance = tolerance_of(config.getoption("--ctxalloc-tolerance"))
        # Its workers may be in other folders.
        path = config.invocation_params.dir / config.getoption("--ctxalloc-compare")
        updates = config.getoption("--ctxalloc-update")
        config.stash[_BASELINE] = Baseline(path, tolerance, updates=updates)
        config.pluginmanager.register(config.stash[_BASELINE], "ctxalloc-baseline")
    elif config.getoption("--ctxalloc-update"):
        raise pytest.UsageError("--ctxalloc-update goes with --ctxalloc-compare FILE, which it writes")


@pytest.fixture
def ctxalloc_request(request: pytest.FixtureRequest) -> "Request":
    """The test's own ctxalloc.Request: its numbers so far, and at its end."""
    return _request_of(request.node)


def _request_of(item: pytest.Item) -> "Request":
    """The request that the test will run in, made once."""
    found = item.stash.get(_REQUEST, None)
    if found is None:
        found = item.stash[_REQUEST] = _made(item)
    return found


def _mistake(said: str) -> NoReturn:
    """Fails the test by one line: what is wrong is in its mark, or in a setting, and not in anybody's frames."""
    pytest.fail(f"ctxalloc: {said}", pytrace=False)


def _options(item: pytest.Item) -> Mapping[str, Any]:
    mark = item.get_closest_marker("ctxalloc")
    if mark is None:
        return {}
    unknown = [name for name in mark.kwargs if name not in _OPTIONS]
    if mark.args or unknown:
        given = mark.args[0] if mark.args else unknown[0]
        _mistake(f"@pytest.mark.ctxalloc: {given!r} is no option; give {', '.join(_OPTIONS)} by keyword")
    for name in ("escaped", "frames"):
        number = mark.kwargs.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            _mistake(f"@pytest.mark.ctxalloc({name}={number!r}): give a whole number from 0 on")
    whole = mark.kwargs.get("whole")
    if whole is not None and not isinstance(whole, bool):
        _mistake(f"@pytest.mark.ctxalloc(whole={whole!r}): give True or False")
    if whole and mark.kwargs.get("escaped") is not None:
        _mistake("@pytest.mark.ctxalloc(whole=True, escaped=...): only arrays can be said to escape; leave out one")
    return mark.kwargs


def _size(name: str, given: Any) -> int | None:
    from ctxalloc._text import size_of  # noqa: PLC0415 - see above: here and below

    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 63):
        return given
    where = f"the setting {name} = {given}" if name == _SETTING else f"@pytest.mark.ctxalloc({name}={given!r})"
    if not isinstance(given, str):
        _mistake(f"{where}: give bytes as an int from 0 to 2**63 - 1, or a text such as '80 MB'")
    try:
        return size_of(given)
    except ValueError as error:
        _mistake(f"{where}: {error}")


def _made(item: pytest.Item) -> "Request":
    import ctxalloc  # noqa: PLC0415
    from ctxalloc._run import STRATEGIES  # noqa: PLC0415

    options, strategy = _options(item), None
    handler = options.get("handler")
    if handler is not None and handler not in STRATEGIES:
        _mistake(f"@pytest.mark.ctxalloc(handler={handler!r}): give one of {', '.join(STRATEGIES)}")
    if item.get_closest_marker("ctxalloc") is not None:
        upstream = ctxalloc.strategies.Pool() if handler is None else STRATEGIES[handler]()
        frames = options.get("frames")
        strategy = ctxalloc.strategies.Tracked(upstream, traceback=5 if frames is None else frames)
        limit = _size("limit", options.get("limit"))
        if limit is None:
            limit = _size(_SETTING, item.config.getini(_SETTING) or None)
    else:
        limit = None
    try:
        return ctxalloc.request(
            limit_bytes=limit, strategy=strategy, name=item.name, root=True, whole=options.get("whole", False)
        )
    except RuntimeError as error:
        why = str(error)
    _mistake(f"@pytest.mark.ctxalloc(whole=True): {why}")


def _in_request(function: Callable[..., Any], request: "Request") -> Callable[..., Any]:
    """The test function, run in the request wherever its plugin runs it: a fixture's Context may not be the test's."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def called(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                with _entered(request):
                    result = await function(*args, **kwargs)
                    await _one_turn()
                    _collect(request)
            except MemoryError as error:
                _trace(error)
                raise
            return result
    else:

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                with _entered(request):
                    result = function(*args, **kwargs)
                    _collect(request)
            except MemoryError as error:
                _trace(error)
                raise
            return result

    return called


@contextlib.contextmanager
def _entered(request: "Request") -> Iterator[None]:
    """The request, entered, and known as a test's."""
    __tracebackhide__ = True
    import ctxalloc  # noqa: PLC0415

    around = ctxalloc.current()
    with request:
        _RUNNING[request] = around
        try:
            yield
        finally:
            del _RUNNING[request]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, Any, Any]:
    """A fixture that a test asks for while it runs, by ``request.getfixturevalue``, is not its own work either."""
    if not _RUNNING:
        return (yield)
    import ctxalloc  # noqa: PLC0415

    running = ctxalloc.current_request()
    if running not in _RUNNING:
        return (yield)
    with ctxalloc.use(_RUNNING[running]):
        return (yield)


def _collect(request: "Request") -> None:
    """Collects garbage where arrays live: an escape is what something refers to. It takes long in large programs."""
    if request.stats.live_blocks:
        gc.collect()


def _trace(error: MemoryError) -> None:
    """A BudgetExceeded is raised at the request's end, from the test's MemoryError: the test is in that one's."""
    cause = error.__cause__
    if isinstance(cause, MemoryError) and cause.__traceback__ is not None and type(error).__name__ == "BudgetExceeded":
        error.__traceback__ = cause.__traceback__.tb_next  # without the frame that adds itself again


async def _one_turn() -> None:
    """Lets asyncio's loop let go of what it has just handed over: the results of tasks that were waited for."""
    if "asyncio" in sys.modules:
        import asyncio  # noqa: PLC0415 - where the test's plugin uses another loop, nobody has

        with contextlib.suppress(RuntimeError):  # that loop is not asyncio's
            asyncio.get_running_loop()
            await asyncio.sleep(0)


@contextlib.contextmanager
def _each_in(item: pytest.Function, called: Callable[..., Any], request: "Request") -> Iterator[None]:
    """The test function of an item, run in the request, for those too who do not call what the item says."""
    function = item.obj
    item.obj = called
    handle = getattr(function, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    instance = item.instance if isinstance(item.instance, unittest.TestCase) else None
    if inspect.iscoroutinefunction(inner):
        # pytest-asyncio runs each example in a Context of its own.

        @functools.wraps(inner)
        async def example(*args: Any, **kwargs: Any) -> Any:
            import ctxalloc  # noqa: PLC0415

            with ctxalloc.use(request.handler):
                return await inner(*args, **kwargs)

        handle.inner_test = example  # type: ignore[union-attr] # it has one
    if instance is not None:
        setattr(instance, item.name, called)  # unittest calls a coroutine function itself, by its name
    try:
        yield
    finally:
        item.obj = function
        if inspect.iscoroutinefunction(inner):
            handle.inner_test = inner  # type: ignore[union-attr] # as above
        if instance is not None:
            instance.__dict__.pop(item.name, None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs the test in its request, and checks it."""
    __tracebackhide__ = True
    is_asked_for = (
        item.get_closest_marker("ctxalloc") is not None
        or item.stash.get(_REQUEST, None) is not None
        or item.config.getoption("--ctxalloc-report")
        or item.config.getoption("--ctxalloc-compare")
    )
    if not is_asked_for or not isinstance(item, pytest.Function):
        return (yield)
    request = _request_of(item)
    try:
        with _each_in(item, _in_request(item.obj, request), request):
            result = yield
    except BaseException:
        _note(item, request)
        _show_sites(item, request, "Arrays that were alive when the test failed")
        raise
    else:
        _note(item, request)
        _check(item, request)
        return result
    finally:
        del item.stash[_REQUEST]  # a second run of the test has its own


def _note(item: pytest.Item, request: "Request") -> None:
    if request.escaped is None:  # the test was never entered: a skip, an error of another plugin
        return
    stats = request.stats
    for name, value in (
        ("peak_bytes", stats.peak_bytes),
        ("total_bytes", stats.total_bytes),
        ("escaped_blocks", request.escaped.count),
        ("refused", stats.refused),
    ):
        item.user_properties.append((f"{_PROPERTY}_{name}", value))


def _show_sites(item: pytest.Item, request: "Request", title: str) -> None:
    from ctxalloc import tracking  # noqa: PLC0415

    blocks = request.escaped.blocks if request.escaped is not None else None
    if blocks:
        item.add_report_section("call", "ctxalloc", f"{title}: {tracking.report(blocks)}")


def _check(item: pytest.Item, request: "Request") -> None:
    if request.escaped is None:
        if item.get_closest_marker("ctxalloc") is None:
            return
        pytest.fail(
            "ctxalloc: nothing of the test ran in its request, so nothing was measured; is it run in another process?",
            pytrace=False,
        )
    from ctxalloc._text import counted, size_text  # noqa: PLC0415

    options = _options(item)
    baseline = item.config.stash.get(_BASELINE, None)
    if baseline is not None:
        numbers = {"peak_bytes": request.stats.peak_bytes, "total_bytes": request.stats.total_bytes}
        grown = baseline.growth(item.nodeid, numbers)
        if grown is not None:
            pytest.fail(
                f"ctxalloc: the test takes more than in {baseline.path.name}: {grown}; if that is meant, run it with "
                "--ctxalloc-update",
                pytrace=False,
            )
    total, escaped = _size("total", options.get("total")), options.get("escaped")
    if total is not None and request.stats.total_bytes > total:
        kind = "block" if options.get("whole") else "array"
        pytest.fail(
            f"ctxalloc: the test allocated {size_text(request.stats.total_bytes)} ({request.stats.total_bytes} bytes) "
            f"in {counted(request.stats.count, kind)}, more than total={options['total']!r}",
            pytrace=False,
        )
    if escaped is not None and request.escaped.count > escaped:
        _show_sites(item, request, "Arrays that outlive the test")
        pytest.fail(
            f"ctxalloc: {counted(request.escaped.count, 'array')} of {request.escaped.bytes} bytes outlive the "
            f"test, more than escaped={escaped}",
            pytrace=False,
        )


class _Case(NamedTuple):
    """What one test took."""

    peak: int
    total: int
    escaped: int
    case: str
    """The parameters in its name; empty: it has none."""


class _Report:
    """Collects what the tests took: in the controlling process, also under pytest-xdist."""

    LINES: Final = 20

    def __init__(self) -> None:
        self.tests: dict[str, list[_Case]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the numbers of a test."""
        if report.when == "call":
            numbers: dict[str, Any] = {name: value for name, value in report.user_properties if isinstance(value, int)}
            peak = numbers.get(f"{_PROPERTY}_peak_bytes")
            if peak is not None:
                total, escaped = numbers[f"{_PROPERTY}_total_bytes"], numbers[f"{_PROPERTY}_escaped_blocks"]
                test, case = _parts_of(report.nodeid)
                self.tests.setdefault(test, []).append(_Case(peak, total, escaped, case))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Lists the largest: all cases of a test in one line, under its whole name."""
        from ctxalloc._text import counted, size_text  # noqa: PLC0415

        terminalreporter.section("ctxalloc: the largest peaks of arrays")
        largest = sorted(((max(cases), cases, test) for test, cases in self.tests.items()), reverse=True)
        for most, cases, test in largest[: self.LINES]:
            total, escaped = sum(one.total for one in cases), sum(one.escaped for one in cases)
            line = f"{size_text(most.peak):>10} peak {size_text(total):>10} total {escaped:>5} escaped  {test}"
            if len(cases) > 1:
                line += f"  ({len(cases)} cases, the largest {most.case})" if most.case else f"  ({len(cases)} runs)"
            else:
                line += most.case
            terminalreporter.line(line)
        measured = counted(sum(map(len, self.tests.values())), "test")
        beyond = len(largest) - self.LINES
        terminalreporter.line(f"{measured} measured" + (f"; {beyond} more are not listed" if beyond > 0 else ""))


def _parts_of(nodeid: str) -> tuple[str, str]:
    """The test, and its case in brackets: a name in Python has none, a folder and a case may."""
    path, colons, name = nodeid.partition("::")
    test, bracket, case = name.partition("[")
    return path + colons + test, bracket + case
