"""``%load_ext ctxalloc`` and ``%%ctxalloc``: what the arrays of a cell took, in IPython and Jupyter."""

import contextlib
import importlib
import sys
from typing import Any

from ctxalloc import _native
from ctxalloc._errors import UnknownHandlerError
from ctxalloc._profile import profiled


def load(shell: Any) -> None:
    """Adds the magic to a shell."""
    arguments: Any = importlib.import_module("IPython.core.magic_arguments")
    usage_error: type[Exception] = importlib.import_module("IPython.core.error").UsageError
    parser = arguments.MagicArgumentParser("%%ctxalloc", description="Runs the cell and reports its arrays.")
    parser.add_argument("--handler", metavar="NAME", help="select this handler for the cell: pool, hugepages, ...")
    parser.add_argument("--sites", metavar="N", type=int, default=10, help="how many sites it shows (default: 10)")

    def magic(line: str, cell: str) -> None:
        options = parser.parse_argstring(line)
        if options.sites < 1:
            raise usage_error(f"--sites {options.sites}: give 1 or more")
        try:
            scope = contextlib.nullcontext() if options.handler is None else _native.use(options.handler)
        except UnknownHandlerError as error:
            raise usage_error(f"--handler {options.handler}: {error}") from None
        with profiled() as profile, scope:
            shell.run_cell(cell)  # which shows what the cell returns, and its error
        profile.print_sums(sys.stdout)
        profile.print_handlers(sys.stdout)
        profile.print_sites(sys.stdout, options.sites)

    magic.__doc__ = parser.format_help()
    shell.register_magic_function(magic, "cell", "ctxalloc")


def unload(shell: Any) -> None:
    """Takes it away."""
    shell.magics_manager.magics["cell"].pop("ctxalloc", None)
