"""Slots: what stands behind ``ctxalloc.request()``.

Each is a handler that is leased to one request after the other. It waits for arrays and tasks that outlive their
request, so there are as many as requests at one time, and those that are waited for; at most ``ceiling()``.
"""

from ctxalloc._native import LeaseMetrics, ceiling, metrics, set_ceiling

__all__ = ["LeaseMetrics", "ceiling", "metrics", "set_ceiling"]
