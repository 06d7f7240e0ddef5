"""Programs that run in a process of their own, with the library before malloc."""

import functools
import os
import subprocess
import sys
import textwrap

START = """
import asyncio, gc, io, json, os, random, sys, tempfile, threading, time
import numpy, ctxalloc
from ctxalloc import MiB, KiB

def settled(number, below, seconds=20):
    # What other threads are about to free: until it is gone.
    end = time.monotonic() + seconds
    while number() >= below and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert number() < below, (number(), below)

def refused(work, limit_bytes, **terms):
    # The request that `work` was refused in.
    request = ctxalloc.request(whole=True, limit_bytes=limit_bytes, **terms)
    try:
        with request:
            kept = work()
    except ctxalloc.BudgetExceeded as error:
        return request
    raise AssertionError(f"not refused: {request.stats}")
"""


@functools.cache
def library_path():
    """The library's file."""
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def run(program, *, preload="{}", timeout=300, options=(), **environment):
    """What became of it. ``preload``: LD_PRELOAD, with the library in place of ``{}``."""
    variables = {**os.environ, "PYTHONMALLOC": "", "LD_PRELOAD": preload.format(library_path()), **environment}
    command = [sys.executable, "-X", "faulthandler", *options, "-c", START + textwrap.dedent(program)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, check=False)


def check(program, **options):
    """The words that it printed. AssertionError: it failed."""
    ended = run(program, **options)
    assert ended.returncode == 0, f"{ended.returncode}\n{ended.stdout}{ended.stderr}"
    return ended.stdout.split()
