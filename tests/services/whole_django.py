"""What `test_whole_django.py` has served: views of both kinds that pass a limit by objects, arrays, native memory."""

import asyncio
import ctypes
from typing import Any

import django
import numpy as np
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import path

import ctxalloc

LARGE = ctxalloc.request(whole=True, limit_bytes=32 * ctxalloc.MiB)
BEYOND = 100 * ctxalloc.MiB

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def take(what: str, size_bytes: int) -> Any:
    """So many bytes at once."""
    if what == "array":
        return np.ones(size_bytes, np.uint8)
    if what == "object":
        return bytearray(size_bytes)
    block = libc.malloc(size_bytes)
    if not block:
        raise MemoryError
    libc.free(block)
    return None


def fill(kind: str, held: list[bytes]) -> None:
    """As much of the limit as a turn of the loop takes."""
    size_bytes = 300 if kind == "small" else 300_000
    held.extend(bytes(size_bytes) for _ in range(ctxalloc.MiB // size_bytes))


def health(_: HttpRequest) -> HttpResponse:
    return HttpResponse("")


def large(_: HttpRequest, what: str) -> HttpResponse:
    return HttpResponse(str(take(what, BEYOND)))


async def async_large(_: HttpRequest, what: str) -> HttpResponse:
    await asyncio.sleep(0)
    return HttpResponse(str(take(what, BEYOND)))


def greedy(_: HttpRequest, kind: str) -> HttpResponse:
    held: list[bytes] = []
    while True:
        fill(kind, held)


async def async_greedy(_: HttpRequest, kind: str) -> HttpResponse:
    held: list[bytes] = []
    while True:
        fill(kind, held)
        await asyncio.sleep(0)


def honest(_: HttpRequest, kind: str) -> HttpResponse:
    held: list[bytes] = []
    fill(kind, held)
    return HttpResponse(str(len(held)))


async def async_honest(_: HttpRequest, kind: str) -> HttpResponse:
    held: list[bytes] = []
    for _turn in range(4):
        fill(kind, held)
        await asyncio.sleep(0)
    return HttpResponse(str(len(held)))


settings.configure(
    SECRET_KEY="test",
    ALLOWED_HOSTS=["*"],
    LOGGING_CONFIG=None,
    ROOT_URLCONF=(
        path("health", health),
        path("large/<what>", large),
        path("async_large/<what>", async_large),
        path("greedy/<kind>", greedy),
        path("async_greedy/<kind>", async_greedy),
        path("honest/<kind>", honest),
        path("async_honest/<kind>", async_honest),
    ),
    MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", "django.middleware.common.CommonMiddleware"],
    CTXALLOC={
        "default": ctxalloc.request(whole=True, limit_bytes=8 * ctxalloc.MiB),
        "routes": {"/health": None, **dict.fromkeys(("/large/{what}", "/async_large/{what}"), LARGE)},
    },
)
django.setup()

from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402

service = get_asgi_application()
wsgi_service = get_wsgi_application()
