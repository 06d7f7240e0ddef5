"""A picture service whose routes run under handlers of their own, and a demo that proves it on real pictures.

``make demo-handlers`` (``python -m examples.service``) starts it, posts it pictures from many clients at once, asks
every array made on the way whose memory it lives in, compares every answer with one made under NumPy's default handler,
and draws what it saw into target/demo/demo.png (the README shows a copy of it, docs/images/demo.png). The service alone
is ``python -m examples.service.server --port 8000``.

To read, or to copy, in this order:

- ``routes``: the table route -> handler, and how a command line changes it
- ``processing``: NumPy and SciPy on pictures; knows nothing of handlers
- ``pipelines``: what a route does, step by step: in the coroutine, in threads, in a Rust future
- ``audit``: whose memory is this array? counted
- ``app``, ``server``: Starlette around it with ``ctxalloc.asgi.AllocatorMiddleware``, on uvicorn
- ``pictures``, ``reference``, ``client``: what is posted, what must come back, and who posts it
- ``control``: a switcher without contexts, which goes wrong; the check must notice
- ``progress``, ``report``, ``figure``, ``demo``: what is shown
"""
