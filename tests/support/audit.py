"""Records what every Python process of a cluster does, with an audit hook (PEP 578) that writes to a file. Start the
cluster with `env=audit.environment(folder)`, note `since = time.time()`, then read `audit.events(folder, since)`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_FOLDER = "BATON_TEST_AUDIT"
_SITE = """
import os, sys, sysconfig, time

_folder = os.environ["BATON_TEST_AUDIT"]


def _begin():
    global _fd
    _fd = os.open(f"{_folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


_begin()
os.register_at_fork(after_in_child=_begin)
_WATCHED = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.bind",
            "socket.connect", "open"}
_OWN = tuple({*sysconfig.get_paths().values(), sys.base_prefix})


def _hook(event, args):
    if event in _WATCHED:
        first = args[0] if args else ""
        if event == "open" and (isinstance(first, int) or os.fsdecode(first).startswith(_OWN)):
            return
        said = args[1:] if event.startswith("socket.") else args
        text = f"{time.time():.3f} {event} {said!r}".encode("utf-8", "backslashreplace")
        os.write(_fd, text[:1000].replace(b"\\n", b" ") + b"\\n")


sys.addaudithook(_hook)
"""


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    pid: int
    name: str
    args: str


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of the processes to be watched: each loads the hook before anything else."""
    (folder / "site").mkdir(parents=True)
    (folder / "events").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE)
    root = Path(__file__).parents[2]
    path = (str(folder / "site"), str(root), *filter(None, (os.environ.get("PYTHONPATH"),)))
    return {_FOLDER: str(folder / "events"), "PYTHONPATH": os.pathsep.join(path)}


def events(folder: Path, since: float) -> list[Event]:
    """Returns the events of all processes from `since` (Unix seconds) on."""
    found = []
    for file in (folder / "events").iterdir():
        for line in file.read_text(errors="replace").splitlines():
            at, name, args = line.split(" ", 2)
            found.append(Event(float(at), int(file.name), name, args))
    return sorted((event for event in found if event.at >= since), key=lambda event: event.at)


def watched(folder: Path) -> set[int]:
    """The processes that have loaded the hook."""
    return {int(file.name) for file in (folder / "events").iterdir()}
