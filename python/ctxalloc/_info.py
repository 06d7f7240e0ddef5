"""``ctxalloc info``: what this machine and this Python offer to handlers, and what to change."""

import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TextIO

import numpy as np

from ctxalloc import _native
from ctxalloc._text import size_text, table

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_VARIABLES = (
    "CTXALLOC_HANDLER",
    "CTXALLOC_DECAY_SECONDS",
    "CTXALLOC_WARM_BYTES",
    "CTXALLOC_METRICS_DIR",
    "CTXALLOC_PROFILE_SIGNAL",
    "CTXALLOC_PROFILE_SECONDS",
    "CTXALLOC_PROFILE_FILE",
    "CTXALLOC_RECORD",
    "CTXALLOC_RECORD_ONE_IN",
    "CTXALLOC_WHOLE",
    "CTXALLOC_WHOLE_MMAP",
    "CTXALLOC_SELECTION",
)


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _chosen(path: Path) -> str | None:
    """The one in brackets: ``always [madvise] never``."""
    text = _read(path)
    return None if text is None else next((word.strip("[]") for word in text.split() if word.startswith("[")), text)


def _limit_text(which: int) -> str:
    limit = resource.getrlimit(which)[0]
    return "none" if limit == resource.RLIM_INFINITY else size_text(limit)


def _cuda_text() -> str:
    known = _native.cuda_info()  # loads the driver, if there is one, and makes no context
    if known["state"] != "ready":
        return str(known["state"])
    names = [_native.cuda_device(number)["name"] for number in range(known["device_count"])]
    version = ".".join(map(str, known["version"]))
    return f"{version}, {len(names)} device{'' if len(names) == 1 else 's'}: {', '.join(names)}"


def print_info(out: TextIO, *, is_json: bool = False) -> None:
    """Prints all of it, as tables or as one JSON object."""
    advice: list[str] = []
    rows = [
        ["ctxalloc", f"{_native.__version__}, selection by {_native.selection}"],
        ["Python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"],
        ["NumPy", np.__version__],
        ["system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"],
        ["handlers", ", ".join(handler.name for handler in _native.handlers())],
        ["selected", _native.current().name],
    ]
    rows += [[name, repr(os.environ[name])] for name in _VARIABLES if name in os.environ]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows.append(["memory", size_text(memory)])
    _, limit, high = _native._system_limits("/")  # noqa: SLF001 - made for this
    rows.append(["control group's limit", "none" if limit is None else size_text(limit)])
    rows.append(["control group slows down above", "nothing" if high is None else size_text(high)])
    if limit is not None and limit < memory and "CTXALLOC_WARM_BYTES" not in os.environ:
        advice.append(
            f"pools keep an eighth of the machine's memory ({size_text(memory / 8)}), but the control group allows "
            f"{size_text(limit)} in all: set CTXALLOC_WARM_BYTES={limit // 8}"
        )
    enabled, defrag = _chosen(_HUGE / "enabled"), _chosen(_HUGE / "defrag")
    rows.append(["transparent huge pages", f"{enabled or 'not there'}, defrag {defrag or 'not there'}"])
    if enabled in (None, "never"):
        advice.append(f"the handler hugepages gets ordinary pages: as root, echo madvise > {_HUGE / 'enabled'}")
    reserved, free = _read("/proc/sys/vm/nr_hugepages"), None
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("HugePages_Free:"):
            free = line.split()[1]
    rows.append(["huge pages set aside", f"{reserved or 0}, of which {free or 0} are free"])
    rows.append(["NUMA nodes", _read("/sys/devices/system/node/online") or "0"])
    rows.append(["lockable memory", _limit_text(resource.RLIMIT_MEMLOCK)])
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if lockable != resource.RLIM_INFINITY and lockable < 64 << 20:
        advice.append(
            f"the handler locked has {size_text(lockable)}: raise `ulimit -l` (memlock in limits.conf, LimitMEMLOCK= "
            "of a systemd unit)"
        )
    rows.append(["CUDA", _cuda_text()])
    rows.append(["address space", _limit_text(resource.RLIMIT_AS)])
    if is_json:
        print(json.dumps({**dict(rows), "advice": advice}, indent=1), file=out)
        return
    table("ctxalloc here", ["what", "value"], rows, out)
    if advice:
        print("\nWhat to change", file=out)
        for line in advice:
            print(f"  {line}", file=out)
