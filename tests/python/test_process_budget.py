"""``Budget.process``: one for the process, whose limit follows the memory that there is. Rust tests what it reads."""

import os

import pytest
from subprocesses import says

from ctxalloc import Budget, GiB

pytestmark = [pytest.mark.once, pytest.mark.any_numpy]


def test_its_limit_is_a_share_of_what_there_is():
    code = """
import ctxalloc
machine, group, _ = ctxalloc._native._system_limits("/")
whole = min(one for one in (machine, group) if one is not None)
process = ctxalloc.Budget.process("auto")
assert process.name == "process" and process.parent is None
assert 0 < process.limit_bytes <= 0.8 * whole
assert ctxalloc.Budget.process("auto", share=0.5) == process
assert 0 < process.limit_bytes <= 0.5 * whole
assert ctxalloc.Budget.process(123).limit_bytes == process.limit_bytes == 123
print("well")
"""
    assert says(code) == "well"


def test_a_tenants_requests_are_refused_by_it():
    code = """
import ctxalloc, numpy
process = ctxalloc.Budget.process(1 << 20)
tenant = ctxalloc.Budget(parent=process, name="tenant")
try:
    with ctxalloc.request(budget=tenant):
        numpy.empty(2 << 20, numpy.uint8)
except ctxalloc.BudgetExceeded as error:
    print(error.budget)
"""
    assert says(code) == "process"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_of_fork_has_it_and_follows_on():
    code = """
import ctxalloc, numpy, os, time
process = ctxalloc.Budget.process("auto")
with ctxalloc.use("pool"):
    numpy.ones(1000)
child = os.fork()
if child == 0:
    with ctxalloc.request(budget=process):
        held = numpy.ones(1000)
        before = process.limit_bytes
        theirs = b"x" * (256 << 20)       # in no pool: less is left for arrays
        deadline = time.monotonic() + 20
        while process.limit_bytes > before - (200 << 20) and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(0 if process.limit_bytes <= before - (200 << 20) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert says(code) == "0"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("automatic",), TypeError),
        ((-1,), ValueError),
        ((True,), TypeError),
        ((None,), TypeError),
        ((2**64 - 1,), ValueError),
    ],
)
def test_a_limit_that_is_none_is_refused(arguments, error):
    with pytest.raises(error, match=r"Budget\.process"):
        Budget.process(*arguments)


@pytest.mark.parametrize("share", [0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        Budget.process("auto", share=share)
    with pytest.raises(ValueError, match="share"):
        Budget.process(GiB, share=0.5)


def test_readiness_is_that_of_the_roots():
    code = """
import ctxalloc
root = ctxalloc.Budget(1000, name="a root")
print(ctxalloc.ready(), end=" ")
with ctxalloc.request(budget=root, reserve_bytes=950, root=True):
    print(root.is_ready, ctxalloc.ready(), end=" ")
with ctxalloc.request(budget=root, reserve_bytes=850, root=True):
    print(ctxalloc.ready(), end=" ")
print(ctxalloc.ready(), end=" ")
tenant = ctxalloc.Budget(1000, name="a tenant", parent=ctxalloc.Budget(name="without a limit"))
with ctxalloc.request(budget=tenant, reserve_bytes=950, root=True):
    print(tenant.is_ready, ctxalloc.ready())
"""
    assert says(code) == "True False False False True False True"
