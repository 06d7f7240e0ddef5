"""``python -m ctxalloc`` begins with the current folder first on ``sys.path``: the program's modules, not ours.

Imported before anything else of the package, it puts the interpreter's folder there, as the console script has it. Else
a ``resource.py`` in the current folder would be imported by ctxalloc itself. ``_program`` puts the program's folder
there.
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]  # as long as its module is looked for
    and not sys.flags.safe_path
    and ("-mctxalloc" in sys.orig_argv or ("-m", "ctxalloc") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))
):
    sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120 - pathlib would be imported for it
