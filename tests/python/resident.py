"""How much memory a process has, asked of the kernel. Programs that `subprocesses` runs may import this too."""

import os
from pathlib import Path


def rss() -> int:
    """This process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def highest_rss() -> int:
    """The most that this process ever had, in bytes: VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
