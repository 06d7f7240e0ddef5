"""Budgets that are guaranteed memory, and what arbitrates between those that want more than there is."""

import ctxalloc
import numpy as np
import pytest


def test_a_guarantee_is_there_whatever_others_take():
    process = ctxalloc.Budget(10_000, name="process")
    patient = ctxalloc.Budget(parent=process, guarantee_bytes=4000, name="patient")
    greedy = ctxalloc.Budget(parent=process, name="greedy")
    assert (patient.guarantee_bytes, greedy.guarantee_bytes, process.reserved_bytes) == (4000, None, 4000)
    with ctxalloc.request(root=True, budget=greedy, strict=True):
        taken = np.zeros(6000, "u1")
        with pytest.raises(MemoryError):
            np.zeros(2000, "u1")
    with ctxalloc.request(root=True, budget=patient, strict=True):
        mine = np.zeros(4000, "u1")
        with pytest.raises(MemoryError):
            np.zeros(2000, "u1")
        del mine
    with ctxalloc.request(root=True, budget=patient, reserve_bytes=4000):
        assert (process.in_use_bytes, process.reserved_bytes) == (6000, 4000)
    del taken, patient
    assert (process.in_use_bytes, process.reserved_bytes) == (0, 0)


def test_a_guarantee_that_does_not_fit_says_what_does_not():
    process = ctxalloc.Budget(1000, name="process")
    first = ctxalloc.Budget(parent=process, guarantee_bytes=700)
    with pytest.raises(ValueError, match=r"'process' cannot guarantee 301 bytes more .*: 700 of its 1000"):
        ctxalloc.Budget(parent=process, guarantee_bytes=301)
    with ctxalloc.request(root=True, budget=process, reserve_bytes=250):
        with pytest.raises(ctxalloc.NoRoom) as busy:
            first.guarantee_bytes = 800
        assert (busy.value.reason, busy.value.budget_id, first.guarantee_bytes) == ("busy", process.id, 700)
    first.guarantee_bytes = 800
    assert process.reserved_bytes == 800
    with pytest.raises(ctxalloc.NoRoom, match="guarantees to others") as never:
        ctxalloc.request(root=True, budget=process, reserve_bytes=201).__enter__()
    assert never.value.never_fits
    for arguments in ({"guarantee_bytes": 1}, {"limit_bytes": 1, "parent": process, "guarantee_bytes": 2}):
        with pytest.raises(ValueError, match="guarantee_bytes"):
            ctxalloc.Budget(**arguments)
    with pytest.raises(ValueError, match="made with a guarantee"):
        ctxalloc.Budget(parent=process).guarantee_bytes = 1
    for wrong in ("much", True, None):
        with pytest.raises(TypeError, match="guarantee_bytes"):
            first.guarantee_bytes = wrong
