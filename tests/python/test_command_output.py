"""Where the report of ``ctxalloc run`` goes: files, links, FIFOs, devices, descriptors, and standard error."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import recordings

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
PROGRAM = "import numpy as np, os, sys; x = np.ones(100000); print('printed'); print('said', file=sys.stderr)\n"


def ctxalloc(*words: str | Path, cwd: Path, out: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-m", "ctxalloc", "run", *map(str, words)],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )
    return done


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("option", ["--report=json", "--report=way.folded"])
def test_a_fifo_stays_one_and_its_reader_gets_the_report(option: str, program: Path) -> None:
    fifo = program.parent / "way.folded"
    os.mkfifo(fifo)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()), daemon=True)
    reader.start()
    output: list[str | Path] = [] if option.endswith("folded") else ["--output", fifo]
    done = ctxalloc(option, *output, program, cwd=program.parent)
    reader.join(10)
    assert (done.returncode, done.stderr) == (0, "said\n")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert "program.py" in found[0]


def test_a_device_stays_one(program: Path) -> None:
    device = program.parent / "nothing"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except (AttributeError, OSError):
        pytest.skip("nodes of devices are root's to make, on Linux")
    done = ctxalloc("--report=json", "--output", device, program, cwd=program.parent)
    assert (done.returncode, done.stderr) == (0, "said\n")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_full_device_is_an_error_at_the_end(program: Path) -> None:
    device = program.parent / "full"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        device.open("w").close()
    except (AttributeError, OSError):
        pytest.skip("nodes of devices are root's to make, on Linux")
    done = ctxalloc("--report=json", "--output", device, program, cwd=program.parent)
    assert done.returncode == 120
    assert "No space left on device" in done.stderr
    assert stat.S_ISCHR(device.stat().st_mode)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device of our own that is as /dev/full: what code does to it is not done to this machine's."""
    device = tmp_path / "full"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        device.open("w").close()
    except (AttributeError, OSError):
        pytest.skip("nodes of devices are root's to make, on Linux")
    return device


@pytest.mark.parametrize("words", [["info", "--json"], ["info"], ["whole"]], ids=" ".join)
def test_a_full_standard_output_is_an_error_in_a_sentence(words: list[str], full: Path) -> None:
    command = [sys.executable, "-m", "ctxalloc", *words]
    with full.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    if words == ["whole"] and done.returncode == 2:
        pytest.skip("there is no library for the whole request here")
    assert (done.returncode, done.stderr) == (1, f"ctxalloc {words[0]}: standard output: No space left on device\n")


@pytest.mark.parametrize("option", ["--report", "--report=json"])
def test_a_report_that_nobody_can_be_told_of_is_an_exit_status(option: str, program: Path, full: Path) -> None:
    assert ctxalloc(option, program, cwd=program.parent).returncode == 0
    with full.open("w") as err:
        command = [sys.executable, "-m", "ctxalloc", "run", option, "-c", "import numpy"]
        assert subprocess.run(command, stderr=err, timeout=300, check=False).returncode == 120
    for ends, status in (("", 120), ("; sys.exit(3)", 3)):
        program.write_text(f"import os, sys\nos.close(2){ends}")
        assert ctxalloc(option, program, cwd=program.parent).returncode == status


def test_a_link_leads_to_the_file_that_is_written(program: Path) -> None:
    target, link = program.parent / "target", program.parent / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    assert ctxalloc("--report=json", "--output", "link", program, cwd=program.parent).returncode == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["format"] == "ctxalloc report"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    link.unlink()
    link.symlink_to("fresh")  # of nothing yet
    assert ctxalloc("--report=json", "--output", "link", program, cwd=program.parent).returncode == 0
    assert link.is_symlink()
    assert json.loads((program.parent / "fresh").read_text())["format"] == "ctxalloc report"


def test_a_descriptor_gets_the_report_behind_what_was_printed(program: Path) -> None:
    # A link, not /dev/stdout itself: code that replaces what it is given would replace this machine's.
    link = program.parent / "out"
    link.symlink_to("/proc/self/fd/1" if Path("/proc/self/fd").exists() else "/dev/fd/1")
    done = ctxalloc("--report=json", "--output", link, program, cwd=program.parent)
    assert done.stdout.startswith("printed\n{"), done
    assert link.is_symlink()
    with (program.parent / "log").open("w+") as log:
        log.write("before\n")
        log.flush()
        ctxalloc("--report=json", "--output", link, program, cwd=program.parent, out=log.fileno())
        log.seek(0)
        assert log.read().startswith("before\nprinted\n{")


def test_a_descriptor_that_the_program_has_reused_gets_nothing(program: Path) -> None:
    link = program.parent / "out"
    link.symlink_to("/proc/self/fd/1" if Path("/proc/self/fd").exists() else "/dev/fd/1")
    program.write_text(
        "import numpy, os, sys\nsys.stdout.flush()\nos.close(1)\nassert os.open('data', os.O_CREAT | os.O_RDWR) == 1\n"
    )
    done = ctxalloc("--report=json", "--output", link, program, cwd=program.parent)
    assert (program.parent / "data").read_text() == ""
    assert (done.returncode, "the program has closed it" in done.stderr) == (120, True), done


@pytest.mark.parametrize(
    "does",
    [
        "sys.stderr = io.StringIO()",
        "sys.stderr = None",
        "sys.stderr = open('err.log', 'w')",
        "sys.stderr.close()",
        "sys.stderr = sys.__stderr__ = open('err.log', 'w')",
    ],
)
def test_the_report_is_on_the_standard_error_that_was(does: str, program: Path) -> None:
    program.write_text(f"{PROGRAM}import io\n{does}\n")
    done = ctxalloc("--report", program, cwd=program.parent)
    assert done.returncode == 0
    assert "arrays: 781 KiB at the peak" in done.stderr
    log = program.parent / "err.log"
    assert not log.exists() or log.read_text() == ""


def test_a_redirected_descriptor_of_standard_error_has_the_report(program: Path) -> None:
    program.write_text(f"{PROGRAM}os.dup2(os.open('err.log', os.O_CREAT | os.O_WRONLY), 2)\n")
    done = ctxalloc("--report", program, cwd=program.parent)
    assert done.stderr == "said\n"
    assert "arrays: 781 KiB at the peak" in (program.parent / "err.log").read_text()


@pytest.mark.parametrize(("end", "status"), [("", 120), ("sys.exit(0)", 120), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_an_unwritten_report_shows_in_the_status(end: str, status: int, program: Path) -> None:
    (program.parent / "folder").mkdir()
    program.write_text(f"{PROGRAM}os.rmdir('folder')\n{end}\n")
    done = ctxalloc("--report", "--output", "folder/x", program, cwd=program.parent)
    assert done.returncode == status
    assert "ctxalloc run: --output folder/x: No such file or directory" in done.stderr
    assert "a report was not written" not in done.stderr


@pytest.mark.parametrize("kind", ["--report", "--report=json", "--report=it.html", "--report=it.pb.gz"])
def test_a_report_that_only_partly_fits_leaves_the_one_before(kind: str, program: Path) -> None:
    """As on a disk that is nearly full: the system writes a part, and says so by a number."""
    named = kind.rpartition("it.")[1:] if "it." in kind else None
    path = program.parent / ("".join(named) if named else "out")
    output = () if named else ("--output", "out")
    assert ctxalloc(kind, *output, program, cwd=program.parent).returncode == 0
    before = path.read_bytes()
    program.write_text(f"{PROGRAM}import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n")
    done = ctxalloc(kind, *output, program, cwd=program.parent)
    assert done.returncode == 120
    assert "File too large" in done.stderr
    assert path.read_bytes() == before
    assert sorted(one.name for one in program.parent.iterdir()) == sorted([path.name, "program.py"])


@pytest.mark.parametrize("printing", ["lambda *words, **options: None", "None"])
def test_a_program_that_prints_in_its_own_way_has_its_report(printing: str, program: Path) -> None:
    program.write_text(f"{PROGRAM}import builtins\nbuiltins.print = {printing}\n")
    done = ctxalloc("--report", program, cwd=program.parent)
    assert (done.returncode, done.stdout) == (0, "printed\n")
    assert "arrays: 781 KiB at the peak" in done.stderr
    done = ctxalloc("--report=json", "--output", "out", program, cwd=program.parent)
    assert json.loads((program.parent / "out").read_text())["parts"] == {}, done.stderr


def printed(*words: str | Path, cwd: Path, status: int = 0) -> bytes:
    """What a command of recordings prints; it must leave no file there."""
    before = sorted(cwd.iterdir())
    command = [sys.executable, "-m", "ctxalloc", *map(str, words)]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, cwd=cwd)
    assert done.returncode == status, done.stderr
    assert sorted(cwd.iterdir()) == before
    return done.stdout if status == 0 else done.stderr


def test_a_line_as_the_output_is_standard_output(tmp_path: Path) -> None:
    made = recordings.Script()
    for _ in range(3):
        made.end(made.begin("GET /report"))
    path = made.write(tmp_path / "service.trace")
    export = ["trace", "export", path, "--to", "rmm.csv", "--output"]
    assert printed(*export, "-", cwd=tmp_path).startswith(b"Thread,Time,")
    assert printed(*export, "/dev/stdout", cwd=tmp_path) == printed(*export, "-", cwd=tmp_path)
    recommend = ["recommend", path, "--rounds", "1", "--strategy", "default,pool", "--output", "-"]
    page = printed(*recommend, cwd=tmp_path).strip()
    assert page.lower().startswith(b"<!doctype html>")
    assert page.endswith(b"</html>")
    said = b"ctxalloc recommend: --json goes to standard output, where --output has the page go: give that a file\n"
    assert printed(*recommend, "--json", cwd=tmp_path, status=2) == said
    ran = printed("run", "--report=json", "--output", "-", "-c", "print('its own')", cwd=tmp_path)
    first, _, report = ran.partition(b"\n")
    assert first == b"its own"
    assert "sites" in json.loads(report)


def test_whoever_reads_enough_of_an_export_ends_it_quietly(tmp_path: Path) -> None:
    made = recordings.Script()
    for number in range(20_000):
        made.end(made.begin(f"GET /{number % 100}"))
    path = made.write(tmp_path / "service.trace")
    command = [sys.executable, "-m", "ctxalloc", "trace", "export", path, "--to", "perfetto", "--output", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        assert export.stdout is not None
        assert export.stderr is not None
        assert export.stdout.read(1) == b"{"
        export.stdout.close()
        assert export.stderr.read() == b""
    assert export.returncode == 0
