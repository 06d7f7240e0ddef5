"""What this CPython does not survive: works are done again and again, each time without another one of their blocks.

    python3.13 scripts/refuse_each_block.py
    python3.13 scripts/refuse_each_block.py 17 42    # the work 17 alone, and of its blocks the one with the number 42

The works are in `refuse_each_block.txt`: what uses each of Python's instructions, and much of the standard library.
Each attempt is a process of its own, forked when the work has been done a few times. One that ends by a signal is told
of: the work's number, those of its blocks, and its text. The second way, under `gdb -ex "set follow-fork-mode child"`,
shows which function went on without the block: `src/python/fragile.rs` has to know it. Works that this CPython cannot
compile are left out. It needs no ctxalloc.
"""

import _testcapi
import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

MODULES = """ast array asyncio base64 binascii bisect codecs collections configparser contextlib contextvars copy csv
ctypes dataclasses datetime decimal difflib email enum fractions functools hashlib heapq hmac html http.cookies inspect
io ipaddress itertools json logging math operator os pathlib pickle pprint queue random re reprlib secrets select shlex
socket sqlite3 statistics string struct subprocess sys textwrap threading time tomllib traceback types typing
unicodedata urllib.parse uuid weakref xml.etree.ElementTree zlib argparse"""

AROUND = """
import xml.etree.ElementTree as ET
def F(*args, k=None): return args, k
class O:
    def m(self): return self
class P:
    __match_args__ = ("x", "y")
    def __init__(self, x, y): self.x = x; self.y = y
class CM:
    def __init__(self, a): self.a = a
    def __enter__(self): return self.a
    def __exit__(self, *e): return None
class ACM(CM):
    async def __aenter__(self): return self.a
    async def __aexit__(self, *e): return None
NT = collections.namedtuple("NT", "x y")
@dataclasses.dataclass
class DC:
    x: object
    y: object
def run(c):
    try:
        while True: c.send(None)
    except StopIteration as e: return e.value
def deep(n): return [deep(n - 1)] if n else []
CODE = compile("1 + 2", "f", "eval")
CACHED = functools.lru_cache(None)(lambda x: x)
CACHED2 = functools.lru_cache(5)(lambda x: x)
class FL(enum.Flag):
    A = 1
    B = 2
class EN(enum.Enum):
    A = "x"
    B = "y"
LOG = logging.Logger("l"); LOG.addHandler(logging.StreamHandler(io.StringIO()))
"""

MAX_BLOCKS = 1500
"""Of one work. So many that go well in a row are the last ones:"""
QUIET = 40
SECONDS = 3
"""What takes longer has not ended: it is told of, too."""


class Given:
    """What a work is given."""


def attempt(work, given, number):
    """In a process of its own: does the work once without this block, and then as ever."""
    signal.alarm(SECONDS)
    is_whole = False
    _testcapi.set_nomemory(number, number + 1)
    try:
        work(*given)
        is_whole = True
    except BaseException:  # noqa: BLE001, S110 - whatever it is, it is no signal
        pass
    _testcapi.remove_mem_hooks()
    gc.collect()
    for _ in range(3):
        with contextlib.suppress(BaseException):
            work(*given)
    gc.collect()
    os._exit(0 if is_whole else 3)


def ended(function, *arguments):
    """How a forked process ends that calls this."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        finally:
            os._exit(4)
    return os.waitpid(child, 0)[1]


def tries(number, text, only):
    """Tries this work, and tells of it."""
    names = {"__name__": "__main__"}
    for module in MODULES.split():
        with contextlib.suppress(ImportError):  # `tomllib` and others may be missing
            names[module.partition(".")[0]] = __import__(module)
    exec(AROUND, names)  # noqa: S102 - what the works use
    vars(sys.modules["__main__"]).update({name: names[name] for name in ("O", "P", "DC", "NT")})
    try:
        exec(text, names)  # noqa: S102 - a work, from the file beside this one
    except SyntaxError:
        os._exit(0)
    work, given = names["t"], (Given(), Given())
    for _ in range(12):
        work(*given)
    gc.collect()
    gc.freeze()
    gc.disable()
    lost, quiet = [], 0
    for block in range(MAX_BLOCKS) if only is None else [only]:
        status = ended(attempt, work, given, block)
        if os.WIFSIGNALED(status):
            lost.append(block)
        quiet = quiet + 1 if status == 0 else 0
        if quiet > QUIET:
            break
    if lost:
        print(f"{number}: blocks {lost} of\n{text}\n", flush=True)
    os._exit(bool(lost))


def main():
    """Tries all works, or the one of the command line."""
    works = (Path(__file__).with_suffix(".txt")).read_text(encoding="utf-8").strip().split("\n\n")
    asked = [int(word) for word in sys.argv[1:]]
    lost = 0
    for number, text in enumerate(works):
        if asked[:1] in ([], [number]):
            lost += ended(tries, number, text, asked[1] if asked[1:] else None) != 0
    print(f"{sys.version.split()[0]}: {len(works)} works, {lost} of them not survived")


main()
