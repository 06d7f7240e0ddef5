"""``ctxalloc run`` against ``python``: the same program, the same output, the same end, whatever the program does."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_numpy
PROGRAMS = {
    "excepthook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("its own hook:", kind.__name__, error)
        raise ValueError("x")
        """,
    "excepthook that fails": """
        import sys
        def hook(*_): raise RuntimeError("worse")
        sys.excepthook = hook
        raise ValueError("x")
        """,
    "a file beside it": """
        import os, pathlib
        os.chdir("/")
        print(pathlib.Path(__file__).exists(), __file__, sorted(globals()), __spec__, __package__, type(__builtins__))
        """,
    "thread that outlives the script": """
        import atexit, sys, threading, time
        def late():
            time.sleep(0.2)
            print(sys.modules["__main__"].__dict__ is globals())
        threading.Thread(target=late).start()
        atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
        """,
    "daemon and a pool that nobody shuts down": """
        import threading, time
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        print(list(pool.map(str, range(3))))
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        """,
    "threads with a run of their own": """
        import gc, threading, weakref
        class Own(threading.Thread):
            def run(self): print("a method")
        class Slots(threading.Thread):
            __slots__ = ("more",)
        other = threading.Thread()
        other.run = lambda: print("an attribute")
        for thread in (Own(), Slots(target=print, args=("slots",)), other, threading.Timer(0, print, ("timer",))):
            thread.start()
            thread.join()
            print("run" in thread.__dict__)
        gc.disable()
        ended = weakref.ref(thread)
        del thread
        print(ended())
        """,
    "modules are found where python finds them": "import sys; print(sys.path, sys.argv)",
    "syntax": "a b c",
    "an encoding of its own": "# coding: latin-1\nprint(len('\N{LATIN SMALL LETTER E WITH ACUTE}'))",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt of another class": "class Stop(KeyboardInterrupt): pass\nraise Stop",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "exit in a thread": "import sys, threading; t = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()",
    "exit at once": "import os; os._exit(9)",
    "exit with a text": "import sys; sys.exit((1, 'two'))",
    "exit with a large number": "import sys; sys.exit(257)",
    "recursion": "import sys; sys.tracebacklimit = 1\ndef f(): f()\nf()",
    "a group": "raise ExceptionGroup('g', [ValueError('1')])",
    "pickles": """
        import pickle
        class Kept: pass
        print(type(pickle.loads(pickle.dumps(Kept()))) is Kept)
        """,
    "processes": """
        import multiprocessing
        def twice(n): return 2 * n
        if __name__ == "__main__":
            for how in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(how).Pool(2) as pool:
                    print(how, pool.map(twice, [1, 2]))
        """,
    "fork": """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    "standard input": "import sys; print(sys.stdin.read())",
    "closes its outputs": "import sys; sys.stdout.close(); sys.stderr.close()",
    "asyncio": """
        import asyncio, numpy as np
        async def main():
            print(await asyncio.to_thread(np.ones, 3), await asyncio.gather(*(asyncio.sleep(0, n) for n in range(3))))
        asyncio.run(main())
        """,
}


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text).lstrip(), encoding="latin-1")
    return path


def run(folder: Path, *words: str, given: str = "given") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, input=given, timeout=300, check=False
    )
    # The frames that run the program are on the same stack.
    return done.returncode, done.stdout, re.sub(r"repeated \d+ more", "repeated", done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_and_ends_as_under_python(program: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder, PROGRAMS[program])
    asked = ("folder/program.py", "--", "-x", "--", "--report")
    plain = run(tmp_path, *asked)
    assert run(tmp_path, "-m", "ctxalloc", "run", *asked) == plain
    status, out, said = run(tmp_path, "-m", "ctxalloc", "run", "--report", "--limit", "1GB", *asked)
    said, _, report = said.partition("\nctxalloc: folder/program.py")
    assert (status, out, said) == plain
    ends_itself = program in {"signal", "exit at once"}
    assert bool(report) != ends_itself
    assert "ctxalloc: " not in report, "there are two"


@pytest.mark.parametrize(
    "asked", [("-m", "package"), ("-m", "package.part"), ("package",), ("package/",), ("package.zip",), ("-",)]
)
def test_packages_archives_and_standard_input_run_too(asked: tuple[str, ...], tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    text = (
        "import sys\n"
        "print(__name__, __package__, globals().get('__file__'), __spec__ and __spec__.name, sys.path[0], sys.argv)\n"
    )
    for name in ("__main__.py", "part.py"):
        (package / name).write_text(text)
    (package / "__init__.py").write_text("import sys; print(__name__, sys.argv)\n")
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    plain = run(tmp_path, *asked, "-x", given=text)
    assert plain[0] == 0, plain
    assert run(tmp_path, "-m", "ctxalloc", "run", *asked, "-x", given=text) == plain
    status, out, said = run(tmp_path, "-m", "ctxalloc", "run", "--report", *asked, "-x", given=text)
    assert (status, out, said.partition("\nctxalloc: ")[0]) == plain


@pytest.mark.parametrize("asked", ["package", "package.zip"])
def test_a_folder_is_on_a_safe_path_too(asked: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    texts = {"__main__.py": "import sys, beside; print(sys.path)", "beside.py": ""}
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for name, text in texts.items():
            (package / name).write_text(text)
            archive.writestr(name, text)
    plain = run(tmp_path, "-P", asked)
    assert plain[0] == 0, plain
    assert run(tmp_path, "-P", "-m", "ctxalloc", "run", asked) == plain


def test_the_console_script_adds_no_folder_to_the_path(tmp_path: Path) -> None:
    written(tmp_path, "import sys; print(sys.path)")
    command = [Path(sys.executable).parent / "ctxalloc", "run", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == run(tmp_path, "program.py")[1]


CODES = {
    "names": "import sys; print(sorted(globals()), __spec__, __package__, sys.path, sys.argv, __name__)",
    "an error": "def f():\n    return 1 / 0\nf()",
    "another's error, whose lines are nowhere": "exec(compile('1 / 0', '<string>', 'exec'))",
    "syntax": "a b c",
    "indented": "    print(1)\n    if 2:\n        print(3)",
    "a minus": "-1",
    "an option of ours": "--report",
    "nothing": "",
    "an exit": "import sys; sys.exit('no')",
    "what cannot be decoded": b"print('\xff')",
    "pickles": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
}


@pytest.mark.parametrize("name", CODES)
def test_code_runs_and_ends_as_under_python(name: str, tmp_path: Path) -> None:
    code = CODES[name]
    asked = ("-c", os.fsdecode(code) if isinstance(code, bytes) else code, "-x", "--", "--report", "-c")
    plain = run(tmp_path, *asked)
    status, out, said = run(tmp_path, "-m", "ctxalloc", "run", "--report", "--limit", "1GB", *asked)
    said, _, report = said.partition("\nctxalloc: -c -x -- --report -c")
    assert (status, out, said) == plain
    assert bool(report) == (name != "what cannot be decoded")


def test_code_may_follow_its_option_at_once_and_be_compared(tmp_path: Path) -> None:
    ours = ("-m", "ctxalloc", "run")
    assert run(tmp_path, *ours, "-cimport sys; print(sys.argv)", "a") == (0, "['-c', 'a']\n", "")
    status, out, said = run(tmp_path, *ours, "--compare", "--rounds", "1", "-c", "print(1)")
    assert (status, out, said.partition(":")[0].strip()) == (0, "1\n", "-c"), said
    status, _, said = run(tmp_path, *ours, "-c")
    assert status == 2
    assert "argument -c: expected one argument" in said


REFUSED = [
    *(("-m", name) for name in ("nothing", "http", "json.nothing", "math", "", ".part", "a..b", "json.", "math.x")),
    *(("-m", name) for name in ("__main__", "beside.py", "namespace", "json.__main__.x")),
    *((name,) for name in ("nothing.py", "nothing.pyc", "namespace", "namespace/", "no/x", "beside.py/x", "", "x.zip")),
]


@pytest.mark.long
@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: " ".join(asked) or "nothing")
def test_what_python_refuses_ends_as_under_python(asked: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "namespace").mkdir()
    (tmp_path / "beside.py").touch()
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("other.py", "")
    plain = run(tmp_path, *asked)
    assert plain[0] != 0
    assert run(tmp_path, "-m", "ctxalloc", "run", "--report", "--limit", "1GB", *asked) == plain


def test_a_module_imported_for_ctxalloc_alone_runs_without_a_warning(tmp_path: Path) -> None:
    asked = ("-m", "concurrent.futures.thread")
    plain = run(tmp_path, "-W", "error", *asked)
    assert plain[0] == 0, plain
    assert run(tmp_path, "-W", "error", "-m", "ctxalloc", "run", *asked) == plain


def test_what_a_late_thread_makes_is_reported(tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        import threading, time
        import numpy as np
        def late():
            time.sleep(0.2)
            np.ones(1_000_000)
        threading.Thread(target=late).start()
        """,
    )
    assert "7.63 MiB at the peak" in run(tmp_path, "-m", "ctxalloc", "run", "--report", "program.py")[2]


def test_compare_gives_a_file_to_each_run(tmp_path: Path) -> None:
    written(tmp_path, "import sys; assert sys.stdin.read() == 'given', 'nothing to read'")
    (tmp_path / "given").write_text("given")
    with (tmp_path / "given").open() as given:
        command = [sys.executable, "-m", "ctxalloc", "run", "--compare", "--rounds", "2", "program.py"]
        done = subprocess.run(command, cwd=tmp_path, stdin=given, capture_output=True, text=True, check=False)
    assert (done.returncode, "page faults" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("program", sorted((Path(__file__).parents[2] / "examples" / "compare").glob("*.py")))
def test_the_programs_of_the_readmes_table_print_the_same(program: Path, tmp_path: Path) -> None:
    plain = run(tmp_path, str(program), "100")
    assert (plain[0], plain[2]) == (0, "")
    status, out, said = run(tmp_path, "-m", "ctxalloc", "run", "--handler", "pool", "--report", str(program), "100")
    assert (status, out) == plain[:2]
    assert "default_allocator" not in said.partition("By handler")[2], "an array was not the pool's"
    compared = run(tmp_path, "-m", "ctxalloc", "run", "--compare", "--rounds", "1", str(program), "100")
    assert compared[:2] == plain[:2]


# A shell starts what it runs in the background with this signal ignored, and its children inherit that.
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


def test_what_ends_compare_ends_its_program(tmp_path: Path) -> None:
    written(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "ctxalloc", "run", "--compare", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as compared:
        assert compared.stdout is not None
        pid = int(compared.stdout.readline())
        compared.terminate()
        assert compared.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("text", ["raise KeyboardInterrupt", INTERRUPTED], ids=["raised", "signal"])
def test_compare_tells_of_an_interrupt(text: str, tmp_path: Path) -> None:
    written(tmp_path, text)
    status, _, said = run(tmp_path, "-m", "ctxalloc", "run", "--compare", "program.py")
    assert status == 128 + signal.SIGINT
    assert "the run with default_allocator ended with signal SIGINT" in said
