"""`ctxalloc.usm` where dpctl is not installed. The tests with dpctl are in tests/usm."""

import importlib.util

import numpy as np
import pytest

import ctxalloc
from ctxalloc import usm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dpctl") is not None, reason="dpctl is installed")


def test_the_extra_is_named() -> None:
    for ask in (
        lambda: ctxalloc.use("usm_shared"),
        lambda: ctxalloc.set_handler("usm_host"),
        lambda: ctxalloc.handler("usm_device"),
        usm.use,
        lambda: usm.empty(3),
        lambda: usm.zeros(3),
        lambda: usm.asarray([1]),
        lambda: usm.kind_of(1),
        usm.Pool,
        usm.Arena,
    ):
        with pytest.raises(ImportError, match=r"pip install ctxalloc\[usm\]"):
            ask()


def test_what_needs_no_sycl_is_answered_without_it() -> None:
    with pytest.raises(ValueError, match="not in USM"):
        usm.export(np.ones(3))
    with pytest.raises(ctxalloc.UnknownHandlerError):
        ctxalloc.use("usm_other")
    assert [kind.value for kind in usm.UsmKind] == ["host", "device", "shared", "unknown"]
