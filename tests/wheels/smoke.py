"""What an installed wheel must be able to do, in a few seconds: scripts/check_wheels.py runs it with each one.

It needs the package and NumPy, nothing else, and ends with a line that names the machine.
"""

import asyncio
import os
import subprocess
import sys
import sysconfig
import threading

import numpy as np

import ctxalloc

SOABI = str(sysconfig.get_config_var("SOABI"))
TOO_LARGE = "import ctxalloc\nwith ctxalloc.request(whole=True, limit_bytes=1 << 20): bytearray(5 << 20)"


def each_handler_serves() -> list[str]:
    """Arrays of every handler that is there from the start, of sizes from a byte to pages."""
    served = []
    for handler in ctxalloc.handlers():
        with ctxalloc.use(handler):
            try:
                arrays = [np.zeros(size, np.uint8) for size in (1, 100, 5000, 3 << 20)]
            except MemoryError:
                assert handler.name == "locked", handler  # the machine's limit may leave no room
                continue
        for array in arrays:
            assert ctxalloc.handler_of(array) is handler, handler
            assert not array.any()
            array[:] = 255
        served.append(handler.name)
    assert {"default_allocator", "system", "aligned64", "pool", "hugepages", "tracked"} <= set(served), served
    return served


def a_limit_refuses() -> None:
    """One request fails and another does not; the account is even at the end."""
    request = ctxalloc.request(limit_bytes=1 << 20, name="greedy")
    with request:
        kept = np.zeros(1000)
        try:
            np.zeros(1 << 20)
        except MemoryError:
            pass
        else:
            raise AssertionError("the limit did not hold")
    assert request.stats.live_bytes == kept.nbytes, request.stats
    del kept
    assert request.stats.live_bytes == 0, request.stats


async def tasks_keep_their_own() -> None:
    """A selection per task, across an await."""

    async def task(name: str) -> None:
        async with ctxalloc.use(name):
            await asyncio.sleep(0)
            array = np.ones(100)
            elsewhere = await asyncio.to_thread(np.ones, 100)
        assert ctxalloc.get_handler_name(array) == ctxalloc.get_handler_name(elsewhere) == name

    await asyncio.gather(*(task(name) for name in ("pool", "aligned64", "system") for _ in range(20)))


def threads_free_what_others_made() -> None:
    """Blocks of the pool that are made here and freed there."""
    with ctxalloc.use("pool"):
        arrays = [np.full(size, size) for size in range(1, 2000)]
    thirds = [arrays[offset::3] for offset in range(3)]
    del arrays

    def check_and_free(mine: list[np.ndarray]) -> None:
        while mine:
            array = mine.pop()
            assert (array == len(array)).all()

    threads = [threading.Thread(target=check_and_free, args=(third,)) for third in thirds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(thirds)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What another Python like this one says."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False, timeout=300
    )


def a_whole_request_refuses() -> str:
    """Python's own memory, by the library that a wheel for glibc brings; with musl there is none, and a reason."""
    library = python("-m", "ctxalloc", "whole")
    refused = python("-c", TOO_LARGE, LD_PRELOAD=library.stdout.strip())
    has_library = "gnu" in SOABI
    assert has_library == (library.returncode == 0), library
    assert ("BudgetExceeded" if has_library else "RuntimeError") in refused.stderr, refused
    return "whole requests" if has_library else "no whole requests"


def main() -> None:
    """Run all of it, and the command line once."""
    served = each_handler_serves()
    a_limit_refuses()
    asyncio.run(tasks_keep_their_own())
    threads_free_what_others_made()
    ctxalloc.trim()
    said = python("-m", "ctxalloc", "info")
    assert "pool" in said.stdout, said
    whole = a_whole_request_refuses()
    print(f"smoke: {len(served)} handlers, {whole}, {SOABI}, NumPy {np.__version__}")


if __name__ == "__main__":
    main()
