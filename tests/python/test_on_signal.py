"""A profile that a signal asks a running process for. Signals are the process's own, so each program is one."""

import os
import signal
import stat
from pathlib import Path

import pytest
from subprocesses import run, says

import ctxalloc
from ctxalloc import _files, _flame, _on_signal

pytestmark = pytest.mark.any_numpy

BEGIN = """
import logging, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import ctxalloc
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"])
def until(what):
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it did not come"
        work()
def work():
    return np.empty(10_000, np.uint8)
def files():
    return sorted(path.name.replace(str(os.getpid()), "PID") for path in folder.iterdir())
def ask():
    os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_signal_makes_a_file_and_one_meanwhile_is_ignored(tmp_path: Path) -> None:
    said = says(
        BEGIN
        + """
ctxalloc.profile_on_signal(signal.SIGUSR2, seconds=1, path=folder / "it.folded")
heard = []
ctxalloc.set_event_hook(hook := lambda *event: heard.append(event))
work()
assert len(heard) == 2
ask()
until(lambda: len(threading.enumerate()) == 2)
ask()
until(lambda: len(files()) == 1)
until(lambda: len(threading.enumerate()) == 1)
ask()
until(lambda: len(files()) == 2)
until(lambda: len(threading.enumerate()) == 1)
print(files(), ctxalloc.set_event_hook(None) is hook)
text = next(folder.iterdir()).read_text()
print(all(line.rpartition(" ")[2] == "10000" or "work" not in line for line in text.splitlines()), "work" in text)
print(oct(next(folder.iterdir()).stat().st_mode & 0o777))
""",
        FOLDER=str(tmp_path),
    )
    lines = said.splitlines()
    assert sum("this signal is ignored" in line for line in lines) == 1
    assert sum("a profile of 1 s begins" in line for line in lines) == 2
    assert lines[-3:] == ["['it-PID-1.folded', 'it-PID-2.folded'] True", "True True", "0o600"]


def test_the_environment_asks_for_it_and_an_end_writes_what_there_is(tmp_path: Path) -> None:
    environment = {"CTXALLOC_PROFILE_SIGNAL": "USR2", "CTXALLOC_PROFILE_SECONDS": "3000"}
    says(
        BEGIN + "ask()\nuntil(lambda: ctxalloc._profile.is_running())\nkept = [work(), work()]\n",
        **environment,
        CTXALLOC_PROFILE_FILE=str(tmp_path / "it.html"),
        FOLDER=str(tmp_path),
    )
    (found,) = tmp_path.iterdir()
    assert "work (&lt;string&gt;" in found.read_text()


def test_a_child_of_fork_is_not_profiled_and_can_be_asked(tmp_path: Path) -> None:
    says(
        BEGIN
        + """
import warnings
warnings.simplefilter("ignore")
ctxalloc.profile_on_signal(signal.SIGUSR2, seconds=0.5, path=folder / "it.folded")
ask()
until(lambda: ctxalloc._profile.is_running())
child = os.fork()
if child == 0:
    assert not ctxalloc._profile.is_running()
    assert ctxalloc.set_event_hook(None) is None
    ask()
    until(lambda: "it-PID-1.folded" in files())
    os._exit(0)
until(lambda: "it-PID-1.folded" in files())
assert os.waitpid(child, 0)[1] == 0
assert len(files()) == 2
""",
        FOLDER=str(tmp_path),
    )


@pytest.mark.parametrize(
    ("variables", "says_what"),
    [
        ({"CTXALLOC_PROFILE_SIGNAL": "NONE"}, "CTXALLOC_PROFILE_SIGNAL='NONE'"),
        ({"CTXALLOC_PROFILE_SIGNAL": "USR2", "CTXALLOC_PROFILE_SECONDS": "long"}, "CTXALLOC_PROFILE_SECONDS='long'"),
        ({"CTXALLOC_PROFILE_SIGNAL": "USR2", "CTXALLOC_PROFILE_FILE": "a.txt"}, "ends with .html, .folded or .pb.gz"),
    ],
)
def test_an_environment_that_asks_for_nonsense_is_an_error(variables: dict[str, str], says_what: str) -> None:
    outcome = run("import ctxalloc", **variables)
    assert outcome.code == 1
    assert "ImportError" in outcome.err
    assert says_what in outcome.err


def test_what_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seconds=0"):
        ctxalloc.profile_on_signal(signal.SIGUSR2, seconds=0)
    with pytest.raises(ValueError, match=r"no file can be written there"):
        ctxalloc.profile_on_signal(signal.SIGUSR2, path=tmp_path / "nowhere" / "a.html")
    before = signal.signal(signal.SIGUSR2, print)
    try:
        with pytest.raises(ValueError, match=r"has a handler already"):
            ctxalloc.profile_on_signal(signal.SIGUSR2, path=tmp_path / "a.html")
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_link_in_the_place_of_a_profile_is_left_alone(tmp_path: Path) -> None:
    link, elsewhere = tmp_path / f"p-{os.getpid()}-1.html", tmp_path / "elsewhere"
    link.symlink_to(elsewhere)
    path = _on_signal._OnSignal(1.0, tmp_path / "p.html")._free_path(_flame.SUFFIXES)
    assert path.name == f"p-{os.getpid()}-2.html"
    _files.write_private(link, b"a profile")  # it came between
    assert (link.is_symlink(), elsewhere.exists(), link.read_bytes()) == (False, False, b"a profile")
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
