"""The Grafana dashboard and the alert rules, in a real Prometheus that scrapes our exporter (`make test-grafana`)."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest

import ctxalloc

FOLDER = Path(__file__).parents[2] / "examples" / "grafana"
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no Prometheus here: make test-grafana"),
]


def expressions() -> list[str]:
    """Those of the dashboard, and the left sides of the alerts' comparisons."""
    panels = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))["panels"]
    shown = [target["expr"].replace("$__rate_interval", "5s") for panel in panels for target in panel["targets"]]
    rules = re.findall(r"expr: (.*) > [\d.e]+$", (FOLDER / "alerts.yml").read_text("utf-8"), re.MULTILINE)
    assert len(rules) == 3
    return shown + [re.sub(r"\[\d+m\]", "[5s]", rule) for rule in rules]


def test_the_alert_rules_are_rules() -> None:
    command = ["promtool", "check", "rules", FOLDER / "alerts.yml"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "3 rules found" in checked.stdout


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[int]:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    budget = ctxalloc.Budget(1 << 20, name="a budget")
    registry.register(ctxalloc.prometheus.Collector(budgets=[budget]))
    server, thread = client.start_http_server(0, "127.0.0.1", registry)
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: [{FOLDER / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: a, static_configs: [{{targets: ['127.0.0.1:{server.server_port}']}}]}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()
            server.shutdown()
            server.server_close()
            thread.join()


def asked(port: int, expression: str) -> list[Any]:
    """What Prometheus answers, as soon as it answers something."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with ctxalloc.request(name="scraped"):
            np.empty(100_000, np.uint8)
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': expression})}") as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
        except OSError:
            found = []
        found = [one for one in found if one["value"][1] != "NaN"]  # 0 / 0: of names without requests now
        if found:
            return found
        threading.Event().wait(0.2)
    return []


def test_every_expression_is_answered_by_a_real_prometheus(prometheus: int) -> None:
    for expression in expressions():
        assert asked(prometheus, expression), expression
    (quantile,) = [one for one in asked(prometheus, expressions()[2]) if one["metric"]["name"] == "scraped"]
    assert 65536 <= float(quantile["value"][1]) <= 262144
