"""Print the path of the newest CPython on this machine that the abi3 wheel can run on; nothing if none.

Looks along PATH and among pyenv's versions. Only released CPythons newer than the one that runs this,
with a GIL (the stable ABI has none without) and with venv. `make test-newest` uses it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Says version and path if the interpreter qualifies, or fails.
QUESTION = """
import ensurepip, sys, sysconfig, venv
fit = (
    sys.implementation.name == "cpython"
    and sys.version_info.releaselevel == "final"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
print(*sys.version_info[:3], sys.executable if fit else "")
"""


def candidates() -> Iterator[Path]:
    """Every file that is named like a Python 3."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from pyenv.glob("versions/3.*/bin/python3")
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and not folder.startswith(str(pyenv / "shims")):
            yield from Path(folder).glob("python3")
            yield from Path(folder).glob("python3.[0-9][0-9]")


def describe(python: Path) -> tuple[tuple[int, ...], str] | None:
    """The version and path of an interpreter that qualifies."""
    try:
        answer = subprocess.run([python, "-c", QUESTION], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor, micro, path = answer.stdout.rstrip("\n").split(" ", 3)
    return ((int(major), int(minor), int(micro)), path) if path else None


def main() -> None:
    """Print the newest, if it is newer than ours."""
    found = [known for python in set(candidates()) if (known := describe(python))]
    newer = [known for known in found if known[0][:2] > sys.version_info[:2]]
    if newer:
        print(max(newer)[1])


if __name__ == "__main__":
    main()
