# ruff: noqa: PLC0415 - each service has libraries of its own
"""Two services of others' making: recorded under load, advised, and measured again as advised, beside NumPy's default.

    make bench-advised
    python benches/advised.py --service titiler --requests 300 --rounds 7

titiler serves pictures: tiles, previews and statistics of a GeoTIFF of 4096 x 4096 in three bands, by FastAPI and
uvicorn. D-Tale serves a DataFrame of 300,000 rows and 12 columns: pages, descriptions, histograms, correlations and
charts, by Flask. Nothing of them is changed but the middleware around the application; without advice there is none,
and ctxalloc is not imported.

Each measurement is a server in a process of its own that six clients ask over HTTP, as many as the connections that a
browser opens to one server: a map's tiles are asked for together. As advised and without advice alternate, in another
order each round. What a round takes counts from the first request after those that warm it up: processor time, page
faults, and the largest RSS. The ratio is that of the medians, with the smallest and the largest of the rounds' own
ratios.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

CLIENTS = 6
"""Unless `--clients` says how many."""
WARM_UP = 2
"""How often each request is made before anything is measured."""


# ---- the services: these functions run in the server


def titiler(folder: Path) -> Any:
    """The application of titiler.application, and a picture for it."""
    from titiler.application.main import app

    if not (folder / "picture.tif").exists():
        picture(folder / "picture.tif")
    return app


def picture(path: Path) -> None:
    """Waves and noise, as a cloud-optimized GeoTIFF."""
    import numpy as np
    import rasterio
    from rasterio.transform import from_bounds

    size = 4096
    rng = np.random.default_rng(1)
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / 100
    bands = np.stack([np.sin(x * (n + 1)) * np.cos(y) * 90 + 120 + rng.normal(0, 8, x.shape) for n in range(3)])
    place = {"crs": "EPSG:3857", "transform": from_bounds(0, 0, 400_000, 400_000, size, size)}
    with rasterio.open(
        path, "w", driver="COG", width=size, height=size, count=3, dtype="uint8", compress="deflate", **place
    ) as out:
        out.write(bands.clip(0, 255).astype(np.uint8))


def dtale(_folder: Path) -> Any:
    """The application of D-Tale, and a table in it."""
    import numpy as np
    import pandas as pd
    from dtale.app import build_app
    from dtale.views import startup

    rows, rng = 300_000, np.random.default_rng(2)
    table = pd.DataFrame({f"c{n}": rng.normal(n, 1 + n, rows) for n in range(9)})
    table["group"] = rng.integers(0, 40, rows)
    table["when"] = pd.date_range("2020-01-01", periods=rows, freq="min")
    table["text"] = pd.Series(rng.choice(["red", "green", "blue", "none"], rows), dtype="category")
    app = build_app(reaper_on=False)
    with app.app_context():
        startup("", data=table, data_id="1", ignore_duplicate=True)
    return app


def serve_asgi(app: Any) -> None:
    """Serves until standard input ends."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))

    def ready() -> None:
        while not server.started:
            time.sleep(0.01)
        say(server.servers[0].sockets[0].getsockname()[1])
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=ready).start()
    server.run()


def serve_wsgi(app: Any) -> None:
    """Serves until standard input ends."""
    import logging

    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    say(server.server_port)
    sys.stdin.read()
    server.shutdown()
    thread.join()


def say(port: int) -> None:
    print(port, flush=True)


class Service(NamedTuple):
    """How a service is made, served and asked."""

    made: Callable[[Path], Any]
    serve: Callable[[Any], None]
    middleware: str
    attribute: str | None
    """Of the application, which the middleware goes around; None: the application itself."""
    routes: tuple[str, ...]
    """The patterns of what is asked for: what the middleware is to know the requests by."""
    paths: Callable[[Path, random.Random], list[str]]
    """One request of each kind."""


def of_titiler(folder: Path, rng: random.Random) -> list[str]:
    url = f"url={quote(str(folder / 'picture.tif'))}"
    zoom = 10
    x, y = rng.randrange(512, 522), rng.randrange(502, 512)
    return [
        f"/cog/tiles/WebMercatorQuad/{zoom}/{x}/{y}.png?{url}",
        f"/cog/tiles/WebMercatorQuad/{zoom}/{x}/{y}.png?{url}&tilesize=512&rescale=0,255&resampling=bilinear",
        f"/cog/preview.png?{url}&max_size=1024",
        f"/cog/statistics?{url}&max_size=1024",
    ]


def of_dtale(_folder: Path, rng: random.Random) -> list[str]:
    column, start = f"c{rng.randrange(9)}", rng.randrange(250_000)
    chart = urlencode({"x": "group", "y": json.dumps([column]), "agg": "mean", "query": f"c1 > {rng.random()}"})
    return [
        f"/dtale/data/1?{urlencode({'ids': json.dumps([f'{start}-{start + 100}'])})}",
        f"/dtale/describe/1?col={column}",
        f"/dtale/column-analysis/1?{urlencode({'col': column, 'type': 'histogram', 'bins': 20})}",
        "/dtale/correlations/1",
        f"/dtale/chart-data/1?{chart}",
    ]


SERVICES = {
    "titiler": Service(
        titiler,
        serve_asgi,
        "asgi",
        None,
        ("GET /cog/tiles/{matrix}/{z}/{x}/{y}", "GET /cog/preview.png", "GET /cog/statistics"),
        of_titiler,
    ),
    "dtale": Service(
        dtale,
        serve_wsgi,
        "wsgi",
        "wsgi_app",
        tuple(
            f"GET /dtale/{what}/{{table}}"
            for what in ("data", "describe", "column-analysis", "correlations", "chart-data")
        ),
        of_dtale,
    ),
}


def serve(service: Service, kind: str, folder: Path) -> None:
    """A server of this kind."""
    app = service.made(folder)
    inner = app if service.attribute is None else getattr(app, service.attribute)
    if kind == "default":
        service.serve(app)
        return
    import ctxalloc

    if kind == "advised":
        names: dict[str, Any] = {"app": inner}
        exec((folder / "advice.py").read_text().replace("ctxalloc.asgi", f"ctxalloc.{service.middleware}"), names)  # noqa: S102
        outer, recording = names["app"], contextlib.nullcontext()
    else:
        from importlib import import_module

        from ctxalloc import strategies

        middleware = import_module(f"ctxalloc.{service.middleware}").AllocatorMiddleware
        # As they are: the C heap, which NumPy's default takes its memory from.
        outer = middleware(inner, routes=dict.fromkeys(service.routes, ctxalloc.request(strategy=strategies.System())))
        recording = ctxalloc.record(folder / "service.trace", one_in=1, share=1.0)
    with recording:
        if service.attribute is None:
            service.serve(outer)
        else:
            setattr(app, service.attribute, outer)
            service.serve(app)


# ---- the clients


class Took(NamedTuple):
    """What a round took."""

    cpu: float
    faults: int
    peak_rss: int
    seconds: float


@contextlib.contextmanager
def server(name: str, kind: str, folder: Path) -> Iterator[tuple[int, int]]:
    """A server of this kind: its process and its port."""
    words = [sys.executable, __file__, "--service", name, "--kind", kind, "--folder", str(folder)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server of {name} did not begin")
        yield process.pid, int(line)
        process.stdin.close()
    if process.returncode != 0:
        raise SystemExit(f"the server of {name} ended with {process.returncode}")


def ask(port: int, paths: list[str]) -> None:
    """Asks for these, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for path in paths:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise SystemExit(f"{path} was answered with {answer.status}: {body[:300]!r}")
    connection.close()


def load(service: Service, port: int, folder: Path, requests: int, seed: int, *, clients: int) -> None:
    """Asks for so many by so many clients together."""
    rng = random.Random(seed)
    paths: list[str] = []
    while len(paths) < requests:
        paths += service.paths(folder, rng)
    failed: list[BaseException] = []

    def client(part: list[str]) -> None:
        try:
            ask(port, part)
        except BaseException as error:  # noqa: BLE001 - told by who waits
            failed.append(error)

    threads = [threading.Thread(target=client, args=(paths[at:requests:clients],)) for at in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def used(pid: int) -> tuple[float, int]:
    """Processor seconds and page faults of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks, int(fields[7])


def peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much a process had at most")


def measured(name: str, kind: str, folder: Path, requests: int, clients: int) -> Took:
    """A round."""
    service = SERVICES[name]
    with server(name, kind, folder) as (pid, port):
        warm = WARM_UP * len(service.paths(folder, random.Random(0)))
        load(service, port, folder, warm, 1, clients=clients)
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
        (cpu, faults), began = used(pid), time.monotonic()
        load(service, port, folder, requests, 2, clients=clients)
        after = used(pid)
        return Took(after[0] - cpu, after[1] - faults, peak_rss(pid), time.monotonic() - began)


def bench(name: str, requests: int, rounds: int, clients: int, folder: Path) -> None:
    """Records, asks for advice, follows it, measures."""
    with server(name, "recorded", folder) as (_, port):
        # As a day has quiet times and busy ones: what a request waits for shows where it runs by itself.
        load(SERVICES[name], port, folder, requests // 3, 4, clients=1)
        load(SERVICES[name], port, folder, requests, 3, clients=clients)
    words = ["-m", "ctxalloc", "recommend", f"{folder}/service.trace", "--rounds", str(rounds), "--json"]
    told = json.loads(subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE).stdout)
    print(f"\n{name}, {clients} clients: {told['requests']} requests were recorded")
    for route in told["routes"]:
        print(f"  {route['route']}: {route['verdict']} {route['strategy']}: {route['reason']}")
    if told["at_once"] is not None:
        print(f"  at once: {told['at_once']['reason']}")
    if told["together"] is not None:
        print(f"  together: {json.dumps({arm: len(part) for arm, part in told['together']['rounds'].items()})}")
    (folder / "advice.py").write_text(told["snippets"]["python"])
    found: dict[str, list[Took]] = {"default": [], "advised": []}
    for number in range(rounds):
        for kind in sorted(found, reverse=number % 2 == 0):
            found[kind].append(measured(name, kind, folder, requests, clients))
    for field, what, unit in (
        ("cpu", "processor time, s", 1.0),
        ("faults", "page faults", 1.0),
        ("peak_rss", "largest RSS, MiB", float(1 << 20)),
        ("seconds", "time, s", 1.0),
    ):
        before, after = ([getattr(one, field) / unit for one in found[kind]] for kind in ("default", "advised"))
        one, other = statistics.median(before), statistics.median(after)
        ratios = [late / early for early, late in zip(before, after, strict=True)]
        spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  {what:18} {one:.5g} -> {other:.5g}  ({other / one:.3f}x; {spread})", flush=True)


def main() -> None:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description="Record, recommend, apply, measure: services of others' making.")
    parser.add_argument("--service", choices=SERVICES, action="append")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        serve(SERVICES[options.service[0]], options.kind, options.folder)
        return
    for name in options.service or SERVICES:
        with tempfile.TemporaryDirectory() as folder:
            bench(name, options.requests, options.rounds, options.clients, Path(folder))


if __name__ == "__main__":
    main()
