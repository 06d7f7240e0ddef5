"""Ctrl-C while `ctxalloc` starts, which takes more than half a second, is one line and exit status 130."""

import subprocess
import sys
from pathlib import Path

import pytest

SAID = "ctxalloc: interrupted before it began\n"
INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
CONSOLE = "import re, sys\nfrom ctxalloc._command import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text("print('began')\n")
    (tmp_path / "recorded").mkdir()
    return tmp_path


def record(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = ["run", "--record", "recorded/service.trace", "program.py"]
    return subprocess.run(
        [sys.executable, *command, *words],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}/path"},
        capture_output=True,
        text=True,
        timeout=60,  # it hangs
        check=False,
    )


@pytest.mark.parametrize("command", ["-m ctxalloc", "console script"])
@pytest.mark.parametrize("caught", ["", "except BaseException: pass"], ids=["plain", "caught"])
def test_ctrl_c_while_it_is_imported(command: str, caught: str, folder: Path) -> None:
    (folder / "path" / "numpy").mkdir(parents=True)
    body = INTERRUPT.replace("\n", "\n    ")
    text = f"try:\n    {body}pass\n{caught}\n" if caught else INTERRUPT
    (folder / "path" / "numpy" / "__init__.py").write_text(text)
    (folder / "console").write_text(CONSOLE)
    ours = ("-m", "ctxalloc") if command == "-m ctxalloc" else ("console",)
    done = record(folder, *ours)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SAID)
    assert not list((folder / "recorded").iterdir())


def test_ctrl_c_once_its_recording_has_begun_leaves_no_file(folder: Path) -> None:
    (folder / "console").write_text(
        "import os, signal, sys\nfrom ctxalloc._command import main\nfrom ctxalloc import _run\n"
        "def begun(*_, **__):\n    assert os.listdir('recorded')\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "_run._begun = begun\nsys.exit(main())\n"
    )
    done = record(folder, "console")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SAID)
    assert not list((folder / "recorded").iterdir())


def test_ctrl_c_leaves_a_file_that_was_there(folder: Path) -> None:
    (folder / "recorded" / "service.trace").write_text("somebody's")
    (folder / "console").write_text(
        "import os, pathlib, signal, sys\nfrom ctxalloc._command import main\n"
        "def exists(path):\n    os.kill(os.getpid(), signal.SIGINT)\n    return True\n"
        "pathlib.Path.exists = exists\nsys.exit(main())\n"
    )
    done = record(folder, "console")
    assert (done.returncode, done.stderr) == (130, SAID)
    assert (folder / "recorded" / "service.trace").read_text() == "somebody's"


def test_ctrl_c_in_the_program_is_the_programs(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: pass\nexcept KeyboardInterrupt:\n    print('caught')\n"
    )
    done = record(folder, "-m", "ctxalloc")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", "")


def test_ctrl_c_that_is_ignored_is_ignored(folder: Path) -> None:
    """As in the background of a shell without job control."""
    (folder / "console").write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nimport ctxalloc\n"
        "os.kill(os.getpid(), signal.SIGINT)\nfrom ctxalloc._command import main\nsys.exit(main())\n"
    )
    done = record(folder, "console")
    assert (done.returncode, done.stdout, done.stderr) == (0, "began\n", "")
