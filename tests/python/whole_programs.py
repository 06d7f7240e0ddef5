"""Programs for whole requests: each runs in a process of its own that has the library before malloc."""

import os
import subprocess
import sys
import textwrap

import pytest

from ctxalloc import _native

needs_library = pytest.mark.skipif(_native._whole_library() is None, reason="Linux with glibc, and the feature `whole`")

START = """
import asyncio, ctypes, gc, json, os, pickle, random, sys, threading
import numpy, ctxalloc
from ctxalloc import MiB, KiB
libc = ctypes.PyDLL(None)  # with the GIL
libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
"""


def library_path() -> str:
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def check(program: str, *arguments: str, timeout: float = 200, **environment: str) -> str:
    """What the program prints. It must end well."""
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONMALLOC": "", "LD_PRELOAD": library_path(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
