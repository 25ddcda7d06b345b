"""Processes that die with their parent, also if it ended before they could check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from baton.runtime.process import descendants
from tests.support.processes import wait_until_exited

CHILD = (
    "import time; from baton.runtime.process import die_with_parent; die_with_parent(); "
    "print('up', flush=True); time.sleep(60)"
)

PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}], env=dict(os.environ, BATON_PARENT_PID=str(os.getpid())))
"""


def test_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(child=CHILD)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    (child,) = descendants(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    wait_until_exited([child])


def test_child_exits_if_its_parent_has_already_ended() -> None:
    environment = {**os.environ, "BATON_PARENT_PID": str(2**22 + 1)}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=20, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""


def test_parent_variable_is_removed_from_the_environment() -> None:
    code = "import os, baton.runtime.process as p; p.die_with_parent(); print(p.PARENT_VARIABLE in os.environ)"
    environment = {**os.environ, "BATON_PARENT_PID": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_process_that_has_ended_has_no_descendants() -> None:
    assert descendants(2**22 + 1) == []


def test_lasting_imports_are_excluded_from_garbage_collection_and_other_objects_are_not() -> None:
    code = """
import gc, weakref
from baton.runtime.process import lasting_imports
try:
    with lasting_imports():
        import fractions
        off = not gc.isenabled()
        import no_such_module
except ImportError:
    pass
class Cycle: pass
later = Cycle()
later.itself, gone = later, weakref.ref(later)
del later
gc.collect()
print(off, gc.isenabled(), any(made is fractions.Fraction for made in gc.get_objects()), gone() is None)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, text=True)
    assert done.stdout == "True True False True\n", done.stderr
