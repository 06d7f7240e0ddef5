"""A file that a user names for a report: a regular one appears as a whole, and anything else is written to.

Only a regular file, or a name that nothing has yet, is replaced by a rename. A device, a FIFO, or a descriptor such as
``/dev/stdout`` stays what it is, and a symbolic link leads to the file that is written. Neighbours: ``_report`` and the
pytest plugin write by it.
"""

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_MAX_LINKS = 40
"""As many symbolic links as Linux follows."""


class Target(NamedTuple):
    """Where a report goes, as it was when the program began: by its end the program may have changed its directory."""

    path: Path
    """Absolute."""
    descriptor: int | None = None
    """The number that ``/dev/stdout`` or ``/dev/fd/N`` names."""
    identity: tuple[int, int] | None = None
    """The device and number of the file behind the descriptor, which the program may close and open for another."""

    @property
    def is_standard_output(self) -> bool:
        """Nothing else is to be printed there."""
        return self.descriptor == 1

    def write(self, content: bytes) -> None:
        """Write it. OSError: it cannot be written."""
        self.write_parts([content])

    def write_parts(self, parts: Iterable[bytes]) -> None:
        """Write them one after the other. OSError: they cannot be written."""
        if self.descriptor is None:
            write_parts(self.path, parts)
        elif identity_of(self.descriptor) != self.identity:
            raise OSError(errno.EBADF, "the program has closed it", str(self.path))
        else:
            for part in parts:
                write_to(self.descriptor, part)


def named(text: str) -> Path:
    """The file that an option names: ``-`` is standard output."""
    return Path("/dev/stdout" if text == "-" else text)


def target_of(path: Path) -> Target:
    """What a path names now. OSError: nothing can be written there."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() keeps the dots
    descriptor = _descriptor_of(path)
    if descriptor is not None:
        return Target(path, descriptor, identity_of(descriptor))
    found = _status_of(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _check_access(path)
    else:
        _check_access(Path(os.path.realpath(path)).parent)
    return Target(path)


def write(path: Path, content: bytes) -> None:
    """Write a file: as a whole, if it is a regular one or new. OSError: it cannot be written."""
    write_parts(path, [content])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of these. OSError: it cannot be written."""
    found = _status_of(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        with path.open("wb", buffering=0) as file:
            for part in parts:
                write_to(file.fileno(), part)
        return
    real = Path(os.path.realpath(path))  # a link stays one
    _replace(real, parts, 0o666 & ~_mask() if found is None else stat.S_IMODE(found.st_mode))


def write_private(path: Path, content: bytes) -> None:
    """Write a new file as a whole, for its owner only. A link of that name is replaced, and not followed."""
    _replace(path, [content], 0o600)


def write_to(descriptor: int, content: bytes) -> None:
    """Write all of it to an open file, behind what this program has printed to it."""
    flush_printed()
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def flush_printed() -> None:
    """Flush what the program has printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # it is None, or closed, or the program's own
            continue


def identity_of(descriptor: int) -> tuple[int, int] | None:
    """The device and number of the file behind a descriptor; None: it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _status_of(path: Path) -> os.stat_result | None:
    """Of what links lead to; None where nothing is. OSError: that cannot be told."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _check_access(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _descriptor_of(path: Path) -> int | None:
    """The number of the open file that a path names, as /dev/stdout, /dev/fd/1 and /proc/self/fd/1 do."""
    folders = {os.path.realpath(folder) for folder in ("/proc/self/fd", "/proc/thread-self/fd", "/dev/fd")}
    for _ in range(_MAX_LINKS):
        parent = os.path.realpath(path.parent)
        if parent in folders and path.name.isdecimal():
            return int(path.name)
        try:
            path = Path(parent, os.readlink(path))  # noqa: PTH115 - one link, as it is
        except OSError:  # no link
            return None
    return None


def _replace(path: Path, parts: Iterable[bytes], mode: int) -> None:
    """Who reads the file sees what these are or what was before."""
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        # Where the disk is nearly full, or a file has a limit, its buffer writes the rest, or fails.
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.writelines(parts)
        Path(made).chmod(mode)
        try:
            Path(made).replace(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            shutil.copyfile(made, path)  # a single file that is mounted there cannot be replaced
            Path(made).unlink()
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def _mask() -> int:
    """In a program at its end only: the mask is all threads'."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
