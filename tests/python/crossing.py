"""A coroutine that tells what it finds: for tests of the crossings between Python and Rust."""

import asyncio
import contextvars

from ctxalloc import current

witness = contextvars.ContextVar("witness", default="nobody")


async def tells() -> tuple[str, str]:
    """The handler and the witness."""
    await asyncio.sleep(0)
    return current().name, witness.get()
