"""SYCL's unified shared memory (USM): NumPy arrays that a device, dpctl and dpnp use without a copy.

::

    with ctxalloc.usm.use():                      # or ctxalloc.use("usm_shared")
        a = numpy.ones(1000)                      # lives in USM
    x = dpnp.ndarray(1000, buffer=dpnp.tensor.asarray(ctxalloc.usm.export(a)))   # no copy

It needs dpctl and a SYCL runtime, which ``pip install ctxalloc[usm]`` installs. They are loaded only when a function
here is called, or a handler named ``usm_shared``, ``usm_host`` or ``usm_device`` is looked up.

- select for NumPy: ``use``; make strategies: ``Pool``, ``Arena`` (for ``ctxalloc.request(strategy=...)``)
- arrays with ``__sycl_usm_array_interface__``: ``empty``, ``zeros``, ``asarray``, ``export``, ``from_dlpack``
- ask: ``kind_of``
- copy: ``copy``, ``copy_async``, ``Array.asnumpy``, ``Array.copy_to``
"""

from ctxalloc.usm._array import Array, empty, zeros
from ctxalloc.usm._convert import asarray, export, from_dlpack
from ctxalloc.usm._copies import copy, copy_async
from ctxalloc.usm._runtime import Arena, Pool, UsmKind, handler, kind_of, use
from ctxalloc.usm._runtime import register_defaults as _register_defaults  # noqa: F401 - src/python/lookup.rs calls it

__all__ = [
    "Arena",
    "Array",
    "Pool",
    "UsmKind",
    "asarray",
    "copy",
    "copy_async",
    "empty",
    "export",
    "from_dlpack",
    "handler",
    "kind_of",
    "use",
    "zeros",
]
