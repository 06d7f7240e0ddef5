"""The Grafana dashboard and the alert rules, in a real Prometheus that scrapes our exporter (`make test-grafana`)."""

import contextlib
import json
import random
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
from ctxalloc import _native

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


CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - name: one in ten requests is refused, and one in a hundred of another name
    interval: 1m
    input_series:
      - {{series: 'ctxalloc_requests_total{{name="hungry"}}', values: '0+100x60'}}
      - {{series: 'ctxalloc_requests_refused_total{{name="hungry"}}', values: '0+10x60'}}
      - {{series: 'ctxalloc_requests_total{{name="modest"}}', values: '0+100x60'}}
      - {{series: 'ctxalloc_requests_refused_total{{name="modest"}}', values: '0+1x60'}}
    alert_rule_test:
      - {{alertname: RequestsRefusedMemory, eval_time: 4m, exp_alerts: []}}
      - alertname: RequestsRefusedMemory
        eval_time: 20m
        exp_alerts:
          - exp_labels: {{name: hungry, severity: warning}}
            exp_annotations: {{summary: 'hungry: 10% of its requests are refused memory'}}
  - name: a budget is nearly used up, one is half used, and one has no limit
    interval: 1m
    input_series:
      - {{series: 'ctxalloc_budget_used_bytes{{budget="full"}}', values: '95x60'}}
      - {{series: 'ctxalloc_budget_limit_bytes{{budget="full"}}', values: '100x60'}}
      - {{series: 'ctxalloc_budget_used_bytes{{budget="half"}}', values: '50x60'}}
      - {{series: 'ctxalloc_budget_limit_bytes{{budget="half"}}', values: '100x60'}}
      - {{series: 'ctxalloc_budget_used_bytes{{budget="boundless"}}', values: '1e9x60'}}
      - {{series: 'ctxalloc_budget_used_bytes{{budget="nothing"}}', values: '0x60'}}
      - {{series: 'ctxalloc_budget_limit_bytes{{budget="nothing"}}', values: '0x60'}}
    alert_rule_test:
      - {{alertname: BudgetNearlyUsedUp, eval_time: 4m, exp_alerts: []}}
      - alertname: BudgetNearlyUsedUp
        eval_time: 6m
        exp_alerts:
          - exp_labels: {{budget: full, severity: warning}}
            exp_annotations: {{summary: 'budget full: 95% of its limit is in use'}}
  - name: what has escaped grows by 20 kB a second
    interval: 1m
    input_series:
      - {{series: 'ctxalloc_memory_used_bytes{{state="escaped",instance="leaks"}}', values: '0+1228800x90'}}
      - {{series: 'ctxalloc_memory_used_bytes{{state="escaped",instance="holds"}}', values: '5e9x90'}}
      - {{series: 'ctxalloc_memory_used_bytes{{state="live",instance="works"}}', values: '0+1228800x90'}}
    alert_rule_test:
      - {{alertname: EscapedMemoryGrows, eval_time: 20m, exp_alerts: []}}
      - alertname: EscapedMemoryGrows
        eval_time: 70m
        exp_alerts:
          - exp_labels: {{instance: leaks, state: escaped, severity: warning}}
            exp_annotations: {{summary: 'what outlives its request grows by 20kiB/s'}}
"""


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "cases.yml").write_text(CASES.format(rules=FOLDER / "alerts.yml"))
    command = ["promtool", "test", "rules", tmp_path / "cases.yml"]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "SUCCESS" in tested.stdout


def faster(rules: str) -> str:
    """The same rules by seconds in place of minutes."""
    return re.sub(r"for: \d+m", "for: 1s", re.sub(r"\[\d+m\]", "[5s]", rules)).replace(
        "  - name: ctxalloc\n", "  - name: ctxalloc\n    interval: 1s\n"
    )


@pytest.fixture
def budget() -> ctxalloc.Budget:
    return ctxalloc.Budget(1 << 20, name="a budget")


@pytest.fixture
def prometheus(tmp_path: Path, budget: ctxalloc.Budget) -> Iterator[int]:
    client = pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk.trace")
    registry = client.CollectorRegistry()
    registry.register(ctxalloc.prometheus.Collector(budgets=[budget], exemplars=True))
    server, thread = client.start_http_server(0, "127.0.0.1", registry)
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: [{tmp_path / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: a, static_configs: [{{targets: ['127.0.0.1:{server.server_port}']}}]}}]\n"
    )
    (tmp_path / "alerts.yml").write_text(faster((FOLDER / "alerts.yml").read_text("utf-8")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command.append("--enable-feature=exemplar-storage")
    with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()
            server.shutdown()
            server.server_close()
            thread.join()
            _native._note_ends(False)


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
    assert 100_000 / 1.19 <= float(quantile["value"][1]) <= 100_000 * 1.19, "buckets are 19 % wide"


def test_quantiles_are_right_to_nineteen_percent_in_a_real_prometheus(prometheus: int) -> None:
    chance = random.Random(3)
    sizes = sorted(int(159_000 * chance.lognormvariate(0, 0.963)) for _ in range(1000))
    exact = {0.5: sizes[499], 0.95: sizes[949], 0.99: sizes[989]}
    found = dict[float, float]()
    until = time.monotonic() + 60
    while len(found) < len(exact) and time.monotonic() < until:
        for size in sizes:
            with ctxalloc.request(name="log-normal", root=True):
                np.empty(size, np.uint8)
        for q in exact:
            query = f'histogram_quantile({q}, rate(ctxalloc_request_memory_peak_bytes_bucket{{name="log-normal"}}[5s]))'
            for answer in (get(prometheus, "query", query=query) or {}).get("result", []):
                found[q] = float(answer["value"][1])
        threading.Event().wait(0.2)
    assert found.keys() == exact.keys()
    for q, value in exact.items():
        assert value / 1.19 <= found[q] <= value * 1.19, (q, value, found[q])


def get(port: int, path: str, **query: str) -> Any:
    """What the real Prometheus says; None while it does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}") as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


def test_each_alert_is_fired_by_a_real_prometheus(prometheus: int, budget: ctxalloc.Budget) -> None:
    firing: set[str] = set()
    kept: list[Any] = []
    until = time.monotonic() + 60
    with ctxalloc.request(budget=budget, root=True):
        kept.append(np.empty(1_000_000, np.uint8))
        while len(firing) < 3 and time.monotonic() < until:
            with ctxalloc.request(name="refused", limit_bytes=1000, root=True), contextlib.suppress(MemoryError):
                np.empty(100_000, np.uint8)
            with ctxalloc.request(name="leaks", root=True):
                kept.append(np.empty(100_000, np.uint8))
            alerts = (get(prometheus, "alerts") or {}).get("alerts", [])
            firing |= {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
            threading.Event().wait(0.2)
    assert firing == {"RequestsRefusedMemory", "BudgetNearlyUsedUp", "EscapedMemoryGrows"}


def test_exemplars_reach_a_real_prometheus(prometheus: int) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    tracer, traces, found = TracerProvider().get_tracer("test"), set[str](), list[Any]()
    until = time.monotonic() + 60
    while not found and time.monotonic() < until:
        with tracer.start_as_current_span("a request") as span, ctxalloc.request(name="traced", root=True):
            np.empty(100_000, np.uint8)
        traces.add(f"{span.get_span_context().trace_id:032x}")
        query = 'ctxalloc_request_memory_peak_bytes_bucket{name="traced"}'
        since = {"start": str(time.time() - 600), "end": str(time.time() + 60)}
        found = get(prometheus, "query_exemplars", query=query, **since) or []
        threading.Event().wait(0.2)
    (one, *_) = [exemplar for series in found for exemplar in series["exemplars"]]
    assert one["labels"]["trace_id"] in traces
    assert float(one["value"]) == 100_000
