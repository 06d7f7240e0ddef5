"""CPython's interpreter of programs: contextvars, asyncio, threads and executors, on either selection."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from typing import Final

from language import Node
from line import Hub, Pool
from selection import Selection
from steps import Step
from words import Words

THREADS_INHERIT: Final = bool(getattr(sys.flags, "thread_inherit_context", False))
"""Python 3.14's flag, on in free-threaded builds: a plain thread starts with a copy of its starter's context."""


class Interpreter:
    """An event loop and a pool, used for program after program."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool = Pool(3)
        self.loop.set_default_executor(self.pool)

    def run(self, program: Node, selection: Selection) -> str:
        """The trace of a program."""
        count = [0]
        root = Step(program, count)
        run = Words(selection, count[0])
        hub = Hub(self.loop, contextvars.Context(), self.pool)
        self.loop.run_until_complete(run.main(root, hub))
        return "".join(run.trace)

    def close(self) -> None:
        """Ends the loop, what still runs on it after an error, and the pool's threads."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.wait(left) if left else asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.pool.shutdown()
        self.loop.close()
