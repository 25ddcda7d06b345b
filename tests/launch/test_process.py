"""Processes that die with their parent, also when it was gone before they could look."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from baton.process import descendants
from tests.support.processes import wait_gone

CHILD = (
    "import time; from baton.process import die_with_parent; die_with_parent(); print('up', flush=True); time.sleep(60)"
)

PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}], env=dict(os.environ, BATON_PARENT_PID=str(os.getpid())))
"""


def test_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(child=CHILD)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    (child,) = descendants(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    wait_gone([child])


def test_exits_at_once_when_the_parent_is_gone_already() -> None:
    environment = {**os.environ, "BATON_PARENT_PID": str(2**22 + 1)}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=20, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""


def test_takes_its_variable_out_of_the_environment() -> None:
    code = "import os, baton.process as p; p.die_with_parent(); print(p.PARENT_VARIABLE in os.environ)"
    environment = {**os.environ, "BATON_PARENT_PID": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_descendants_of_a_process_that_is_gone() -> None:
    assert descendants(2**22 + 1) == []


def test_what_is_imported_to_stay_is_not_searched_for_garbage_and_all_else_is() -> None:
    code = """
import gc, weakref
from baton.process import lasting_imports
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
