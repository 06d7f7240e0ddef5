"""The live page of ``ctxalloc.asgi.debug_app()``: who may see it, its numbers, and what a real browser makes of it."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_calls import call, http

import ctxalloc
from ctxalloc._page import numbers
from ctxalloc.asgi import debug_app

pytestmark = pytest.mark.any_numpy

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
HOST = (b"host", b"127.0.0.1:8000")


def ask(app: Any, path: str = "/", *headers: tuple[bytes, bytes], client: str = "127.0.0.1", query: bytes = b"") -> Any:
    scope = {**http(path, headers=[*(headers or (HOST,))]), "client": (client, 1), "query_string": query}
    return asyncio.run(call(app, scope))


def test_this_machine_sees_the_page_and_its_numbers() -> None:
    app = debug_app()
    page = ask(app)
    assert page.status == 200
    assert b"<title>ctxalloc</title>" in page.body
    with ctxalloc.request(name="on the page"):
        np.empty(100, np.uint8)
    data = json.loads(ask(app, "/debug/data").body)
    assert any(route["name"] == "on the page" for route in data["routes"])
    assert data["pid"] == os.getpid()


@pytest.mark.parametrize(
    "asked",
    [
        {"client": "192.168.1.7"},
        {"headers": [(b"host", b"127.0.0.1"), (b"x-forwarded-for", b"8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"forwarded", b"for=8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"via", b"1.1 a-proxy")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"X-Forwarded-Host", b"a.example")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"x-forwarded-port", b"443")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"x-forwarded-prefix", b"/a")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"x-envoy-external-address", b"8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"fastly-client-ip", b"8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"fly-client-ip", b"8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"x-cluster-client-ip", b"8.8.8.8")]},
        {"headers": [(b"host", b"127.0.0.1"), (b"cf-ray", b"1")]},
        {"headers": [(b"host", b"evil.example")]},
        {"headers": [(b"host", b"localhost:80@evil.example")]},
        {"headers": [(b"host", b"evil.example"), (b"host", b"localhost")]},
        {"client": "::ffff:192.168.1.7"},
        {"client": ""},
    ],
)
def test_others_are_refused_without_a_token(asked: dict[str, Any]) -> None:
    for path in ("/", "/data"):
        answer = ask(debug_app(), path, *asked.get("headers", ()), client=asked.get("client", "127.0.0.1"))
        assert answer.status == 403
        assert b"debug_app(token=...)" in answer.body


@pytest.mark.parametrize(
    ("client", "host"),
    [("::1", "[::1]:80"), ("::ffff:127.0.0.1", "LocalHost:8000"), ("127.0.0.2", "127.0.0.2"), ("127.0.0.1", "[::1]")],
)
def test_every_address_of_this_machine_is_let_in(client: str, host: str) -> None:
    assert ask(debug_app(), "/", (b"host", host.encode()), client=client).status == 200


def test_a_token_lets_others_in_and_nobody_else() -> None:
    token = "a token of many characters"
    app = debug_app(token=token)
    assert ask(app).status == 403
    assert ask(app, "/", HOST, (b"authorization", b"Bearer wrong")).status == 403
    assert ask(app, "/", HOST, (b"authorization", b"Bearer " + token.encode()), client="8.8.8.8").status == 200
    assert ask(app, "/data", query=b"token=a+token+of+many+characters", client="8.8.8.8").status == 200
    assert ask(app, "/data", query=b"token=%ff", client="8.8.8.8").status == 403
    right = b"token=a+token+of+many+characters"
    assert ask(app, "/", HOST, (b"authorization", b"bearer " + token.encode())).status == 200
    assert ask(app, "/", HOST, (b"authorization", b"Basic of-a-proxy"), query=right).status == 200
    assert ask(app, "/", HOST, (b"authorization", b"Bearer wrong"), query=right).status == 403
    assert ask(app, "/", HOST, (b"authorization", token.encode())).status == 403
    other = "another key, long enough"
    assert ask(debug_app(token=other), "/", HOST, (b"authorization", f"Bearer {other}".encode())).status == 200
    with pytest.raises(TypeError, match="give a str, not bytes"):
        debug_app(token=b"x" * 20)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 characters can be guessed"):
        debug_app(token="short")


@pytest.mark.parametrize(
    "sent",
    [
        [(b"origin", b"https://evil.example")],
        [(b"origin", b"http://127.0.0.1:9000")],
        [(b"origin", b"null")],
        [(b"sec-fetch-site", b"cross-site")],
        [(b"Sec-Fetch-Site", b"same-site")],
    ],
)
@pytest.mark.parametrize("token", [None, "a token of many characters"])
def test_other_sites_cannot_read_it_through_a_browser(sent: list[tuple[bytes, bytes]], token: str | None) -> None:
    # Also where the application around it allows all origins.
    right = (b"authorization", b"Bearer a token of many characters")
    answer = ask(debug_app(token=token), "/data", HOST, right, *sent)
    assert answer.status == 403
    assert b"another site" in answer.body


def test_its_own_page_and_a_link_to_it_are_answered() -> None:
    app = debug_app()
    own = ((b"origin", b"http://127.0.0.1:8000"), (b"sec-fetch-site", b"same-origin"))
    assert ask(app, "/data", HOST, *own).status == 200
    link = ((b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"))
    assert ask(app, "/", HOST, *link).status == 200, "the page itself has no numbers"
    assert ask(app, "/data", HOST, *link).status == 403


def test_a_token_with_its_refreshes_is_a_header() -> None:
    page = ask(debug_app(token="a token of many characters"), query=b"token=a+token+of+many+characters").body.decode()
    assert "Authorization: `Bearer ${token}`" in page
    assert '"/data" + location.search' not in page, "the access log would have the token each second"


def test_only_get_is_answered() -> None:
    scope = {**http("/", "POST", headers=[HOST]), "client": ("127.0.0.1", 1), "query_string": b""}
    assert asyncio.run(call(debug_app(), scope)).status == 405


SERVICE = """
import sys, socket
import numpy as np, uvicorn
import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware, debug_app
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

tenant = ctxalloc.Budget(8 << 20, name="a <b>tenant</b>", parent=ctxalloc.Budget(64 << 20, name="process"))
kept = []

async def load(request):
    kept.append(np.zeros(int(request.path_params["size"]), np.uint8))
    return PlainTextResponse("kept")

terms = ctxalloc.request(budget=tenant, strategy=ctxalloc.strategies.Tracked(traceback=3))
inner = Starlette(routes=[Route("/load/{size}", load)])
app = Starlette(routes=[
    Mount("/debug/memory", debug_app()),
    Mount("/", AllocatorMiddleware(inner, routes={"/load/{size}": terms})),
])
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.run(app, fd=listening.fileno(), log_level="warning", lifespan="off")
"""


@pytest.fixture
def service() -> Iterator[int]:
    for library in ("uvicorn", "starlette"):
        pytest.importorskip(library)
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


CROWD = """
import socket, sys
import numpy as np, uvicorn
import ctxalloc
from ctxalloc._page import numbers
from ctxalloc.asgi import debug_app
from starlette.applications import Starlette
from starlette.routing import Mount

with ctxalloc.request(name="x" * 10_000, limit_bytes=1000):
    try: np.ones(1001, np.uint8)
    except MemoryError: pass
kept = []
for number in range(1000):
    context = ctxalloc.request(name=f"live {number}", root=True)
    context.__enter__()
    kept.append((context, np.ones(1 + number, np.uint8)))
budgets = [ctxalloc.Budget(1 << 30, name="y" * 10_000)]
for number in range(195):
    budgets.append(ctxalloc.Budget(1 << 20, name=f"level {number}", parent=budgets[-1]))
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.run(
    Starlette(routes=[Mount("/debug/memory", debug_app())]), fd=listening.fileno(), log_level="warning", lifespan="off"
)
"""


@pytest.mark.once
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: make chromium")
@pytest.mark.parametrize("width", [390, 1160])
def test_nothing_is_wider_than_the_screen(width: int, tmp_path: Path) -> None:
    for library in ("uvicorn", "starlette"):
        pytest.importorskip(library)
    assert BROWSER is not None
    with subprocess.Popen([sys.executable, "-c", CROWD], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},844"]
            command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000", "--dump-dom"]
            command += [f"http://127.0.0.1:{port}/debug/memory/"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        finally:
            process.terminate()
    dom = shown.stdout
    width_shown = re.search(r'data-width="(\d+)"', dom)
    assert width_shown is not None
    assert int(width_shown[1]) <= width
    assert 'data-overflow="0"' in dom
    assert "(the largest 200 of 1000)" in dom
    assert "live 999" in dom
    assert "live 0<" not in dom
    assert "s ago</text>" in dom, "the axis of time"
    assert "MiB</text>" in dom, "and that of memory"
    assert dom.index(">Routes<") < dom.index(">Budgets<") < dom.index(">Live requests ")
    assert 'role="meter"' in dom


@pytest.mark.once
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: make chromium")
def test_a_browser_shows_requests_budgets_and_who_keeps_escapes(service: int, tmp_path: Path) -> None:
    from urllib.request import urlopen

    for size in (100_000, 200_000, 3_000_000):
        with urlopen(f"http://127.0.0.1:{service}/load/{size}") as answer:
            assert answer.read() == b"kept"
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=6000",
        "--dump-dom",
        f"http://127.0.0.1:{service}/debug/memory/",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    dom = shown.stdout
    assert 'data-turns="' in dom, dom[-2000:]
    assert "/load/{size}" in dom
    assert "a &lt;b&gt;tenant&lt;/b&gt;" in dom, "names are text, not HTML"
    assert "3.15 MiB" in dom  # what the tenant has in use
    assert "<polyline" in dom
    assert "<rect" in dom
    assert "3300000 bytes in 3 blocks" in dom  # of all requests that have one strategy
    assert "no numbers:" not in dom.partition("<script>")[0]


@pytest.mark.parametrize("token", ["sécret of many letters", "tab\tin the midst of it", " a space before the first"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        debug_app(token=token)


@pytest.mark.parametrize("path", ["/debug/memory/nonexist", "/debug/memory/data/", "/debug/memory//"])
def test_what_is_not_there_is_404(path: str) -> None:
    app: Any = debug_app()
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive() -> Any: ...

    for at, status in ((path, 404), ("/debug/memory", 200), ("/debug/memory/", 200), ("/debug/memory/data", 200)):
        answers.clear()
        scope = {"type": "http", "method": "GET", "path": at, "root_path": "/debug/memory", "headers": []}
        asyncio.run(app({**scope, "client": ("127.0.0.1", 1)}, receive, send))
        assert answers[0]["status"] == status, at


def test_names_of_the_page_are_cut() -> None:
    name = "é" * 10_000
    kept = []
    budgets = [ctxalloc.Budget(1000, name=f"{number} {name}") for number in range(20)]
    for budget in budgets:
        with ctxalloc.request(name=f"long {name}", budget=budget, root=True):
            kept.append(np.ones(10))
    seen = numbers()
    names = [one["name"] for one in (*seen["escapes"], *seen["budgets"])] + [one["parent"] for one in seen["escapes"]]
    assert max(len(name.encode()) for name in names if isinstance(name, str)) <= 128
    assert len(json.dumps(seen)) < 200_000
