"""The handlers that are there from the start: conftest.py imports this before any test registers one."""

import ctxalloc

HANDLERS = tuple(handler.name for handler in ctxalloc.handlers())
