"""Which code made the arrays of a request's peak, and of what escaped: ``sites=`` of the middlewares."""

import asyncio
import gzip
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_calls import Scope, answer, call, http

import ctxalloc
from ctxalloc import _native, _sites, metrics, request, wsgi
from ctxalloc.asgi import AllocatorMiddleware, Report

HERE = Path(__file__).name
KEPT: list[Any] = []


def small() -> Any:
    return np.zeros(1000, np.uint8)


def large() -> Any:
    return np.zeros(500_000, np.uint8)


def kept() -> None:
    KEPT.append(np.zeros(300, np.uint8))


async def app(scope: Scope, receive: Any, send: Any) -> None:
    kept()
    first = large()
    del first
    second, third = small(), await asyncio.to_thread(large)
    del second, third
    await answer(send)


def served(service: Any, paths: list[str]) -> None:
    async def scenario() -> None:
        for path in paths:
            await asyncio.create_task(call(service, http(path)))
        await asyncio.sleep(0.3)

    asyncio.run(scenario())


def by_function(sites: metrics.Sites, field: str) -> dict[str, int]:
    return {site.where.split()[-1]: getattr(site, field) for site in sites.largest(50) if getattr(site, field)}


def test_a_report_says_where_the_peak_was_and_what_escaped() -> None:
    reports: list[Report] = []
    service = AllocatorMiddleware(
        app,
        routes={"/a/{name}": request()},
        default=request(),
        on_end=lambda _, report: reports.append(report),
        sites=1,
    )
    served(service, ["/a/1", "/a/2", "/else"])
    for report in reports:
        assert report.sites is not None
        assert report.sites.requests == 1
        assert by_function(report.sites, "at_peak_bytes") == {"large": 500_000, "small": 1000, "kept": 300}
        assert by_function(report.sites, "escaped_bytes") == {"kept": 300}
        assert by_function(report.sites, "total_bytes") == {"large": 1_000_000, "small": 1000, "kept": 300}
        assert sum(by_function(report.sites, "at_peak_bytes").values()) == report.stats.peak_bytes
        assert report.escaped.bytes == 300
        (where,) = [site.where for site in report.sites.largest(1)]
        assert where.startswith(f"{HERE}:") or f"/{HERE}:" in where
        assert [site.where.split()[-1] for site in report.sites.largest(escaped=True)] == ["kept"]
    of_route = metrics.sites()["/a/{name}"]
    assert of_route.requests == 2
    assert by_function(of_route, "at_peak_bytes") == {"large": 1_000_000, "small": 2000, "kept": 600}
    assert metrics.sites()["unnamed"].requests >= 1


def test_one_request_in_so_many_is_looked_at() -> None:
    reports: list[Report] = []
    service = AllocatorMiddleware(
        app, default=request(name="sampled"), on_end=lambda _, report: reports.append(report), sites=10
    )
    served(service, ["/"] * 60)
    looked_at = [number for number, report in enumerate(reports) if report.sites is not None]
    assert len(reports) == 60
    assert len(looked_at) == 6
    assert [number // 10 for number in looked_at] == list(range(6)), "one in each ten"
    assert metrics.sites()["sampled"].requests == 6


@pytest.mark.parametrize("every", [1, 2, 7, 100])
def test_one_of_every_so_many_is_chosen_at_random(every: int) -> None:
    sampler = _native._Sampler(every)
    rounds = [[sampler.is_due() for _ in range(every)] for _ in range(40)]
    assert [sum(chosen) for chosen in rounds] == [1] * 40
    assert every == 1 or len({chosen.index(True) for chosen in rounds}) > 1, "no period hides from it"


def test_what_nobody_reports_is_summed_up_all_the_same() -> None:
    served(AllocatorMiddleware(app, default=request(name="silent"), sites=1), ["/"] * 3)
    assert metrics.sites()["silent"].requests == 3

    def plain(environ: Any, start_response: Any) -> list[bytes]:
        large()
        start_response("200 OK", [])
        return []

    service = wsgi.AllocatorMiddleware(plain, default=request(name="wsgi"), sites=1)
    service({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *_: None)
    assert by_function(metrics.sites()["wsgi"], "at_peak_bytes") == {"large": 500_000}


def test_no_request_is_looked_at_without_the_option() -> None:
    reports: list[Report] = []
    served(
        AllocatorMiddleware(app, default=request(name="off"), on_end=lambda _, report: reports.append(report)), ["/"]
    )
    assert [report.sites for report in reports] == [None]
    assert "off" not in metrics.sites()


@pytest.mark.parametrize(
    ("sites", "error"), [(0, ValueError), (-1, ValueError), (1 << 63, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_a_bad_share_is_refused(sites: Any, error: type[Exception]) -> None:
    for middleware in (AllocatorMiddleware, wsgi.AllocatorMiddleware):
        with pytest.raises(error, match=f"sites={sites}: give"):
            middleware(app, sites=sites)  # type: ignore[call-overload]


def test_sites_are_written_for_tools_and_eyes() -> None:
    served(AllocatorMiddleware(app, default=request(name="<written>"), sites=1), ["/"])
    sites = metrics.sites()["<written>"]
    folded = sites.written("folded").decode()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in folded.splitlines()) == 501_300
    assert all(";" in line for line in folded.splitlines())
    page = sites.written().decode()
    assert "&lt;written&gt;, 1 request looked at" in page
    assert "large (" in page
    _, _, alive = page.partition("<h2>Alive at the end</h2>")
    alive, _, _ = alive.partition("<h2>")
    assert "kept (" in alive, "what has escaped has a graph too"
    assert "large (" not in alive
    assert b"peak_space" in gzip.decompress(sites.written("pb.gz"))
    with pytest.raises(ValueError, match=r"give 'html', 'folded' or 'pb\.gz'"):
        sites.written("pdf")  # type: ignore[arg-type]


def test_names_and_stacks_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sites, "_KNOWN", {})
    for number in range(_sites.MAX_NAMES + 50):
        _sites.note(f"name {number}", ((1, 1, 1, 1, 1), 0, [([("file", 1, "f")], (0, 2, 2, 2, 1))]))
    found = metrics.sites()
    assert len(found) == _sites.MAX_NAMES + 1
    assert found["other"].requests == 50
    for number in range(_sites.MAX_STACKS + 50):
        _sites.note("name 0", ((1, 1, 1, 1, 1), 0, [([("file", number, "f")], (0, 2, 2, 2, 1))]))
    folded = metrics.sites()["name 0"].written("folded").decode().splitlines()
    assert len(folded) == _sites.MAX_STACKS + 1
    assert sum(int(line.rsplit(" ", 1)[1]) for line in folded) == 2 * (_sites.MAX_STACKS + 51), "nothing is lost"


def _site(number: int, size: int) -> Any:
    return FUNCTIONS[number](size)


FUNCTIONS: list[Any] = []
for _number in range(5):
    exec(f"def site_{_number}(size): return np.empty(size, np.uint8)\nFUNCTIONS.append(site_{_number})")


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_have_the_sites_of_a_naive_model(seed: int) -> None:
    chance = random.Random(seed)
    live: list[tuple[int, Any]] = []
    now: Counter[str] = Counter()
    at_peak: Counter[str] = Counter()
    total: Counter[str] = Counter()
    terms = request(name="random", strategy=chance.choice([None, ctxalloc.strategies.Aligned(align=256)]))
    begun = terms._again(root=True, sites=True)
    with begun:
        for _ in range(300):
            move = chance.random()
            if move < 0.5 or not live:
                number, size = chance.randrange(5), chance.choice([1, 100, 5000, 400_000])
                live.append((number, _site(number, size)))
                now[f"site_{number}"] += size
                total[f"site_{number}"] += size
            elif move < 0.8:
                number, array = live.pop(chance.randrange(len(live)))
                now[f"site_{number}"] -= array.size
                del array
            else:
                number, array = live[chance.randrange(len(live))]
                before, size = array.size, chance.choice([1, 900, 60_000])
                array.resize(size, refcheck=False)
                now[f"site_{number}"] += size - before
                total[f"site_{number}"] += max(0, size - before)
                del array
            if now.total() > at_peak.total():
                at_peak = Counter(now)
    assert begun.stats.peak_bytes == at_peak.total()
    seen = _sites.sites_of(begun, "random")
    assert seen is not None
    assert by_function(seen, "at_peak_bytes") == +at_peak
    assert by_function(seen, "escaped_bytes") == +now
    assert by_function(seen, "total_bytes") == +total
