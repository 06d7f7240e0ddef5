"""Tests with real servers, in an environment of their own: `make test-services`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
