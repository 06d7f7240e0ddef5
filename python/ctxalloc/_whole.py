"""The library that ``request(whole=True)`` needs before malloc: where it is, and programs that are started with it."""

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Final

from ctxalloc._native import _whole_enable, _whole_library
from ctxalloc._program import UsageError

VARIABLE: Final = "CTXALLOC_WHOLE"
"""``1`` in the environment: count from the import on, and fail there if that cannot be had."""


def library() -> Path:
    """The library's file, for LD_PRELOAD. UsageError: there is none here, or only where LD_PRELOAD cannot name it."""
    path = _library()
    if any(character in str(path) for character in ": "):
        raise UsageError(f"LD_PRELOAD takes no colon and no blank, but the library is {path}; set XDG_CACHE_HOME")
    return path


def _library() -> Path:
    content = _whole_library()
    if content is None:
        raise UsageError("it needs Linux with glibc, and a ctxalloc that was built with the feature `whole`")
    name = f"libctxalloc_whole-{hashlib.sha256(content).hexdigest()[:16]}.so"
    tried: list[str] = []
    for folder in _folders():
        try:
            return _written(folder, name, content)
        except OSError as error:
            tried.append(f"{folder}: {error}")
    raise UsageError(f"no folder of this user's can hold the library ({'; '.join(tried)}); set XDG_CACHE_HOME")


def _folders() -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return [Path(cache) / "ctxalloc", Path(tempfile.gettempdir()) / f"ctxalloc-{os.getuid()}"]


def _written(folder: Path, name: str, content: bytes) -> Path:
    """The file, with this content. Nobody else may write to its folder: what is preloaded runs as this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError("it is not a folder that only this user writes to")
    path = folder / name
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content:
        return path
    handle, fresh = tempfile.mkstemp(dir=folder, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(fresh).chmod(0o500)
        Path(fresh).replace(path)  # at once: another process may start with it
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return path


PRELOAD: Final = "LD_PRELOAD"


def preload(before: str | None) -> str:
    """What LD_PRELOAD is to be: the library first, then what there was. RuntimeError: there is no library here."""
    if before and _is_named(before):
        return before
    try:
        path = str(library())
    except UsageError as error:
        raise RuntimeError(f"whole=True cannot be had: {error}") from None
    return f"{path}:{before}" if before else path


def is_loaded() -> bool:
    """Whether this process was started with it."""
    return _is_named(os.environ.get(PRELOAD, ""))


def _is_named(preloaded: str) -> bool:
    return any("libctxalloc_whole-" in part for part in preloaded.replace(" ", ":").split(":"))


def prepare(arguments: list[str], *, compares: bool) -> None:
    """For ``run --whole``. UsageError: it does not go with ``--compare``, or there is no library."""
    if compares:
        raise UsageError("--whole and --compare do not go together: --compare times runs of their own")
    if not is_loaded():
        restart(arguments)


def restart(arguments: list[str]) -> None:
    """Starts ``python -m ctxalloc`` with these arguments in place of this program, with the library before malloc."""
    try:
        environment = {**os.environ, PRELOAD: preload(os.environ.get(PRELOAD)), VARIABLE: "1"}
    except RuntimeError as error:
        raise UsageError(str(error)) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *_options(), "-m", "ctxalloc", *arguments], environment)  # noqa: S606 - no shell


def _options() -> list[str]:
    """What this interpreter was started with, up to the program."""
    given = sys.orig_argv[1:]
    module = given.index("-m") if "-m" in given else None
    return [] if module is None else given[:module]


def enable_from_environment() -> None:
    """ImportError: the environment asks for it, and it cannot be had."""
    value = os.environ.get(VARIABLE, "")
    if value in {"", "0"}:
        return
    if value != "1":
        raise ImportError(f"the environment says {VARIABLE}={value!r}; give 1, or remove it")
    try:
        _whole_enable()
    except RuntimeError as error:
        raise ImportError(f"the environment says {VARIABLE}=1, but {error}") from None
