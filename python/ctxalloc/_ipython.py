"""``%load_ext ctxalloc`` and ``%%ctxalloc``: what the arrays of a cell took, in IPython and Jupyter."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import TracebackType
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
        with profiled() as profile, scope, _shows_no_error(shell):
            result = shell.run_cell(cell)  # which shows what the cell returns
        profile.print_sums(sys.stdout)
        profile.print_handlers(sys.stdout)
        profile.print_sites(sys.stdout, options.sites)
        raised: BaseException | None = result.error_before_exec or result.error_in_exec
        if raised is not None:  # the cell with the magic fails by it, and shows it
            __tracebackhide__ = "__ipython_bottom__"
            # That of an error in the cell's syntax has IPython's frames only.
            ran = result.error_before_exec is None
            raise raised.with_traceback(_of_the_cell(raised.__traceback__) if ran else None)

    magic.__doc__ = parser.format_help()
    shell.register_magic_function(magic, "cell", "ctxalloc")


@contextlib.contextmanager
def _shows_no_error(shell: Any) -> Iterator[None]:
    """What a cell within another one raises is shown once, by the outer one."""
    names = ("showtraceback", "showsyntaxerror", "showindentationerror")
    own, shell.custom_exceptions = shell.custom_exceptions, ()
    set_before = {name: vars(shell)[name] for name in names if name in vars(shell)}
    for name in names:
        setattr(shell, name, lambda *_args, **_options: None)
    try:
        yield
    finally:
        shell.custom_exceptions = own
        for name in names:
            delattr(shell, name)
        for name, function in set_before.items():
            setattr(shell, name, function)


def _of_the_cell(trace: TracebackType | None) -> TracebackType | None:
    """Without IPython's frames, which end with the one that says so."""
    begin, rest = trace, trace
    while rest is not None:
        if rest.tb_frame.f_locals.get("__tracebackhide__") == "__ipython_bottom__":
            begin = rest.tb_next
        rest = rest.tb_next
    return begin or trace


def unload(shell: Any) -> None:
    """Takes it away."""
    shell.magics_manager.magics["cell"].pop("ctxalloc", None)
