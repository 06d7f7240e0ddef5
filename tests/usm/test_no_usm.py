"""A device without USM: Debian's PoCL (`apt-get install pocl-opencl-icd`). Errors, and a process that goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

POCL = Path("/usr/lib/x86_64-linux-gnu/libpocl.so.2")

PROGRAM = """if True:
    import dpctl, numpy, ctxalloc
    from ctxalloc import usm
    def refused(ask, text):
        try:
            ask()
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise SystemExit(f"not refused: {text}")
    usm.kind_of(1)  # finds the runtime
    device = dpctl.SyclDevice()
    if device.has_aspect_usm_shared_allocations:
        raise SystemExit(77)
    for kind in ("shared", "host", "device"):
        text = f"has no USM of the kind '{kind}'"
        for ask in (
            lambda: usm.empty(3, kind=kind),
            lambda: usm.use(kind=kind),
            lambda: usm.handler(kind=kind),
            lambda: ctxalloc.use(f"usm_{kind}"),
            lambda: ctxalloc.handler(f"usm_{kind}"),
        ):
            refused(ask, text)
    for strategy in (usm.Pool, usm.Arena):
        refused(lambda: strategy(kind="host"), "has no USM of the kind 'host'")
    array = numpy.ones(3)
    assert usm.kind_of(array) is usm.UsmKind.UNKNOWN
    try:
        usm.export(array)
    except ValueError as error:
        assert "not in USM" in str(error), error
    else:
        raise SystemExit("exported")
    try:
        usm.from_dlpack(array)
    except BufferError:
        pass
    else:
        raise SystemExit("taken")
"""


@pytest.mark.skipif(not POCL.exists(), reason="PoCL is not installed: apt-get install pocl-opencl-icd")
def test_a_device_without_usm_gives_errors_and_no_abort() -> None:
    environment = {"PATH": "/usr/bin", "OCL_ICD_FILENAMES": str(POCL), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, env=environment, check=False)
    if done.returncode == 77:
        pytest.skip("this PoCL has USM")
    assert done.returncode == 0
