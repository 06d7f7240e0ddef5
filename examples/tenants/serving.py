"""What both services have: their tenants' budgets, and a server that ends when its standard input closes.

``SERVICE`` has 320 MiB. Half of it is the patient tenant's own; the other half is for whoever comes, and the greedy
tenant has to do with that.
"""

import asyncio
import os
import socket
import sys
from typing import Any, Final

import uvicorn

import ctxalloc
from ctxalloc import Budget, MiB
from ctxalloc.asgi import Scope

SERVICE: Final = Budget(320 * MiB, name="service")
GUESTS: Final = Budget(160 * MiB, parent=SERVICE, name="guests")
TENANTS: Final = {
    "patient": Budget(160 * MiB, parent=SERVICE, name="patient"),
    "greedy": Budget(parent=GUESTS, name="greedy"),
}
OTHERS: Final = Budget(parent=GUESTS, name="others")
"""Of whoever does not say who they are."""


def tenant_of(scope: Scope) -> Budget:
    """Whose request it is."""
    names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tenant"]
    return TENANTS.get(names[0], OTHERS) if len(names) == 1 else OTHERS


def run(application: Any) -> None:
    """Serves on a free port, which standard output says, until standard input ends."""
    ctxalloc.configure(decay_seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"{os.getpid()} http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        asyncio.run(_serve(application, listening))


async def _serve(application: Any, listening: socket.socket) -> None:
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=2))

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        server.should_exit = True

    asyncio.get_running_loop().add_reader(sys.stdin, stop)
    await server.serve(sockets=[listening])
