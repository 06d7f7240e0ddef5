"""``ctxalloc run`` beside modules called as the standard library's, in folders that are gone, on paths of all kinds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
SHADOWING = ("html", "ipaddress", "json", "queue", "resource", "select", "signal", "statistics", "tempfile")
MINE = f"""
import numpy as np
import importlib
print([importlib.import_module(name).MINE for name in {SHADOWING}])
from html import entities
kept = np.ones(100000)
"""


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def shadowing(folder: Path) -> None:
    for name in SHADOWING:
        (folder / f"{name}.py").write_text(f"MINE = {name!r}\n")
    (folder / "html.py").unlink()
    (folder / "html").mkdir()
    (folder / "html" / "__init__.py").write_text("MINE = 'html'\n")
    (folder / "html" / "entities.py").touch()
    (folder / "email").mkdir()  # without __init__.py it is in nobody's way


@pytest.mark.parametrize("asked", [("program.py",), ("-m", "program"), ("-c", MINE)], ids=["script", "module", "code"])
@pytest.mark.parametrize("command", ["-m ctxalloc", "console script"])
def test_a_program_gets_its_own_modules_of_those_names(command: str, asked: tuple[str, ...], tmp_path: Path) -> None:
    shadowing(tmp_path)
    (tmp_path / "program.py").write_text(MINE)
    script = tmp_path.parent / f"{tmp_path.name}-ctxalloc"
    script.write_text("import re, sys\nfrom ctxalloc._command import main\nsys.exit(main())\n")
    ours = ("-m", "ctxalloc") if command == "-m ctxalloc" else (str(script),)
    plain = python(*asked, cwd=tmp_path)
    assert (plain.returncode, plain.stderr) == (0, "")
    run = python(*ours, "run", "--report", *asked, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, plain.stdout), run.stderr
    assert "arrays: 781 KiB at the peak" in run.stderr


def test_the_other_commands_do_without_them_too(tmp_path: Path) -> None:
    shadowing(tmp_path)
    done = python("-m", "ctxalloc", "info", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(params=["-m ctxalloc", "console script"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path.parent / f"{tmp_path.name}-console"
    script.write_text("import re, sys\nfrom ctxalloc._command import main\nsys.exit(main())\n")
    return ("-m", "ctxalloc") if request.param == "-m ctxalloc" else (str(script),)


@pytest.mark.parametrize("name", ["copyreg", "warnings", "threading", "runpy", "traceback"])
def test_a_module_that_ctxalloc_needs_is_the_programs(name: str, command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("print('executed')\nMINE = 1\n")
    (tmp_path / "program.py").write_text(f"import {name}\nprint({name}.MINE)\n")
    asked = ("-m", "program") if command == ("-m", "ctxalloc") else ("program.py",)
    plain, run = (python(*words, *asked, cwd=tmp_path) for words in ((), (*command, "run", "--report")))
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout), run.stderr
    assert "KeyError" not in run.stderr


def test_one_on_pythonpath_is_executed_for_the_program_only(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    for name in ("json", "typing", "argparse"):
        (tmp_path / "path" / f"{name}.py").write_text(f"print('{name} executed')\n")
    (tmp_path / "program.py").write_text("import sys\nprint(sys.path, 'json' in sys.modules)\nimport json\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    for asked in (("program.py",), ("-m", "program"), (f"-c{(tmp_path / 'program.py').read_text()}",)):
        plain, run = (python(*words, *asked, cwd=tmp_path) for words in ((), (*command, "run", "--report")))
        assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout), run.stderr
        assert run.stdout.endswith("False\njson executed\n")
    assert "executed" not in python(*command, "info", "--json", cwd=tmp_path).stdout


GONE = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"


def test_a_program_may_remove_its_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"{GONE}\nimport numpy as np; x = np.ones(100000)\n")
    for option in ("--report", "--report=out.folded"):
        done = python("-m", "ctxalloc", "run", option, "program.py", cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "program.py" in (tmp_path / "out.folded").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a folder that is in use may not be removed")
def test_a_program_runs_where_the_folder_is_gone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import numpy as np; x = np.ones(100000); print(1)\n")
    for words in ([str(program)], ["-m", "json.tool", "--help"], ["-c", "print(1)"], ["program.py"]):
        ends = []
        for ours in ([], ["-m", "ctxalloc", "run"], ["-m", "ctxalloc", "run", "--report"]):
            begin = f"{GONE}; os.execv({sys.executable!r}, {[sys.executable, *ours, *words]!r})"
            done = python("-c", begin, cwd=tmp_path)
            ends.append((done.returncode, done.stdout, done.stderr.partition("\nctxalloc: ")[0]))
        assert ends[0] == ends[1] == ends[2]


def test_what_python_skips_in_its_path_is_skipped_in_names(tmp_path: Path) -> None:
    entries = "sys.path += [pathlib.Path('/tmp'), 3, None, b'/tmp', '']"
    (tmp_path / "program.py").write_text(f"import numpy as np, pathlib, sys\n{entries}\nx = np.ones(100000)\n")
    for option in ("--report", "--report=json", "--report=out.html", "--report=out.folded", "--report=out.pb.gz"):
        done = python("-m", "ctxalloc", "run", option, "program.py", cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert f"{os.sep}program.py" not in (tmp_path / "out.folded").read_text()


def test_sites_of_a_service_are_shown_beside_such_a_path(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """
import asyncio, ctxalloc, json, numpy as np, pathlib, sys
from ctxalloc import metrics
from ctxalloc._page import numbers
from ctxalloc.asgi import AllocatorMiddleware
sys.path.insert(0, pathlib.Path("/tmp"))
told = []

async def app(scope, receive, send):
    np.ones(1000)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def send(message): ...
scope = {"type": "http", "method": "GET", "path": "/p", "headers": []}
end = lambda scope, report: told.extend(report.sites.largest(1))
asyncio.run(AllocatorMiddleware(app, sites=1, on_end=end)(scope, None, send))
(found,) = metrics.sites().values()
print(told == found.largest(1), len(json.dumps(numbers())) > 100, told[0].where)
"""
    )
    done = python("program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("True True "), done.stdout
