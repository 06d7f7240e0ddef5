"""Queues that tests need beside the default one."""

import dpctl
import pytest


def apart() -> dpctl.SyclQueue:
    """In a context of its own, whose pools no handler has."""
    device = dpctl.SyclDevice()
    return dpctl.SyclQueue(dpctl.SyclContext([device]), device)


def two_parts() -> tuple[dpctl.SyclQueue, dpctl.SyclQueue]:
    """On two parts of the device, in one context."""
    parts = dpctl.SyclDevice().create_sub_devices(partition=1)
    if len(parts) < 2:
        pytest.skip("the device has one part")
    context = dpctl.SyclContext(parts)
    return dpctl.SyclQueue(context, parts[0]), dpctl.SyclQueue(context, parts[1])
