"""The service on uvicorn: ``python -m examples.service.server --port 8000 --route /blur=aligned64``.

Says on standard output where it listens. With ``--until-eof`` it stops when its standard input closes: a service that
another process started ends with it, however that one ends. Neighbours: ``app`` is what it serves, ``demo`` starts it.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from typing import get_args

import uvicorn

from .app import Switcher, build_app
from .routes import RouteError, Table, add_options, from_options


async def serve(table: Table, switcher: Switcher, listening: socket.socket, *, until_eof: bool) -> None:
    """Answer requests until SIGINT, SIGTERM or, if wanted, the end of standard input."""
    app = build_app(table, switcher=switcher)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, loop="asyncio")
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    if until_eof:

        def readable() -> None:
            if not os.read(sys.stdin.fileno(), 1):
                loop.remove_reader(sys.stdin)
                server.should_exit = True

        loop.add_reader(sys.stdin, readable)
    await server.serve(sockets=[listening])


def main() -> int:
    """The exit status: 2 if the command line names what does not exist."""
    parser = argparse.ArgumentParser(prog="python -m examples.service.server", description="The picture service.")
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1; 0 takes a free one (%(default)s)")
    parser.add_argument("--switcher", choices=get_args(Switcher), default="ctxalloc", help="how handlers are selected")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input closes")
    add_options(parser)
    options = parser.parse_args()
    try:
        table = from_options(options)
    except RouteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        listening = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on port {options.port} of 127.0.0.1: {error}; 0 takes a free one", file=sys.stderr)
        return 2
    with listening, contextlib.suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        asyncio.run(serve(table, options.switcher, listening, until_eof=options.until_eof))
    return 0


if __name__ == "__main__":
    sys.exit(main())
