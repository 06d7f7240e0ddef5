"""One worker is scraped and tells of all: gunicorn forks, prometheus_client reads."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from servers import connected, served

parser = pytest.importorskip("prometheus_client.parser")

WORKERS = 3
REQUESTS = 120


def scraped(port: int) -> dict[str, float]:
    """What a scrape says of the route, by the metric's name; and of the processes."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("name", "/work") == "/work" and sample.labels.get("le", "+Inf") == "+Inf":
                found[sample.name] = sample.value
    return found


async def work(port: int, times: int) -> set[int]:
    """Requests on connections of their own; the workers that answered."""
    answered = set()
    for _ in range(times):
        async with connected(port) as connection:
            answered.add(int((await connection.ask("/work")).body))
    return answered


@pytest.mark.parametrize("preload", [(), ("--preload",)])
def test_whichever_worker_is_scraped_tells_of_all(tmp_path: Path, preload: tuple[str, ...]) -> None:
    command = ["-m", "gunicorn", "-w", str(WORKERS), *preload, "-b", "127.0.0.1:{port}", "metrics_app:service"]
    with served(command, CTXALLOC_METRICS_DIR=str(tmp_path)) as port:
        workers: set[int] = set()
        asked = 0
        while len(workers) < 2 or asked < REQUESTS:
            workers |= asyncio.run(work(port, 20))
            asked += 20
        for _ in range(10):  # whoever answers
            found = scraped(port)
            assert found["ctxalloc_requests_total"] == asked
            assert found["ctxalloc_request_memory_peak_bytes_bucket"] == asked
            assert found["ctxalloc_request_memory_peak_bytes_sum"] == asked * 50_000
        # A worker that dies leaves its counts, and the one in its place counts on.
        os.kill(workers.pop(), signal.SIGKILL)
        more: Any = asyncio.run(work(port, 40))
        assert more
        assert scraped(port)["ctxalloc_requests_total"] == asked + 40
        # The workers, and the master where it has the application.
        assert len(list(tmp_path.iterdir())) <= WORKERS + 1
