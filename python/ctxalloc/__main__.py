"""``python -m ctxalloc``: see ``_command``."""

import sys

from ctxalloc._command import main

if __name__ == "__main__":
    sys.exit(main())
