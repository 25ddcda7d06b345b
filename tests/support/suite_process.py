"""A test process of `make test`, a fork of the process of pytest that starts it (tests/support/forks.py): forks its own
server, and runs the code that xdist starts a test process with, the last word of its command line."""

from __future__ import annotations

import sys

from tests.support import forks

forks.fork_server(forks.fork_children)
code, sys.argv = sys.argv[-1], ["-c"]
exec(code, sys.modules["__main__"].__dict__)
