"""What ``ctxalloc recommend`` gives to paste: it runs, and does what the advice says."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_calls import call, http

import ctxalloc
from ctxalloc import _snippets
from ctxalloc._snippets import Common, Kept, Set
from ctxalloc._terms import Terms

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
MiB = 1 << 20

SETS = [
    Set("POST /resize/{name}", "pool", 8 * MiB, 4 * MiB),
    Set("GET /report", "arena", 2 * MiB, None),
    Set("GET /table", "hugepages", 64 * MiB, 32 * MiB),
    Set("GET /plain", "default", MiB, None),
    Set("GET /aligned", "aligned128", None, None),
    Set("GET /t", "tracked", 3 * MiB, None),
    Set("GET /resize/{name:str}", "pool", 7 * MiB, None),
    Set("/files/{rest:path}", None, MiB, None),
    Set('GET /\x1b\u202e"\\', "pool", MiB, None),
    Set("nightly 'sums'", "pool", MiB, None),
]


def test_what_is_pasted_says_where_a_request_without_a_name_is() -> None:
    sets = [Set("", "pool", MiB, None), Set("nightly", "pool", 2 * MiB, None)]
    where = "\n# In place of each request of your code that "
    work = ":\n    ...  # the work"
    python = _snippets.python(sets, None)
    assert f"{where}has no name:\nwith ctxalloc.request(limit_bytes={MiB}){work}" in python
    assert f"{where}is called 'nightly':\nwith ctxalloc.request(name='nightly', limit_bytes={2 * MiB}){work}" in python
    by_hand = f"// By hand, where a request has no name: ctxalloc::request().limit_bytes({MiB})"
    named = f'// By hand: ctxalloc::request().name("nightly").limit_bytes({2 * MiB})'
    assert _snippets.rust(sets) == f"{by_hand}\n{named}", "no layer, which would do nothing"
    route = Set("/route", "pool", MiB, None)
    assert _snippets.rust([*sets, route]).endswith(f"}});\n{by_hand}\n{named}")
    assert _snippets.dask(sets[:1]) is None
    assert f"{where}has no name or is called 'unnamed':\n" in _snippets.python(
        [Set("unnamed", "pool", MiB, None)], None
    )


@pytest.mark.parametrize("strategy", ["pool", "arena", "default"])
def test_what_a_middleware_does_by_default_is_its_default(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctxalloc, "configure", lambda **_: None)
    refused: list[tuple[str, bool]] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        try:
            np.empty(6 * MiB, np.uint8)
        except MemoryError:
            refused.append((scope["path"], True))
        else:
            refused.append((scope["path"], False))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    unnamed, row = Set("", strategy, 4 * MiB, MiB), Set("/row", "pool", 8 * MiB, None)
    for sets in ([unnamed], [unnamed, row]):
        text = _snippets.python(sets, None)
        assert "gives requests a name" in text
        names: dict[str, Any] = {"app": app}
        exec(text, names)
        for path in ("/any", "/row"):
            asyncio.run(call(names["app"], http(path)))
    assert refused == [("/any", True), ("/row", True), ("/any", True), ("/row", False)]
    assert "default" not in _snippets.python([row], None).replace("a default.", "")


def test_the_middlewares_routes_run_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ctxalloc, "configure", lambda **options: seen.append(options))
    refused: dict[str, bool] = {}

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        np.ones(1000)
        try:
            np.empty(6 * MiB, np.uint8)
        except MemoryError:
            refused[scope["path"]] = True
        else:
            refused[scope["path"]] = False
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    names: dict[str, Any] = {"app": app}
    exec(_snippets.python(SETS, Kept(64 * MiB, 5.0)), names)
    assert seen == [{"warm_bytes": 64 * MiB, "decay_seconds": 5}]
    for path in ("/report", "/table", "/plain", "/aligned", "/t"):
        asyncio.run(call(names["app"], http(path)))
    asyncio.run(call(names["app"], http("/resize/one", "POST")))
    asyncio.run(call(names["app"], http("/files/a/b")))
    expected = {"/files/a/b": True, "/report": True, "/table": False, "/plain": True, "/aligned": False, "/t": True}
    assert refused == {**expected, "/resize/one": False}


def test_a_name_that_is_no_route_is_a_request_by_hand() -> None:
    text = _snippets.python([Set("nightly 'sums'", "pool", MiB, None)], None)
    assert "configure" not in text
    assert "routes" not in text
    exec(text, {})


def test_the_layer_of_rust_is_the_one_that_is_compiled() -> None:
    source = (ROOT / "tests" / "rust" / "tower" / "advised.rs").read_text()
    lines = [line.removeprefix("    ").rstrip() for line in source.splitlines()]
    text = "\n".join(lines)
    waiting = [Set("GET /large", "pool", 30 * MiB, 30 * MiB, waits=True), Set("GET /small", "pool", MiB, MiB)]
    parts = _snippets.rust(SETS).split("\n\n") + _snippets.rust(waiting, Common(60 * MiB, 60, 4000)).split("\n\n")[1:]
    for part in parts:
        assert part.strip() in text, f"write this into tests/rust/tower/advised.rs:\n{part}"


@pytest.mark.parametrize("one", [*SETS, Set("sum", "hugepages", MiB, None)])
def test_the_terms_of_dask_are_terms(one: Set) -> None:
    # Of the real plugin's argument only: Dask is in another environment.
    text = _snippets.dask([one])
    assert text is not None
    assert text.startswith("from ctxalloc.dask import RequestPlugin\n")
    names: dict[str, Any] = {}
    exec(text.partition("\n")[2].partition("\nclient.")[0], names)
    assert Terms().changed(names["prefixes"][one.route], "a test") is not None


def test_a_python_file_of_all_strategies_is_one(tmp_path: Path) -> None:
    sets = [Set(f"GET /{name}", name, MiB, None) for name in _snippets._PYTHON]
    path = tmp_path / "advice.py"
    path.write_text(_snippets.python(sets, None))
    compile(path.read_text(), str(path), "exec")


def test_an_arm_of_rust_for_each_method_and_none_twice() -> None:
    sets = [Set("/a", "pool", 1, None), Set("GET /a", "pool", 2, None), Set("POST /a", "default", 3, None)]
    sets += [Set("GET /b/{x:int}", "pool", 4, None), Set("GET /b/{x}", "pool", 5, None), Set("by hand", None, 6, None)]
    text = _snippets.rust(sets)
    assert [line.strip() for line in text.splitlines() if " => " in line] == [
        '("GET", "/a") => terms.limit_bytes(2),',
        '("POST", "/a") => terms.limit_bytes(3).strategy(System),',
        '("GET", "/b/{x}") => terms.limit_bytes(4),',
        '(_, "/a") => terms.limit_bytes(1),',
        "_ => terms,",
    ]
    assert text.splitlines()[-2:] == [
        '// "GET /b/{x}" is a route that axum does not tell from one above',
        '// By hand: ctxalloc::request().name("by hand").limit_bytes(6)',
    ]
    assert "terms.name(route.to_owned())" in _snippets.rust([Set("/a", "pool", 1, None)]), "as it is called"


def test_what_a_route_has_and_no_line_says_is_left_to_it() -> None:
    sets = [Set("GET /a", None, MiB, None), Set("by hand", None, MiB, None)]
    for text in (_snippets.python(sets, None), _snippets.rust(sets)):
        assert "and the strategy that it has" in text
        assert "System" not in text
        assert "What a route has beside these terms it keeps:" in text
    for text in (
        _snippets.python([Set("/a", "pool", None, None)], None),
        _snippets.rust([Set("/a", "pool", None, None)]),
    ):
        assert "and the limit that it has" in text
    assert "and the strategy numa" in _snippets.rust([Set("GET /a", "numa", 1, None)])
