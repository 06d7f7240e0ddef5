"""``ctxalloc replay`` and ``recommend`` where something goes wrong: what was measured stays, and no file is left."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
import recordings
import subprocesses
from recordings import BEGIN, END, number
from test_trace import HOSTILE, MEASURES, bodies, named, process

from ctxalloc import _native, _recommend, _replay
from ctxalloc._replay import FailedError

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

INTERRUPTED = """
import os, signal, sys
from ctxalloc import _command, _recommend, _replay
wanted, count = sys.argv[1], int(sys.argv[2])
seen = []
def shown(text):
    if wanted in text or (wanted == "the end" and not text):
        seen.append(text)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGINT)
_recommend.progress_on = _replay.progress_on = lambda _: shown
sys.exit(_command.main(sys.argv[3:]))
"""
"""Ctrl-C, where this is said for the nth time."""


def started(words: list[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


def two_routes() -> recordings.Script:
    made = recordings.all_die_at_once()
    for _ in range(24):
        request = made.begin("GET /other")
        made.free(made.make(request, 2 << 20))
        made.end(request)
    return made


PLACES = (
    ("reading", 1, None),
    ("reading", 2, 0),
    ("round 1 of 3: pool", 1, 1),
    ("round 3 of 3: ", 2, 5),
    ("POST /at-once: reading", 1, 6),
    ("POST /at-once: round 2", 1, 8),
    ("together: reading", 1, 12),
    ("together: round 2", 1, 12),
    ("the end", 1, 12),
)
"""Where it is interrupted, and how many rounds were measured until then; None: it tells nothing."""


@pytest.mark.long
@pytest.mark.parametrize(("where", "count", "rounds"), PLACES)
def test_an_interrupt_loses_nothing_that_was_measured(
    where: str, count: int, rounds: int | None, tmp_path: Path
) -> None:
    path, folder, page = two_routes().write(tmp_path / "two.rec"), tmp_path / "TMPDIR", tmp_path / "advice.html"
    folder.mkdir()
    words: list[str | Path] = ["recommend", path, "--strategy", "pool", "--rounds", "3", "--json", "--output", page]
    done = started(["-c", INTERRUPTED, where, str(count), *words], env={**os.environ, "TMPDIR": str(folder)})
    assert done.stderr == ""
    assert not list(folder.iterdir()), "the plan"
    if rounds is None:
        assert (done.returncode, done.stdout, page.exists()) == (130, "", False)
        return
    told = json.loads(done.stdout)
    assert sum(len(part) for one in told["routes"] for part in one["rounds"].values()) == rounds
    # Behind the last round nothing is missing, nor before "together" if nothing is advised.
    is_partial = rounds < 12 or (where != "the end" and told["together"] is not None)
    assert (done.returncode, told["is_partial"]) == ((130, True) if is_partial else (0, False))
    assert [one["route"] for one in told["routes"]] + told["routes_left"] == ["GET /other", "POST /at-once"]
    assert "<html lang=en>" in page.read_text()
    assert page.read_text().endswith("</html>\n")


@pytest.mark.parametrize("name", ["replay", "recommend"])
def test_a_full_disk_is_told_with_its_folder(name: str, tmp_path: Path) -> None:
    path, folder = recordings.all_die_at_once().write(tmp_path / "a.rec"), tmp_path / "TMPDIR"
    folder.mkdir()
    done = started(
        ["-m", "ctxalloc", name, path],
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ctxalloc {name}: ")
    assert f"{folder}/ctxalloc-" in done.stderr
    assert "File too large" in done.stderr
    assert "TMPDIR names another one" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(folder.iterdir())


def test_no_folder_and_no_process_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recordings.one_size().write(tmp_path / "a.rec")

    def fails(*_: object, **__: object) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    for module, function, said in (
        (
            tempfile,
            "mkdtemp",
            "there is no folder for the plan of a replay: Resource temporarily unavailable; name",
        ),
        (subprocess, "Popen", "no process can be started for a replay: Resource temporarily unavailable"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, function, fails)
            for name in ("replay", "recommend"):
                done = commands.ctxalloc(name, path, "--rounds", "1")
                assert (done.returncode, done.stdout) == (2, "")
                assert said in done.stderr


def test_a_page_that_cannot_be_written_costs_no_advice(tmp_path: Path) -> None:
    path, page = recordings.few_requests().write(tmp_path / "a.rec"), tmp_path / "pages" / "advice.html"
    page.parent.mkdir()
    done = started(
        ["-m", "ctxalloc", "recommend", path, "--output", page],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 2
    assert "POST /at-once: not known" in done.stdout
    assert done.stderr == f"ctxalloc recommend: --output {page}: File too large; what it would say is above\n"
    assert not list(page.parent.iterdir()), "no half of it"


def test_the_page_is_there_though_nobody_reads_the_text(tmp_path: Path) -> None:
    path, page = recordings.few_requests().write(tmp_path / "a.rec"), tmp_path / "advice.html"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ctxalloc", "recommend", path, "--output", page],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "ctxalloc recommend: standard output: No space left on device\n")
    assert page.read_text().endswith("</html>\n")


def test_standard_error_may_be_closed_and_output_of_ascii(tmp_path: Path) -> None:
    made = recordings.few_requests()
    made.names[0] = "GET /b\u00fccher"
    path = made.write(tmp_path / "a.rec")
    for name, words in (("recommend", [path]), ("replay", [path, "--rounds", "1"]), ("trace", ["info", path])):
        command = f'exec "$0" -m ctxalloc {name} "$@" 2>&-'
        done = subprocess.run(
            ["/bin/sh", "-c", command, sys.executable, *words],
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert (done.returncode, done.stderr) == (0, b""), done
        assert name == "replay" or b"GET /b\\xfccher" in done.stdout


def test_a_file_that_vanishes_or_grows_meanwhile_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = recordings.all_die_at_once(), recordings.all_die_at_once(40)
    path = small.write(tmp_path / "a.rec")
    grown = large.write(tmp_path / "b.rec").read_bytes()
    recording = _native._Recording(path)
    before = _native._plan(recording, tmp_path / "plan")
    beginning = path.read_bytes()[:-13]  # without its end
    assert grown.startswith(beginning)
    with path.open("ab") as file:
        file.write(grown[len(beginning) :])
    assert _native._plan(recording, tmp_path / "plan") == before
    assert _native._plan(_native._Recording(path), tmp_path / "plan") != before
    said: list[str] = []

    def shown(text: str) -> None:
        said.append(text)
        if "round 1" in text:
            path.unlink(missing_ok=True)

    for module in (_replay, _recommend):
        monkeypatch.setattr(module, "progress_on", lambda _: shown)
    small.write(path)
    done = commands.ctxalloc("recommend", path, "--rounds", "1", "--strategy", "pool", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: len(part) for name, part in json.loads(done.stdout)["routes"][0]["rounds"].items()} == {
        "default": 1,
        "pool": 1,
    }
    assert not path.exists()


def test_what_was_measured_before_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recordings.one_size(20).write(tmp_path / "a.rec")
    real, calls = _replay._in_a_process, []

    def killed(plan: Path, *rest: Any) -> dict[str, Any]:
        calls.append(rest)
        if len(calls) == 4:
            raise FailedError("the replay with pool was killed by signal 9")
        return real(plan, *rest)

    monkeypatch.setattr(_replay, "_in_a_process", killed)
    done = commands.ctxalloc("replay", path, "--strategy", "default,pool", "--rounds", "3", "--json")
    told = json.loads(done.stdout)
    assert {name: len(part) for name, part in told["strategies"].items()} == {"default": 1, "pool": 2}
    assert (done.returncode, told["is_partial"]) == (2, True)
    assert told["problem"] == f"{path}: the replay with pool was killed by signal 9"
    assert done.stderr == f"ctxalloc replay: {told['problem']}; what was measured before is above\n"


def test_a_replay_that_is_killed_says_by_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recordings.one_size(20).write(tmp_path / "a.rec")
    for program, said in (
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9: it may have taken more memory than there is"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("print('no numbers')", "ended with status 0"),
    ):

        def start(_: object, text: str = program, begin: Any = subprocess.Popen, **options: Any) -> Any:
            return begin([sys.executable, "-c", text], **options)

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", start)
            done = commands.ctxalloc("replay", path, "--strategy", "pool", "--rounds", "1")
        assert (done.returncode, done.stderr) == (2, f"ctxalloc replay: {path}: the replay with pool {said}\n")


def test_what_is_no_recording_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_text("no recording")
    (tmp_path / "cut").write_bytes(recordings.one_size(1).write(tmp_path / "a.rec").read_bytes()[:30])
    for name in ("replay", "recommend"):
        for path, said in (
            (tmp_path / "empty", "request; it needs the program to begin some"),
            (tmp_path / "cut", "request; it needs the program to begin some"),
            (tmp_path / "file", "at byte 0: this is no recording"),
            (tmp_path / "file" / "below", "there is no recording"),
            (tmp_path / ("long" * 100), "File name too long"),
            (tmp_path, "this is no plain file"),
        ):
            done = commands.ctxalloc(name, path)
            assert (done.returncode, done.stdout) == (2, ""), path
            assert done.stderr.startswith(f"ctxalloc {name}: ")
            assert str(path) in done.stderr
            assert said in done.stderr
            assert done.stderr.count("\n") == 1


def of_names(count: int) -> Iterator[tuple[int, int, int | None, bytes]]:
    for at in range(count):
        request = at + 1
        yield BEGIN, request, None, number(at) + bytes(2)
        yield END, request, None, bytes(5)


@pytest.mark.parametrize("only", [None, "/14999"])
def test_of_many_routes_those_with_the_most_requests_are_told(only: str | None, tmp_path: Path) -> None:
    count = 15_000
    names = [named(2, at, f"/{at}") for at in range(count)]
    path = tmp_path / "many.rec"
    path.write_bytes(recordings.MAGIC + b"".join([process(), *names, named(3, 0, "System"), *bodies(of_names(count))]))
    words = [] if only is None else ["--route", only]
    told = json.loads(commands.ctxalloc("recommend", path, "--json", *words).stdout)
    if only is not None:
        assert [one["route"] for one in told["routes"]] == [only]
        assert told["routes_beyond"] == {"routes": 0, "requests": 0}
        return
    assert len(told["routes"]) == _recommend.MAX_ROUTES
    beyond = count - _recommend.MAX_ROUTES
    assert told["routes_beyond"] == {"routes": beyond, "requests": beyond}
    page = tmp_path / "advice.html"
    text = commands.ctxalloc("recommend", path, "--output", page).stdout
    for said in (text, page.read_text()):
        assert f"{beyond} more routes, with {beyond} requests together: not measured; --route NAME advises one" in said


BESIDE = 16 << 20
TIMES = 32
"""So many times a file's bytes, and ``BESIDE``, is what docs/tune.md allows."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["replay", "recommend"])
@pytest.mark.parametrize("what", HOSTILE)
def test_no_more_memory_than_is_stated(what: str, name: str, tmp_path: Path) -> None:
    events, names = HOSTILE[what]
    path = tmp_path / "hostile"
    told = [process(), *(named(2, at, one) for at, one in enumerate(names)), named(3, 0, "System"), *bodies(events())]
    path.write_bytes(recordings.MAGIC + b"".join(told))
    words = [name, str(path), "--rounds", "1", "--strategy", "default", "--json"]
    done = subprocesses.run(f"{MEASURES}measured({words!r})")
    assert done.code == 0, done.err
    *said, (status, taken) = (line.split() for line in done.err.splitlines())
    assert status == "0" or (status == "2" and said), done.err
    print(what, name, path.stat().st_size, taken, said)
    assert int(taken) <= TIMES * path.stat().st_size + BESIDE, f"{taken} for {path.stat().st_size}"


IN_THE_MIDDLE = """
import os, signal, sys, threading
from ctxalloc import _native
sys.setswitchinterval(1000)  # the other thread runs when native code lets it
recording, begun = _native._Recording(sys.argv[1]), threading.Lock()
begun.acquire()
def interrupts():
    with begun:
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupts).start()
begun.release()
try:
    _native._plan(recording, sys.argv[2])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_plan_is_broken_off_in_the_middle(tmp_path: Path) -> None:
    events, names = HOSTILE["requests"]
    path = tmp_path / "long"
    told = [process(), named(2, 0, names[0]), named(3, 0, "System"), *bodies(events())]
    path.write_bytes(recordings.MAGIC + b"".join(told))
    done = started(["-c", IN_THE_MIDDLE, path, tmp_path / "plan"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    assert not (tmp_path / "plan").exists(), "it was read to its end"
