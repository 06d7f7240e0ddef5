"""Random programs of whole requests against a naive model (`whole_model.py`); and what malloc itself says.

`CTXALLOC_STRESS` multiplies the steps (`make stress`: a million of each kind).
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from whole_programs import check, library_path, needs_library

pytestmark = [pytest.mark.once, needs_library]

STEPS = 2000 * int(os.environ.get("CTXALLOC_STRESS", "1"))
STEPS_OF_ONE = 50_000  # programs are many rather than long: each has requests and a seed of its own


@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_random_programs_of_whole_requests_agree_with_a_model(way):
    program = Path(__file__).with_name("whole_model.py")
    environment = {**os.environ, "PYTHONMALLOC": "", "LD_PRELOAD": library_path()}
    left = STEPS
    while left > 0:
        steps, seed = min(left, STEPS_OF_ONE), random.randrange(1 << 32)
        left -= steps
        command = [sys.executable, "-X", "faulthandler", program, way, str(seed), str(steps)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert ended.returncode == 0, f"seed {seed}, {steps} steps\n{ended.stdout}{ended.stderr}"


def test_a_block_that_was_small_is_charged_once_it_has_grown():
    """Glibc gives one of 1,017 bytes as much room as one of 1,024, and some 16 more."""
    check("""
        with ctxalloc.request(whole=True) as request:
            for size in range(900, 1024):
                block = libc.malloc(size)
                before = request.stats.whole.native_bytes
                block = libc.realloc(block, 100_000)
                grown = request.stats.whole.native_bytes - before
                assert grown >= 100_000 - 36_000, (size, grown)  # less where the small one was a sample
                libc.free(block)
        blocks = [libc.malloc(size) for size in range(1056, 1100)]
        with ctxalloc.request(whole=True) as request:
            blocks = [libc.realloc(block, 100_000) for block in blocks]
            assert request.stats.whole.native_bytes >= 44 * 100_000  # they were nobody's
    """)


def test_what_a_request_has_is_what_glibc_no_longer_has():
    """The same program twice: what glibc hands out without a request is what the request is charged, and no more."""
    check("""
        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in
                        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
        libc.mallinfo2.restype = Info
        def in_use():
            info = libc.mallinfo2()
            return info.uordblks + info.hblkhd
        def work():
            rnd, held = random.Random(7), []
            for _ in range(3000):
                size = 1024 + int(2 ** rnd.uniform(0, 18))
                held.append([libc.malloc(size), size])
                if rnd.random() < 0.3:
                    libc.free(held.pop(rnd.randrange(len(held)))[0])
                elif rnd.random() < 0.3:
                    one = rnd.choice(held)
                    one[1] = 1024 + int(2 ** rnd.uniform(0, 18))
                    one[0] = libc.realloc(one[0], one[1])
            return held
        before = in_use()
        held = work()
        by_glibc = in_use() - before
        asked = sum(size for _, size in held)
        [libc.free(block) for block, _ in held]
        before = in_use()
        with ctxalloc.request(whole=True) as request:
            held = work()
            native = request.stats.whole.native_bytes
        beside = in_use() - before
        # glibc takes up to 16 bytes more for each block, and pages for those that it maps: some 100 of these.
        assert asked <= by_glibc < asked + 16 * len(held) + 4096 * 400 + 400 * KiB, (asked, by_glibc)
        assert asked <= native < asked + 256 * KiB, (asked, native)  # pymalloc notes where its arenas are
        assert beside < 600 * KiB, beside
    """)
