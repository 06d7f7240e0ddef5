"""Programs for whole requests: each runs in a process of its own that has the library before malloc."""

import functools
import os
import subprocess
import sys
import textwrap

import pytest

from ctxalloc import _native

needs_library = pytest.mark.skipif(_native._whole_library() is None, reason="Linux with glibc, and the feature `whole`")

START = """
import asyncio, collections, contextlib, contextvars, ctypes, gc, io, json, os, pickle, random, re, sqlite3, sys
import threading, time, zlib
import numpy, ctxalloc
from ctxalloc import MiB, KiB
libc, without_gil = ctypes.PyDLL(None), ctypes.CDLL(None)  # a call of the second lets go of the GIL
for one in libc, without_gil:
    one.malloc.restype = one.calloc.restype = one.realloc.restype = ctypes.c_void_p
    one.aligned_alloc.restype = one.valloc.restype = one.reallocarray.restype = ctypes.c_void_p
    one.malloc.argtypes = [ctypes.c_size_t]
    one.calloc.argtypes = one.aligned_alloc.argtypes = [ctypes.c_size_t] * 2
    one.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    one.reallocarray.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    one.free.argtypes = one.malloc_usable_size.argtypes = [ctypes.c_void_p]
    one.malloc_usable_size.restype = ctypes.c_size_t
"""


@functools.cache
def library_path() -> str:
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def run(
    program: str, *arguments: str, preload: bool = True, timeout: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    preloaded = {"LD_PRELOAD": library_path()} if preload else {}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONMALLOC": "", **preloaded, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check(program: str, *arguments: str, timeout: float = 200, **environment: str) -> str:
    """What the program prints. It must end well."""
    ended = run(program, *arguments, timeout=timeout, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
