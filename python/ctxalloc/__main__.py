"""``python -m ctxalloc``: see ``_command``."""

import sys

from ctxalloc._command import main

sys.exit(main())
