"""Tests with libraries that need the whole request, in an environment of their own: `make test-whole`."""

import pytest

from ctxalloc import _native

if _native._whole_library() is None:
    pytest.skip("Linux with glibc, and the feature `whole`", allow_module_level=True)
