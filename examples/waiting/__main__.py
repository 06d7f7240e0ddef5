"""``python -m examples.waiting`` is the demo."""

import asyncio
import sys

from .demo import main

if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
