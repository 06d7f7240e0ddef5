"""`examples/tenants`, what `make demo` shows: who is refused, who is served, and that a run of it comes to its end."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_calls import call, http

for library in ("httpx", "matplotlib", "starlette", "uvicorn"):
    pytest.importorskip(library)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# What is not installed was skipped above.
from ctxalloc import MiB, request  # noqa: E402
from examples.tenants import app, demo, load, serving  # noqa: E402
from examples.tenants.figure import draw  # noqa: E402

pytestmark = pytest.mark.any_numpy


def ask(service: Any, tenant: str, path: str) -> int:
    return asyncio.run(call(service, http(path, "POST", headers=[(b"tenant", tenant.encode())]))).status


def test_the_greedy_tenant_is_refused_while_the_patient_one_is_served() -> None:
    service = app.build(is_guarded=True)
    with request(budget=serving.TENANTS["greedy"]):
        held = np.empty(150 * MiB, np.uint8)
    assert ask(service, "greedy", "/smooth/24") == 503
    assert ask(service, "patient", "/smooth/24") == 200
    assert ask(service, "greedy", "/smooth/300") == 413
    del held
    assert ask(service, "greedy", "/smooth/24") == 200
    assert serving.SERVICE.in_use_bytes == 0
    assert max(app.peaks["/smooth/{mib}"]) >= 48 * MiB


def test_a_run_is_measured_and_drawn(tmp_path: Path) -> None:
    run = asyncio.run(demo.measured("guarded", 1, 0))
    assert set(run.statuses["patient"]) == {200}
    assert "/total/{mib}" in run.peaks
    draw(tmp_path / "tenants.png", [run], demo.NAMES, demo.REFUSALS, demo.LIMIT_MIB)
    assert (tmp_path / "tenants.png").stat().st_size > 10_000
    assert "with the middleware" in demo.table([run])


def test_the_verdict_is_1_where_nothing_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = load.Run("guarded", memory=[(0.0, 50.0), (1.0, 200.0)])
    run.statuses = {"patient": Counter({200: 5}), "greedy": Counter({200: 3, 503: 4})}
    assert demo.verdict([run]) == 0
    run.statuses["patient"][503] = 1
    assert demo.verdict([run]) == 1
    run.statuses = {"patient": Counter({200: 5}), "greedy": Counter({200: 3})}
    assert demo.verdict([run]) == 1
    run.statuses["greedy"][503] = 1
    run.memory.append((2.0, 2000.0))
    assert demo.verdict([run]) == 1
    assert "memory rose by 1950 MiB" in capsys.readouterr().out
