"""Profiles and sites by the live page: behind its token, one at a time, and nothing before somebody asks."""

import asyncio
import gzip
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, call, http

import ctxalloc
from ctxalloc import _profile, _sites, metrics
from ctxalloc.asgi import debug_app

pytestmark = pytest.mark.any_numpy

TOKEN = "a token of many characters"
HOST = (b"host", b"127.0.0.1:8000")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
RIGHT = (b"authorization", f"Bearer {TOKEN}".encode())


def scope(path: str, query: bytes = b"", method: str = "POST", *headers: tuple[bytes, bytes]) -> Any:
    return {
        **http(path, method, headers=[HOST, *(headers or (RIGHT,))]),
        "client": ("127.0.0.1", 1),
        "query_string": query,
    }


class Staying(Client):
    """A client that waits for its answer."""

    async def receive(self) -> Any:
        if self.messages:
            return self.messages.pop(0)
        return await asyncio.Event().wait()


async def asked(app: Any, *of: Any) -> Client:
    client = Staying()
    await app(scope(*of), client.receive, client.send)
    return client


def makes_arrays() -> Any:
    return np.zeros(300_000, np.uint8)


async def busy() -> None:
    while True:
        makes_arrays()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["html", "folded", "pb.gz"])
def test_a_profile_has_what_is_made_meanwhile(kind: str) -> None:
    async def scenario() -> Client:
        work = asyncio.create_task(busy())
        try:
            return await asked(debug_app(token=TOKEN), "/debug/profile", f"seconds=0.2&as={kind}".encode())
        finally:
            work.cancel()

    answer = asyncio.run(scenario())
    assert answer.status == 200
    body = gzip.decompress(answer.body) if kind == "pb.gz" else answer.body
    assert b"makes_arrays" in body
    assert not _profile.is_running()


def test_one_profile_runs_at_a_time_and_ends_with_its_client() -> None:
    async def scenario() -> tuple[Client, Client]:
        app = debug_app(token=TOKEN)
        gone = Client()  # its receive tells a disconnect at once
        first = asyncio.create_task(asked(app, "/profile", b"seconds=0.3"))
        await asyncio.sleep(0.05)
        second = await asked(app, "/profile", b"seconds=0.1")
        await first
        async with asyncio.timeout(20):
            await app(scope("/profile", b"seconds=300"), gone.receive, gone.send)
        return second, gone

    second, gone = asyncio.run(scenario())
    assert (second.status, second.body) == (409, b"ctxalloc: a profile has begun already; end it first\n")
    assert gone.status == 200
    assert not _profile.is_running()


def test_a_server_that_stops_ends_the_profile() -> None:
    async def scenario() -> None:
        running = asyncio.create_task(asked(debug_app(token=TOKEN), "/profile", b"seconds=300"))
        await asyncio.sleep(0.05)
        assert _profile.is_running()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert not _profile.is_running()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (b"seconds=0", b"at most 300"),
        (b"seconds=301", b"at most 300"),
        (b"seconds=nan", b"at most 300"),
        (b"seconds=inf", b"at most 300"),
        (b"seconds=x", b"seconds='x'"),
        (b"seconds=", b"seconds=''"),
        (b"seconds=0.1&as=pdf", b"as=html"),
        (b"seconds=0.1&as=../../x.html", b"as=html"),
    ],
)
def test_a_bad_question_is_refused(query: bytes, said: bytes) -> None:
    answer = asyncio.run(asked(debug_app(token=TOKEN), "/profile", query))
    assert answer.status == 400
    assert said in answer.body


def test_only_those_with_the_token_get_a_profile() -> None:
    for app, headers in (
        (debug_app(), [HOST]),
        (debug_app(token=TOKEN), [(b"authorization", b"Bearer wrong")]),
        (debug_app(token=TOKEN), [RIGHT, (b"origin", b"https://evil.example")]),
        (debug_app(token=TOKEN), [RIGHT, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]),
    ):
        answer = asyncio.run(asked(app, "/profile", b"seconds=0.1", "POST", *headers))
        assert answer.status == 403
    assert asyncio.run(asked(debug_app(token=TOKEN), "/profile", b"seconds=0.1", "GET")).status == 405
    assert b'"profiles": false' in asyncio.run(call(debug_app(), scope("/data", b"", "GET"))).body
    assert b'"profiles": true' in asyncio.run(call(debug_app(token=TOKEN), scope("/data", b"", "GET"))).body


def test_the_page_has_the_sites_of_each_route() -> None:
    name = "GET /a b/{<c>}"
    _sites.note(name, ((0, 0, 0, 0, 0), 0, [([("file.py", 7, "decode")], (5, 100, 90, 100, 2))]))
    app = debug_app(token=TOKEN)
    assert metrics.sites()[name].largest(1)[0].where == "file.py:7 decode"
    assert b"file.py:7 decode" in asyncio.run(call(app, scope("/data", b"", "GET"))).body
    query = b"name=GET+%2Fa%20b%2F%7B%3Cc%3E%7D"
    assert b"decode (file.py:7)" in asyncio.run(call(app, scope("/sites", query, "GET"))).body
    assert asyncio.run(call(app, scope("/sites", query + b"&as=folded", "GET"))).body == b"decode (file.py:7) 90\n"
    assert asyncio.run(call(app, scope("/sites", b"name=no", "GET"))).status == 404
    assert asyncio.run(call(app, scope("/sites", query + b"&as=pdf", "GET"))).status == 400
    site = (b"sec-fetch-site", b"cross-site")
    assert asyncio.run(call(app, scope("/sites", query, "GET", RIGHT, site))).status == 403
    assert ctxalloc.current().name == "default_allocator"


SERVICE = """
import asyncio, socket
import numpy as np, uvicorn
from ctxalloc import _sites
from ctxalloc.asgi import debug_app

page = debug_app(token="a token of many characters")
_sites.note("GET /here", ((0, 0, 0, 0, 0), 0, [([("file.py", 7, "decode")], (5, 100, 90, 100, 2))]))
CLICKS = b'''<script>
setTimeout(() => { $("seconds").value = "1"; $("profile").click(); }, 1500);
setTimeout(() => document.querySelector("#sites button").click(), 1700);
</script>'''

async def work():
    while True:
        np.zeros(300_000)
        await asyncio.sleep(0.01)

async def app(scope, receive, send):
    async def clicking(message):
        if message["type"] == "http.response.start":
            message["headers"] = [one for one in message["headers"] if one[0] != b"content-length"]
        elif message["body"].startswith(b"<!doctype html>") and scope["path"] == "/":
            message["body"] += CLICKS
        await send(message)
    task = asyncio.create_task(work())
    try:
        await page(scope, receive, clicking)
    finally:
        task.cancel()

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.run(app, fd=listening.fileno(), log_level="warning", lifespan="off")
"""


def shown(service: str, folder: Path) -> str:
    """What a browser makes of the page of a service, without its script."""
    pytest.importorskip("uvicorn")
    assert BROWSER is not None
    with subprocess.Popen([sys.executable, "-c", service], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
            command += ["--virtual-time-budget=9000", "--dump-dom"]
            address = f"http://127.0.0.1:{port}/?token=a+token+of+many+characters"
            done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True)
        finally:
            process.terminate()
    return done.stdout.partition("<script>")[0]


@pytest.mark.once
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: make chromium")
def test_the_buttons_of_the_page_bring_graphs(tmp_path: Path) -> None:
    dom = shown(SERVICE, tmp_path)
    assert dom.count('href="blob:http://127.0.0.1:') == 2, dom[-3000:]
    assert dom.count(">open the flame graph</a>") == 2
    assert "file.py:7 decode" in dom


DYING = """
import os, socket
import uvicorn
from ctxalloc.asgi import debug_app

page, answered = debug_app(token="a token of many characters"), []

async def app(scope, receive, send):
    answered.append(scope["path"])
    if answered.count("/data") == 3:
        os._exit(0)
    await page(scope, receive, send)

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.run(app, fd=listening.fileno(), log_level="warning", lifespan="off")
"""


@pytest.mark.once
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: make chromium")
def test_the_numbers_of_a_dead_server_are_not_of_now(tmp_path: Path) -> None:
    dom = shown(DYING, tmp_path)
    assert "no numbers:" in dom
    assert "; these are of " in dom
    assert '<main id="numbers" class="stale">' in dom
    assert " s before</text>" in dom
    assert ">now</text>" not in dom
