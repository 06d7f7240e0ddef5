"""What the package exports, and what a reader of `help()` finds. The stubs are compared by `make types` (stubtest)."""

import importlib.metadata
import importlib.resources
import inspect

import pytest
import subprocesses

import ctxalloc


def test_the_exports_are_the_ones_that_are_listed() -> None:
    # pytest rewrites the asserts of packages with a plugin, and adds names with an "@" to their modules.
    public = {name for name in dir(ctxalloc) if not name.startswith(("_", "@"))}
    # Modules for a framework are no exports, and are there once something has imported them.
    public -= {name for name in public - set(ctxalloc.__all__) if inspect.ismodule(getattr(ctxalloc, name))}
    assert public | {"__version__"} == set(ctxalloc.__all__)
    assert len(set(ctxalloc.__all__)) == len(ctxalloc.__all__)


def test_everything_public_is_documented_and_lives_in_the_package() -> None:
    for name in ctxalloc.__all__:
        thing = getattr(ctxalloc, name)
        if callable(thing):
            assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            assert thing.__module__ == "ctxalloc", name
            for attribute, member in vars(thing).items():
                if not attribute.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{attribute}"


def test_signatures_can_be_read() -> None:
    assert str(inspect.signature(ctxalloc.use)) == "(handler, /)"
    assert str(inspect.signature(ctxalloc.adopt)) == "(capsule, /, *, name=None)"
    assert str(inspect.signature(ctxalloc.get_handler_name)) == "(arr=None, /)"
    assert str(inspect.signature(ctxalloc.register)) == "(name, strategy, /)"


def test_sizes_are_ints_in_bytes() -> None:
    assert (ctxalloc.KiB, ctxalloc.MiB, ctxalloc.GiB) == (1 << 10, 1 << 20, 1 << 30)


def test_the_version_is_the_distributions_and_types_are_shipped() -> None:
    assert ctxalloc.__version__ == importlib.metadata.version("ctxalloc")
    files = importlib.resources.files("ctxalloc")
    assert (files / "py.typed").is_file()
    assert (files / "_native.pyi").is_file()


def test_errors_are_the_same_classes_in_every_extension_module() -> None:
    import asyncio

    import ctxalloc_example as example

    async def main() -> None:
        with pytest.raises(ctxalloc.UnknownHandlerError):
            example.array_made_in("nobody", 1)

    asyncio.run(main())
    assert issubclass(ctxalloc.UnknownHandlerError, ValueError)
    assert issubclass(ctxalloc.RegistrationError, ValueError)
    assert issubclass(ctxalloc.RustPanic, RuntimeError)


def test_importing_is_quiet_and_imports_no_asyncio_or_optional_library() -> None:
    printed = subprocesses.says(
        """
import sys, numpy
before = set(sys.modules)
import ctxalloc
new = {name.partition(".")[0] for name in set(sys.modules) - before}
optional = {"starlette", "uvicorn", "httpx", "scipy", "hypothesis", "typing_extensions"}
print(*sorted(new & {"asyncio", "logging", "concurrent", *optional}))
"""
    )
    assert printed == ""


def test_modules_most_programs_do_not_use_are_imported_when_first_used() -> None:
    printed = subprocesses.says(
        """
import sys, ctxalloc
later = {"asgi", "cuda", "metrics", "opentelemetry", "problems", "prometheus", "strategies", "tracking", "usm", "wsgi"}
print(*sorted(later & {name.removeprefix("ctxalloc.") for name in sys.modules}), later <= set(dir(ctxalloc)))
print(*sorted(name for name in later if getattr(ctxalloc, name) is not sys.modules[f"ctxalloc.{name}"]))
print(*sorted(name for name in ctxalloc.__all__ if getattr(ctxalloc, name) is not getattr(ctxalloc, name)))
"""
    )
    assert printed == "True"


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ctxalloc' has no attribute 'arena'"):
        ctxalloc.arena  # noqa: B018
