"""Starts the service as a process of its own and stops it again, whatever happens in between.

The service ends when its standard input closes, so it cannot outlive a demo that is killed. It has a process group of
its own: Ctrl-C reaches the demo alone, which then stops it in order. Neighbours: ``server`` is what
runs, ``demo`` uses it.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .app import Switcher
from .routes import Table


class LaunchError(RuntimeError):
    """The service did not start; it said why on standard error."""


@asynccontextmanager
async def launched(table: Table, switcher: Switcher) -> AsyncIterator[str]:
    """The address of a service that runs while the context lasts. LaunchError."""
    package = __package__ or ""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"{package}.server", "--port=0", "--until-eof", f"--switcher={switcher}"),
        *table.options(),
        cwd=Path(__file__).parents[1 + package.count(".")],
        stdin=PIPE,
        stdout=PIPE,
        process_group=0,
    )
    try:
        yield await _address(process)
    finally:
        await _stop(process)


async def _address(process: Process) -> str:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
    except TimeoutError as error:
        raise LaunchError("the service did not say within 60 s where it listens") from error
    if not line:
        raise LaunchError(f"the service ended before it listened, with exit status {await process.wait()}")
    return line.decode().strip()


async def _stop(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except BaseException as error:
        # Too slow, or a second Ctrl-C: kill it.
        if process.returncode is None:
            process.kill()
            await process.wait()
        if not isinstance(error, TimeoutError):
            raise
