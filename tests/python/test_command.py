"""``python -m ctxalloc``: programs run as ``python`` runs them, and what is reported of them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest

from ctxalloc import _command, _compare, _info, _profile, _text

pytestmark = pytest.mark.any_numpy
ROOT = Path(__file__).parents[2]
PROGRAM = """\
import sys, threading
import numpy as np

def work():
    a = np.ones((500, 500))
    return a + a

kept = np.zeros(10_000)
work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(__name__, sys.argv[1:], sys.path[0])
if "exit" in sys.argv:
    sys.exit(3)
if "message" in sys.argv:
    sys.exit("it says why")
if "raise" in sys.argv:
    raise ValueError("its own")
if "big" in sys.argv:
    np.zeros(20_000_000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def ctxalloc(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "ctxalloc", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def test_a_script_runs_as_python_runs_it(script: Path) -> None:
    plain = subprocess.run([sys.executable, script, "--report", "x"], capture_output=True, text=True, check=True)
    run = ctxalloc("run", script, "--report", "x")
    assert (run.returncode, run.stdout, run.stderr) == (0, plain.stdout, "")


@pytest.mark.parametrize(("word", "status", "said"), [("exit", 3, ""), ("message", 1, "it says why\n")])
def test_a_script_ends_as_it_wants(script: Path, word: str, status: int, said: str) -> None:
    run = ctxalloc("run", script, word)
    assert (run.returncode, run.stderr) == (status, said)


def test_a_scripts_traceback_is_its_own(script: Path) -> None:
    run = ctxalloc("run", script, "raise")
    assert run.returncode == 1
    assert "ValueError: its own" in run.stderr
    assert "runpy" not in run.stderr
    assert "_run.py" not in run.stderr


def test_a_module_runs_with_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    (tmp_path / "package" / "__init__.py").touch()
    assert ctxalloc("run", "-m", "package", "-x", cwd=tmp_path).stdout == "__main__ package ['-x']\n"


def test_the_report_names_handlers_and_sites(script: Path) -> None:
    run = ctxalloc("run", "--report", script)
    assert run.returncode == 0
    assert "default_allocator" in run.stderr
    assert f"{script.name}:5 work" in run.stderr
    assert "3.89 MiB at the peak" in run.stderr  # two of 2 MB, and 80 kB
    assert "78.1 KiB alive at the end" in run.stderr


def test_a_handler_is_selected_in_threads_too(script: Path) -> None:
    run = ctxalloc("run", "--handler", "pool", "--report", script)
    table = run.stderr.partition("By handler")[2].partition("Largest")[0]
    assert "pool" in table
    assert "default_allocator" not in table


def test_a_limit_ends_the_program_with_the_reason(script: Path) -> None:
    run = ctxalloc("run", "--limit", "100MB", script, "big")
    assert run.returncode == 1
    assert "has no room for 160000000 more bytes" in run.stderr
    assert "np.zeros(20_000_000)" in run.stderr
    assert ctxalloc("run", "--limit", "100MB", script).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--handler", "nope", "{script}"], "no handler is named 'nope'"),
        (["--limit", "2Gi", "{script}"], "'2Gi' is no size; give bytes, or a number with a unit"),
        (["--rounds", "0", "{script}"], "'0' is no number of rounds"),
        (["--compare", "-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["--compare", "no_such_script.py"], "there is no script 'no_such_script.py'"),
        (["--compare", "/no/such/script.py"], "there is no script '/no/such/script.py'\n"),
        (["--limit", "99999999TiB", "{script}"], "'99999999TiB' is more than any memory; give less than"),
        (["--rounds", "3", "{script}"], "--rounds goes with --compare only"),
        (["--sites", "3", "{script}"], "--sites goes with --report only"),
        (["--report", "--compare", "{script}"], "--report does not go with --compare"),
        (
            ["--report=xml", "{script}"],
            "--report=xml is no kind of report; give --report, --report=json or --report=FILE",
        ),
        (["--output", "x", "{script}"], "--output goes with --report only"),
        (["--report", "--output", "/no/such/folder/x", "{script}"], "--output /no/such/folder/x: no file can be"),
        (["--report", "--sites", "0", "{script}"], "'0' is no number of sites"),
        (["--report"], "the following arguments are required: program\n"),
    ],
)
def test_what_cannot_be_run_is_named(script: Path, words: list[str], said: str) -> None:
    run = commands.ctxalloc("run", *(word.format(script=script) for word in words))
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_compare_runs_both_and_shows_the_output_once(script: Path) -> None:
    run = ctxalloc("run", "--compare", "--handler", "aligned64", "--rounds", "1", script)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("__main__") == 1
    assert "page faults" in run.stderr
    assert "aligned64" in run.stderr


def test_compare_stops_where_a_run_fails(script: Path) -> None:
    run = ctxalloc("run", "--compare", "--rounds", "1", script, "exit")
    assert (run.returncode, "the run with default_allocator ended with status 3" in run.stderr) == (3, True)


def test_info_tells_what_is_here() -> None:
    run = ctxalloc("info")
    assert run.returncode == 0
    for word in ("NumPy", "hugepages", "control group's limit", "transparent huge pages", "selection by"):
        assert word in run.stdout


def test_the_command_needs_no_zlib() -> None:
    code = "import sys; sys.modules['zlib'] = None; from ctxalloc._command import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pool" in done.stdout


def test_the_console_script_is_the_same_command() -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "ctxalloc", "--help"], capture_output=True, text=True, check=True
    )
    assert "run" in run.stdout
    assert "info" in run.stdout


@pytest.mark.parametrize(
    "words", ["run", "whole", "compare", "trace", "trace info", "trace export", "replay", "recommend"]
)
def test_each_commands_own_help_says_what_it_does(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _command.main([*words.split(), "--help"])
    usage, said, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: ctxalloc {words}")
    assert re.fullmatch(r"[A-Z].*\.", said, re.DOTALL), said


COMPLETION = Path(__file__).parents[2] / "python/installed/data/share/bash-completion/completions/ctxalloc"
COMPLETE = """
source "$1"
shift
COMP_WORDS=(ctxalloc "$@") COMP_CWORD=$#
_shtab_ctxalloc ctxalloc "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    "words", ["run", "run --record", "compare", "trace info", "trace export", "replay", "recommend"]
)
def test_bash_completes_the_name_of_each_file(words: str, tmp_path: Path) -> None:
    (tmp_path / "made.here").touch()
    command = ["bash", "-c", COMPLETE, "bash", COMPLETION, *words.split(), "ma"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "made.here\n"


def test_sizes_are_read_and_written() -> None:
    for text, size in (("4096", 4096), ("80 MB", 80_000_000), ("2GiB", 2 << 30), ("1.5k", 1536), ("0", 0)):
        assert _text.size_of(text) == size
    for text in ("", "-1", "MB", "1 2", "3 parsecs"):
        with pytest.raises(ValueError, match="is no size; give bytes"):
            _text.size_of(text)
    assert [_text.size_text(size) for size in (0, 999, 1024, 1 << 20, 5 << 40)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "1 MiB",
        "5 TiB",
    ]


def test_a_table_by_rich_shows_names_as_they_are() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    _text.table("of [/b]", ["name", "where"], [["/a[/red]", "[bold]x"]], out)
    assert all(name in out.getvalue() for name in ("of [/b]", "/a[/red]", "[bold]x"))


@pytest.mark.parametrize("end", ["", "ctxalloc.set_event_hook(before)\n"], ids=["left", "put back"])
def test_a_program_with_a_hook_of_its_own_is_said_to_be_incomplete(tmp_path: Path, end: str) -> None:
    path = tmp_path / "hooks.py"
    path.write_text(f"import ctxalloc\nbefore = ctxalloc.set_event_hook(print)\n{end}")
    assert "incomplete: the program set an event hook of its own" in ctxalloc("run", "--report", path).stderr
    assert os.environ.get("CTXALLOC_HANDLER") is None


def test_info_ends_well_where_nobody_reads_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ctxalloc", "info"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=100, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_table_shows_what_a_terminal_would_obey_as_escapes() -> None:
    out = io.StringIO()
    _text.table("of \x1b[31m", ["name"], [["a\nb"], ["\u00e4 c"]], out)
    assert out.getvalue() == "\nof \\x1b[31m\n  name\n  a\\nb\n  \u00e4 c\n"


def test_a_suite_whose_warnings_are_errors_runs_under_it(tmp_path: Path) -> None:
    # As an installed wheel says it: its files, by which pytest knows what to rewrite. Ours is imported by then.
    info = tmp_path / "site" / "probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nprobe = probe_plugin\n")
    (info / "RECORD").write_text("ctxalloc/__init__.py,,\nctxalloc_pytest/__init__.py,,\nprobe_plugin.py,,\n")
    (tmp_path / "site" / "probe_plugin.py").write_text("")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = -p no:asyncio\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "ctxalloc", "run", "-m", "pytest", "-q"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (run.returncode, "1 passed" in run.stdout) == (0, True), run.stdout + run.stderr


def test_a_programs_own_folder_named_numpy_is_a_site(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    path = tmp_path / "numpy" / "script.py"
    path.write_text("import numpy as np\ndef work():\n    return np.pad(np.ones(9), 90_000)\nkept = work()\n")
    run = ctxalloc("run", "--report", path)
    assert run.returncode == 0, run.stderr
    sites = run.stderr.partition("Largest sites")[2]
    assert "script.py:3 work" in sites
    assert "_program.py" not in sites


def test_sites_beyond_those_shown_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sites.py"
    path.write_text("import numpy as np\n" + "".join(f"a{n} = np.ones(1024)\n" for n in range(14)))
    assert "  and 4 more, 32 KiB at the peak: --sites shows them\n" in ctxalloc("run", "--report", path).stderr
    more = ctxalloc("run", "--report", "--sites", "20", path).stderr
    assert "more" not in more
    assert "sites.py:15" in more


CHILDREN = """\
import multiprocessing, os, subprocess, sys
def work(): pass
if __name__ == "__main__":
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    subprocess.run([sys.executable, "-c", ""], check=True)
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


def test_children_are_said_to_be_missing_from_the_report(tmp_path: Path) -> None:
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    run = ctxalloc("run", "--report", path)
    assert run.returncode == 0, run.stderr
    # One of them is multiprocessing's own, which tracks what spawned ones share.
    assert "  not in this report: 4 child processes or more\n" in run.stderr
    path.write_text("print(1)")
    assert "not in this report" not in ctxalloc("run", "--report", path).stderr


OPTIONS = """\
import sys
print(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions, sys.flags.dont_write_bytecode, sys.flags.isolated)
"""


def test_compare_keeps_the_options_of_python(tmp_path: Path) -> None:
    path = tmp_path / "options.py"
    path.write_text(OPTIONS)
    own = [sys.executable, "-OBI", "-W", "error", "-Wignore::ImportWarning", "-Xutf8", "-Bm", "ctxalloc"]
    words = ["run", "--compare", "--rounds", "1", str(path)]
    run = subprocess.run([*own, *words], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "1 1 ['error', 'ignore::ImportWarning'] 1 1\n", run.stderr


def test_compare_marks_what_may_be_chance() -> None:
    def rounds(*walls: float) -> list[_compare._Round]:
        return [_compare._Round(wall, 1.0, 1.0, 100.0 * wall, 1 << 20) for wall in walls]

    out = io.StringIO()
    found = {"default_allocator": rounds(1.0, 1.1, 1.2), "pool": rounds(0.5, 0.6, 0.7)}
    _compare._print(_compare.Program("it", False, []), found, "pool", 3, out)
    lines = {line.split("  ")[1].strip(): line for line in out.getvalue().splitlines() if "  " in line}
    assert lines["time"].endswith("  0.55x")
    assert lines["CPU, user"].endswith("  ~ 1.00x")
    assert "this may be chance" in out.getvalue()


def test_a_report_for_programs_has_what_the_other_one_has(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run = ctxalloc("run", "--report=json", "--output", "report.json", script, "--report=json", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "['--report=json']" in run.stdout
    found = json.loads(path.read_text())
    assert found["program"] == [str(script), "--report=json"]
    assert (found["all"]["peak_bytes"], found["all"]["live_bytes"]) == (4_080_000, 80_000)
    sites = {site["where"]: site for site in found["sites"]}
    assert sites["program.py:5 work"]["total_bytes"] >= 4_000_000
    assert sum(site["at_peak_bytes"] for site in sites.values()) == 4_080_000
    assert not any("peak_bytes" in site for site in sites.values()), "that of its stacks together is none"
    assert list(tmp_path.glob(".report*")) == []
    stdin = [sys.executable, "-m", "ctxalloc", "run", "--rep", "-", "--report=json"]
    given = subprocess.run(stdin, input=PROGRAM, capture_output=True, text=True, timeout=300, check=True)
    assert "['--report=json']" in given.stdout
    to_error = ctxalloc("run", "--report=json", script)
    assert json.loads(to_error.stderr)["all"] == found["all"]


def test_two_reports_are_compared_by_function(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    for name, head, size in (("a", "", 1 << 20), ("b", "# a line more\n", 3 << 20)):
        path.write_text(
            f"{head}import numpy as np\ndef grows(): return np.ones({size}, np.uint8)\n"
            "def stays(): return np.ones(99, np.uint8)\nkept = grows(), stays()\n"
        )
        assert ctxalloc("run", "--report=json", "--output", f"{name}.json", "grows.py", cwd=tmp_path).returncode == 0
    run = commands.ctxalloc("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert run.returncode == 0, run.stderr
    assert re.search(r"arrays at the peak +1 MiB +3 MiB +\+200\.0%", run.stdout), run.stdout
    changed = run.stdout.partition("Functions")[2]
    assert re.search(r"1 MiB +3 MiB +1 MiB +3 MiB +grows\.py grows", changed), changed
    assert "stays" not in changed


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("{}", "is no report"), ("no", "is no report")])
def test_what_is_no_report_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    run = commands.ctxalloc("compare", tmp_path / "a.json", tmp_path / "a.json")
    assert (run.returncode, said in run.stderr) == (2, True), run.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "program.py").write_text(PROGRAM)
    ctxalloc("run", "--report=json", "--output", folder / "report.json", folder / "program.py")
    return folder / "report.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: report.pop("sites"), "sites is missing or no number"),
        (lambda report: report.update(seconds="x"), "seconds is missing or no number"),
        (lambda report: report["all"].pop("arrays"), "all.arrays is missing"),
        (lambda report: report["sites"][0].pop("where"), "sites[0].where is missing"),
        (lambda report: report.update(sites=[3]), "sites[0].at_peak_bytes is missing"),
    ],
)
def test_a_report_with_fields_missing_is_named(change: Any, said: str, report: Path, tmp_path: Path) -> None:
    wrong = json.loads(report.read_text())
    change(wrong)
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    run = commands.ctxalloc("compare", report, tmp_path / "wrong.json")
    assert (run.returncode, run.stdout) == (2, ""), run
    assert said in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("words", [("info",), ("info", "--json")])
def test_closed_output_is_no_error(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ctxalloc", *words]
    shell = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, check=False)
    assert (shell.returncode, shell.stderr) == (0, "")


def test_a_handlers_name_is_shown_as_a_requests_is() -> None:
    text = r'request "esc\u{1b}[2J"'
    assert _profile.shown_handler(text) == 'request "esc\x1b[2J"'
    assert len(_profile.shown_handler("n" * 300)) == 131


def test_info_for_programs_is_json() -> None:
    found = json.loads(ctxalloc("info", "--json").stdout)
    assert found["NumPy"] == np.__version__
    assert isinstance(found["advice"], list)


def test_info_names_each_variable_that_is_set_for_ctxalloc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For whoever reads a report of a bug; what they are is in decision 0050."""
    text = (ROOT / "docs/decisions/0050-who-needs-each-choice.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `CTXALLOC_") and not line.endswith("| internal |")]
    variables = [name for row in rows for name in re.findall(r"`(CTXALLOC_\w+)`", row)]
    assert len(variables) > 9
    for name in variables:
        monkeypatch.setenv(name, f"of {name}")
    _info.print_info(sys.stdout)
    said = capsys.readouterr().out
    assert [name for name in variables if f"'of {name}'" not in said] == []
