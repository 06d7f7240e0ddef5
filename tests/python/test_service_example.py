"""The main job: the picture service of examples/service, its audit, its control, its client and its demo.

Most run the application in this process; two start it as a process of its own on uvicorn. No test waits for a time:
where requests must meet, events make them.
"""

import asyncio
import io
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ctxalloc

for library in ("ctxalloc_example", "httpx", "matplotlib", "PIL", "scipy", "skimage", "starlette", "uvicorn"):
    pytest.importorskip(library)

# What is not installed was skipped above.
import httpx  # noqa: E402
from PIL import Image  # noqa: E402
from starlette.applications import Starlette  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.service import app, audit, client, demo, launch, pictures, pipelines, processing, routes  # noqa: E402
from examples.service import reference as references  # noqa: E402

pytestmark = pytest.mark.any_numpy


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def small() -> Mapping[str, bytes]:
    """Real pictures, made small: a photograph in colour and one with transparent parts."""
    made = {}
    for name in ("astronaut.png", "logo.png"):
        image = Image.open(io.BytesIO(pictures.pictures()[name]))
        made[name] = png(np.array(image.resize((96, 80))))
    return made


@pytest.fixture
def table() -> routes.Table:
    routes.register_handlers()
    return routes.changed([])


@asynccontextmanager
async def served(application: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        yield http


def wrong(counts: audit.Audit) -> list[audit.Seen]:
    return [seen for seen in counts.counts if seen.wrong]


# ---- the selection, request by request --------------------------------------------------------------


def test_arrays_of_interleaved_requests_are_made_by_their_routes_handler(
    small: Mapping[str, bytes], table: routes.Table
) -> None:
    async def scenario() -> None:
        application = app.build_app(table)
        wanted = await references.reference(small)
        todo = client.jobs(tuple(pipelines.ROUTES), tuple(small), rounds=6)
        async with served(application) as http:
            samples = await client.drive(http, todo, small, wanted, clients=8, done=lambda _: None)
        counts: audit.Audit = application.state.audit
        assert [sample.failure for sample in samples if sample.failure] == []
        assert len(samples) == len(todo)
        assert wrong(counts) == []
        assert counts.interleaved > 0
        assert {(seen.route, seen.asked) for seen in counts.counts} == {
            *table.handlers.items(),
            ("/sharpen", table.scratch),
            ("/denoise", table.scratch),
        }
        assert {seen.place for seen in counts.counts} == {"coroutine", "thread", "rust"}

    asyncio.run(scenario())


@pytest.mark.parametrize(("switcher", "goes_wrong"), [("ctxalloc", False), ("shared-stack", True)])
def test_a_scope_left_while_another_request_is_in_its_own(
    small: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch, switcher: app.Switcher, *, goes_wrong: bool
) -> None:
    """/sharpen enters its scratch scope, then /denoise its own; /sharpen leaves first, and ends first."""
    routes.register_handlers()
    table = routes.changed(["/sharpen=aligned64", "/denoise=system"])
    patience_s = 60
    blur, total_variation = pipelines.box_blur, processing.total_variation
    denoise_is_in, sharpen_left = threading.Event(), threading.Event()

    async def scenario() -> audit.Audit:
        sharpen_is_in = asyncio.Event()

        async def blur_when_both_are_in(*arguments: Any) -> Any:
            sharpen_is_in.set()
            assert await asyncio.to_thread(denoise_is_in.wait, patience_s)
            return await blur(*arguments)

        def denoise_until_the_other_left(*arguments: Any) -> Any:
            denoise_is_in.set()
            assert sharpen_left.wait(patience_s)
            return total_variation(*arguments)

        monkeypatch.setattr(pipelines, "box_blur", blur_when_both_are_in)
        monkeypatch.setattr(processing, "total_variation", denoise_until_the_other_left)
        application = app.build_app(table, switcher=switcher)
        async with served(application) as http, asyncio.TaskGroup() as group:
            first = group.create_task(http.post("/sharpen", content=small["astronaut.png"]))
            first.add_done_callback(lambda _: sharpen_left.set())
            await sharpen_is_in.wait()
            second = group.create_task(http.post("/denoise", content=small["astronaut.png"]))
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        counts: audit.Audit = application.state.audit
        return counts

    found = {(seen.route, seen.asked, seen.found) for seen in wrong(asyncio.run(scenario()))}
    if goes_wrong:
        assert found == {("/sharpen", "aligned64", "system"), ("/denoise", "system", "aligned64")}
    else:
        assert found == set()


def test_an_answer_says_which_handler_served_it(small: Mapping[str, bytes], table: routes.Table) -> None:
    async def scenario() -> None:
        async with served(app.build_app(table)) as http:
            for route, handler in table.handlers.items():
                answer = await http.post(route, content=small["logo.png"])
                assert answer.headers["x-handler"] == handler

    asyncio.run(scenario())


def test_the_audit_of_a_service_is_to_be_had_over_http(small: Mapping[str, bytes], table: routes.Table) -> None:
    async def scenario() -> None:
        application = app.build_app(table)
        async with served(application) as http:
            await http.post("/denoise", content=small["logo.png"])
            document = (await http.get("/audit")).json()
        assert audit.Audit.from_json(document).counts == application.state.audit.counts
        assert audit.Audit.from_json(document).arrays > 100

    asyncio.run(scenario())


# ---- the audit --------------------------------------------------------------------------------------


def test_the_audit_counts_an_array_of_another_handler_as_a_mismatch() -> None:
    counts = audit.Audit()
    witness = audit.Witness(counts, audit.Visit(), "/blur", "aligned64")
    with ctxalloc.use("aligned64"):
        right = witness.thread(np.ones(3))
    witness.thread(np.ones(3))
    witness.rust(right[1:])
    witness.coroutine(np.frombuffer(b"abc", np.uint8))
    assert counts.mismatches == 2
    assert {seen.found for seen in wrong(counts)} == {"default_allocator", audit.NOBODY}


def test_only_what_comes_between_the_arrays_of_one_request_is_interleaved() -> None:
    counts = audit.Audit()
    visits = audit.Visit(), audit.Visit(), audit.Visit()
    first, second, like_first = (
        audit.Witness(counts, visit, "/blur", asked)
        for visit, asked in zip(visits, ("system", "aligned64", "system"), strict=True)
    )
    array = np.ones(1)
    first.thread(array)
    second.thread(array)  # another handler, but this request only begins
    assert counts.interleaved == 0
    first.thread(array)
    assert counts.interleaved == 1
    like_first.thread(array)
    first.thread(array)  # after another request, but the same handler
    audit.Witness(counts, visits[0], "/blur", "pool").thread(array)  # another handler, but the same request
    assert counts.interleaved == 1


# ---- the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("/blur=nobody", "no handler 'nobody'; registered are system"),
        ("/nowhere=system", "no route '/nowhere'; the routes are /thumbnail"),
        ("/blur", "does not say ROUTE=HANDLER"),
        ("=system", "does not say ROUTE=HANDLER"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change: str, message: str) -> None:
    with pytest.raises(routes.RouteError, match=re.escape(message)):
        routes.changed([change])


@pytest.mark.once
@pytest.mark.parametrize("module", ["examples.service", "examples.service.server"])
def test_what_there_is_not_is_refused_before_anything_starts(module: str) -> None:
    started = subprocess.run(
        [sys.executable, "-m", module, "--route=/blur=nobody"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (started.returncode, started.stdout) == (2, "")
    assert started.stderr.startswith("error: there is no handler 'nobody'; registered are system")
    assert "Traceback" not in started.stderr


def test_a_handler_slots_in_by_its_name(fresh_handler: Any, small: Mapping[str, bytes]) -> None:
    later = fresh_handler().name
    routes.register_handlers()
    table = routes.changed([f"*={later}", "/stats=system"], scratch=later)

    async def scenario() -> None:
        application = app.build_app(table)
        async with served(application) as http:
            for route in pipelines.ROUTES:
                (await http.post(route, content=small["logo.png"])).raise_for_status()
        counts: audit.Audit = application.state.audit
        assert wrong(counts) == []
        assert {seen.found for seen in counts.counts if seen.route != "/stats"} == {later}

    asyncio.run(scenario())


def test_the_environment_changes_the_table_the_command_line_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(routes.ENVIRONMENT, "*=system, /edges=aligned64")
    monkeypatch.setattr(sys, "argv", ["demo", "--route=/blur=aligned4096"])
    table = routes.from_options(demo._options())
    assert (table.handlers["/edges"], table.handlers["/blur"], table.handlers["/stats"]) == (
        "aligned64",
        "aligned4096",
        "system",
    )


# ---- bad input --------------------------------------------------------------------------------------


def too_many_pixels() -> bytes:
    return png(np.zeros((1500, 1500), np.uint8))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/blur", b"", 400, "the body is empty"),
        pytest.param("POST", "/blur", b"GIF89a, or so it says", 415, "no PNG or JPEG", id="no picture"),
        pytest.param("POST", "/blur", png(np.ones((40, 40), np.uint8))[:60], 415, "broken", id="cut off"),
        pytest.param("POST", "/blur", png(np.ones((4, 4), np.uint16)), 415, "mode 'I;16'", id="16 bits"),
        pytest.param("POST", "/blur", too_many_pixels(), 413, "1500 x 1500 pixels", id="too many pixels"),
        pytest.param("POST", "/blur", bytes(app.MAX_BYTES + 1), 413, f"more than {app.MAX_BYTES} bytes", id="too long"),
        ("GET", "/blur", b"", 405, "GET is not taken at /blur; use POST"),
        ("POST", "/audit", b"", 405, "POST is not taken at /audit; use"),
        ("POST", "/blur%20", b"", 404, "there is no /blur "),
        ("POST", "/rotate", b"", 404, "there is no /rotate; post a picture to one of /thumbnail"),
    ],
)
def test_bad_input_is_answered_with_what_is_wrong(
    table: routes.Table, method: str, path: str, body: bytes, *, status: int, message: str
) -> None:
    async def scenario() -> None:
        async with served(app.build_app(table)) as http:
            answer = await http.request(method, path, content=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]

    asyncio.run(scenario())


def test_no_garbled_file_is_more_than_an_error(table: routes.Table, small: Mapping[str, bytes]) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    random = np.random.default_rng(seed)
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(small["astronaut.png"])).save(jpeg, format="JPEG")

    async def scenario() -> None:
        async with served(app.build_app(table)) as http:
            for whole in (small["astronaut.png"], jpeg.getvalue()):
                for _ in range(60):
                    body = bytearray(whole)
                    for at in random.integers(2, len(body), 20):
                        body[at] = random.integers(256)
                    answer = await http.post("/stats", content=bytes(body))
                    assert answer.status_code in (200, 413, 415), answer.text

    asyncio.run(scenario())


def test_a_header_that_is_cut_off_is_a_picture_that_is_broken() -> None:
    """PIL raises ValueError, and random garbling seldom finds it."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, format="PNG")
    header = file.getvalue().replace(b"\0\0\0\rIHDR", b"\0\0\0\x04IHDR")
    with pytest.raises(processing.PictureError, match="broken"):
        processing.decode(header, lambda array: array)


# ---- the client and the demo ------------------------------------------------------------------------


def test_the_client_notices_a_wrong_answer_and_a_refused_one(small: Mapping[str, bytes], table: routes.Table) -> None:
    async def scenario() -> list[client.Sample]:
        wanted = dict(await references.reference(small))
        wanted["/blur", "logo.png"] = wanted["/edges", "logo.png"]
        posted = {**small, "astronaut.png": b"no picture"}
        todo = client.jobs(("/blur", "/edges"), tuple(small), rounds=1)
        async with served(app.build_app(table)) as http:
            return await client.drive(http, todo, posted, wanted, clients=2, done=lambda _: None)

    failures = {(sample.job.route, sample.job.picture): sample.failure for sample in asyncio.run(scenario())}
    assert "differs" in (failures["/blur", "logo.png"] or "")
    assert "415" in (failures["/edges", "astronaut.png"] or "")
    assert failures["/edges", "logo.png"] is None


def outcome(table: routes.Table, *, found: str = "system", interleaved: int = 1, failure: str | None = None) -> Any:
    counts = audit.Audit(interleaved=interleaved)
    counts.counts[audit.Seen("/blur", "system", "thread", found)] = 1
    sample = client.Sample(client.Job("/blur", "logo.png"), 0.1, failure)
    return demo.Outcome(table, [sample], counts, clients=1, seconds=1.0)


def test_a_mismatch_a_failed_request_or_an_empty_run_ends_with_status_1(table: routes.Table) -> None:
    good, bad = outcome(table), outcome(table, found="aligned64")
    assert demo.verdict(good, None) == 0
    assert demo.verdict(good, bad) == 0
    assert demo.verdict(bad, bad) == 1
    assert demo.verdict(outcome(table, failure="status 500"), bad) == 1
    assert demo.verdict(outcome(table, interleaved=0), bad) == 1
    assert demo.verdict(good, good) == 1, "a control without mismatch shows that the check cannot fail"


@pytest.fixture
def few(small: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "pictures", lambda: small)


@pytest.mark.once
@pytest.mark.usefixtures("few")
def test_the_demo_runs_to_its_end_prints_its_table_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--rounds=2", "--clients=4", "--no-control", f"--out={tmp_path}"])
    assert demo.main() == 0
    printed = capsys.readouterr()
    assert "28 requests by 4 clients at once" in printed.out
    assert "28/28 answered, 0 failed" in printed.err
    for route, handler in routes.HANDLERS.items():
        assert any(line.startswith(route) and handler in line for line in printed.out.splitlines())
    with Image.open(tmp_path / "demo.png") as drawn:
        assert drawn.format == "PNG"
        assert drawn.width > 1000


def test_a_service_of_its_own_answers_and_ends_with_its_starter(
    small: Mapping[str, bytes], table: routes.Table
) -> None:
    async def scenario() -> None:
        async with launch.launched(table, "ctxalloc") as address, httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(f"{address}/edges", content=small["astronaut.png"])
            assert answer.headers["x-handler"] == table.handlers["/edges"]
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.ConnectError):
                await http.post(f"{address}/edges", content=small["astronaut.png"])

    asyncio.run(scenario())


def test_a_client_that_goes_away_is_no_error_of_the_service(table: routes.Table) -> None:
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/blur", "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app.build_app(table)(scope, receive, send))
    assert sent[0]["status"] == 400
