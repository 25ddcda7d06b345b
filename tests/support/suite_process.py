"""A test process of `make test`, a fork of the process of pytest that starts it (tests/support/forks.py): forks its own
server, and runs the code that xdist starts a test process with, the last word of its command line, as `python -c` does:
a process that multiprocessing starts would otherwise run this module first."""

from __future__ import annotations

import sys
import types

from tests.support import forks

forks.fork_server(forks.fork_children)
code, sys.argv = sys.argv[-1], ["-c"]
sys.modules["__main__"] = types.ModuleType("__main__")
exec(code, sys.modules["__main__"].__dict__)
