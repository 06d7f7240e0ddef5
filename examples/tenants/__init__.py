"""Two tenants on one service: the greedy one is refused with 503 while the other is served.

``python -m examples.tenants`` (``make demo``) starts the service twice, first without and then with
``ctxalloc.asgi.AllocatorMiddleware``, sends it the same load, and shows what each tenant got, what each route needed at
most, and the process's memory over time. ``app`` is the service; ``load`` starts and asks it; ``figure`` draws;
``demo`` is the whole of it. ``whole`` (``make demo-whole``) does the same with a service, ``whole_app``, that works on
JSON, pictures and rows, which no array shows.
"""
