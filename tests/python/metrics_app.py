"""A WSGI service whose requests are counted, with the page that Prometheus scrapes."""

import os
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import ctxalloc
from ctxalloc.wsgi import AllocatorMiddleware

registry = CollectorRegistry()
registry.register(ctxalloc.prometheus.Collector())


def application(environ: Any, start_response: Any) -> list[bytes]:
    if environ["PATH_INFO"] == "/metrics":
        body = generate_latest(registry)
    elif environ["PATH_INFO"] == "/work":
        np.empty(50_000, np.uint8)
        body = str(os.getpid()).encode()
    else:
        body = b"well"
    start_response("200 OK", [("content-length", str(len(body)))])
    return [body]


service = AllocatorMiddleware(application, routes={"/work": ctxalloc.request()})
