"""The CUDA driver of tests/cuda/driver.c, built by the system's compiler and loaded in place of NVIDIA's."""

import atexit
import ctypes
import functools
import gc
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ctxalloc import _native, cuda

SOURCE = Path(__file__).parent.parent / "cuda" / "driver.c"
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1", "-g", "-shared", "-fPIC", "-pthread")


@functools.cache
def library(*macros: str) -> str:
    """The path of the library; a process that is given it in CTXALLOC_FAKE_LIBRARY builds none."""
    if not macros and "CTXALLOC_FAKE_LIBRARY" in os.environ:
        return os.environ["CTXALLOC_FAKE_LIBRARY"]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        pytest.skip("there is no C compiler for the driver")
    folder = tempfile.mkdtemp(prefix="ctxalloc-cuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/libcuda.so.1"
    subprocess.run([*compiler, *FLAGS, *(f"-D{macro}" for macro in macros), "-o", path, SOURCE], check=True)
    return path


class Fake:
    """The numbers of the driver that is loaded in this process, and its copies."""

    def __init__(self, path: str) -> None:
        _native.cuda_load(path)
        self._c = ctypes.CDLL(path)
        self._c.fake_get.restype = ctypes.c_long
        self._c.fake_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self._c.fake_copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._c.fake_run.argtypes = (ctypes.c_long,)

    def get(self, name: str) -> int:
        """A number of the driver's."""
        return int(self._c.fake_get(name.encode()))

    def set(self, **numbers: int) -> None:
        """Change some."""
        for name, value in numbers.items():
            self._c.fake_set(name.encode(), value)

    def copy(self, array: np.ndarray) -> None:
        """Queue a copy of a contiguous array's bytes, which must not change until it is completed."""
        self._c.fake_copy(array.__array_interface__["data"][0], array.nbytes)

    def run(self, count: int = 1 << 30) -> None:
        """Complete so many copies."""
        self._c.fake_run(count)

    def settle(self) -> None:
        """Complete all, and bring the driver back to what it is at first."""
        self.set(refuse_register=0, refuse_alloc=0, progress=1 << 30, dead=0, capturing=0, query_fails=0)
        gc.collect()
        self.run()
        cuda.settle()
        cuda.settle()


@functools.cache
def fake() -> Fake:
    """The driver of this process, loaded at its first use."""
    return Fake(library())
