"""Tests on a real CUDA device: `make test-cuda-device`. Without one each is skipped, and says why.

Nothing here is timed. A `Gate` holds a stream back, so what a device does later comes later than what a test does now.
"""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxalloc import cuda

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from on_device import Device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests of this folder where there is no device."""
    known = cuda.info()
    if known["state"] == "ready":
        return
    reason = f"no CUDA device, but {known['state']!r}: {known['error']}"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def the_device() -> Device:
    return Device()


@pytest.fixture
def device(the_device: Device) -> Iterator[Device]:
    """The device, with nothing that waits before and after, and every gate open in the end."""
    the_device.rest()
    yield the_device
    the_device.open_gates()
    gc.collect()
    the_device.rest()
    cuda.settle()
    cuda.settle()
    known = cuda.info()
    assert (known["waiting_bytes"], known["stuck_bytes"], known["kept"]) == (0, 0, 0), known
    assert (known["state"], known["refused_registrations"]) == ("ready", 0), known
