"""``python -m examples.whole`` is the demo."""

import sys

from .demo import main

if __name__ == "__main__":
    sys.exit(main())
