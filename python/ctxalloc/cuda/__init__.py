"""CUDA's pinned and managed memory for NumPy: copies to and from a device that do not block.

Nothing is loaded until something here is called, or a handler named ``cuda_host`` or ``cuda_managed`` is looked up.
Then it is the driver, ``libcuda.so.1``; the CUDA toolkit is not needed.

- select for NumPy: ``use``; make strategies: ``Pool``, ``Arena`` (for ``ctxalloc.request(strategy=...)``)
- ask: ``kind_of``, ``device``, ``info``, ``is_available``
- until a device is done: ``keep``, ``capturing``, ``settle``, ``configure``
- exchange without a copy: ``as_cuda`` gives ``__cuda_array_interface__`` and DLPack, ``asarray`` takes them
"""

from ctxalloc.cuda._array import Array, as_cuda
from ctxalloc.cuda._exchange import asarray
from ctxalloc.cuda._memory import Arena, CudaKind, Pool, handler, kind_of, use
from ctxalloc.cuda._memory import register_default as _register_default  # noqa: F401 - src/python/lookup.rs calls it
from ctxalloc.cuda._state import capturing, configure, device, info, is_available, keep, settle

__all__ = [
    "Arena",
    "Array",
    "CudaKind",
    "Pool",
    "as_cuda",
    "asarray",
    "capturing",
    "configure",
    "device",
    "handler",
    "info",
    "is_available",
    "keep",
    "kind_of",
    "settle",
    "use",
]
