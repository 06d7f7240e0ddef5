"""A handler written in Cython: the other side of `cython_handler.pyx`, which needs `ctxalloc.h` and nothing of Rust.

Needs Cython and a C compiler (`cc`, or `$CC`). It prints::

    <ctxalloc.Handler "lines, by Cython": foreign handler, version 1>
    in the scope: 2 blocks alive, in lines, by Cython
    selected by Cython, for this task only: lines, by Cython
    afterwards: 1 block alive, the next array lives in default_allocator
    at the end: 0 blocks alive
"""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np

import ctxalloc


def compiled() -> ModuleType:
    """Translate, compile and import the Cython side; a project has its build system do so."""
    source = Path(__file__).with_suffix(".pyx")
    with tempfile.TemporaryDirectory() as folder:
        in_c, library = Path(folder, "lines.c"), Path(folder, "cython_handler.so")
        subprocess.run([sys.executable, "-m", "cython", "-3", "-o", in_c, source], check=True, capture_output=True)
        includes = [f"-I{path}" for path in (sysconfig.get_path("include"), ctxalloc.get_include())]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-w", *includes, "-o", library, in_c], check=True)
        spec = importlib.util.spec_from_file_location("cython_handler", library)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def main() -> None:
    lines = compiled()
    handler = ctxalloc.handler("lines, by Cython")
    print(re.sub(r" at 0x[0-9a-f]+", "", repr(handler)))  # without the address of the struct
    with ctxalloc.use(handler):
        kept, dropped = np.ones(1000), np.zeros(1000)
        print(f"in the scope: {lines.blocks_alive()} blocks alive, in {ctxalloc.get_handler_name(kept)}")
    del dropped

    async def task() -> str:
        lines.select()
        await asyncio.sleep(0)
        return ctxalloc.current().name

    print(f"selected by Cython, for this task only: {asyncio.run(task())}")
    print(f"afterwards: {lines.blocks_alive()} block alive, the next array lives in {ctxalloc.current().name}")
    del kept
    print(f"at the end: {lines.blocks_alive()} blocks alive")


if __name__ == "__main__":
    main()
