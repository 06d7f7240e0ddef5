"""``Budget.process("auto")`` in a real control group, where this process may make one; else these tests are skipped."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_numpy

MIB = 1 << 20
ROOT = Path("/sys/fs/cgroup")


class Group:
    """A control group with a limit of memory."""

    def __init__(self, path, limit_file):
        self.path = path
        self.limit_file = path / limit_file

    def limit(self, size_bytes):
        self.limit_file.write_text(str(size_bytes), "utf-8")


def places():
    """Where a group may be made: below version 2's root where it hands memory down, else in version 1's tree."""
    with contextlib.suppress(OSError):
        if "memory" in (ROOT / "cgroup.subtree_control").read_text("utf-8").split():
            yield ROOT, "memory.max"
    yield ROOT / "memory", "memory.limit_in_bytes"


@pytest.fixture
def group():
    for place, limit_file in places():
        made = Group(place / f"ctxalloc-test-{os.getpid()}", limit_file)
        try:
            made.path.mkdir()
        except OSError:
            continue
        try:
            made.limit(600 * MIB)
            yield made
        except PermissionError:
            pytest.skip("a group was made, and its limit cannot be set")
        finally:
            for _ in range(100):  # the last process may still be about to leave it
                try:
                    made.path.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)
        return
    pytest.skip("no control group can be made here")


PROGRAM = """
import sys, time
import numpy as np
import ctxalloc
MIB = 1 << 20
whole = ctxalloc.Budget.process("auto")
print("limit", whole.limit_bytes, flush=True)
sys.stdin.readline()  # the group's limit was lowered
deadline = time.monotonic() + 20
while whole.limit_bytes > 0.8 * 300 * MIB and time.monotonic() < deadline:
    time.sleep(0.05)
print("limit", whole.limit_bytes, flush=True)
kept = []
try:
    with ctxalloc.request(budget=whole, name="greedy"):
        for _ in range(1000):
            kept.append(np.ones(MIB, np.uint8))  # each page of it is touched
except ctxalloc.BudgetExceeded as error:
    print("refused", error.budget, len(kept), flush=True)
"""


def test_in_a_group_it_is_refused_before_it_is_killed(group):
    def enter():
        (group.path / "cgroup.procs").write_text(str(os.getpid()), "utf-8")

    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=enter,  # noqa: PLW1509 - before it maps anything of its own
    )
    with process:
        try:
            word, limit = process.stdout.readline().split()
            assert word == "limit"
            assert 0 < int(limit) <= 0.8 * 600 * MIB
            group.limit(300 * MIB)
            process.stdin.write("\n")
            process.stdin.flush()
            word, lowered = process.stdout.readline().split()
            assert word == "limit"
            assert 0 < int(lowered) <= 0.8 * 300 * MIB < int(limit)
            word, name, count = process.stdout.readline().split()
            assert (word, name) == ("refused", "process")
            assert 100 < int(count) <= 240
            assert process.wait(60) == 0, "it was killed"
        finally:
            process.kill()
