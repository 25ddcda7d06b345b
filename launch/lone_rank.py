"""A worker's only rank, started as torchrun would start it, without torchrun: it has nobody to meet, so it needs no
store and no rendezvous, and its agent no torch of its own (2 s of a processor at every start, and 0.2 GB for as long as
it runs). Where an agent imports torch after all, it is the rank's: forked (launch.forked_rank), both have it once.

Whatever else is asked of torchrun, torchrun does: `lone_rank` knows only the flags of `Plan.torchrun_flags` and of the
scripts beside this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.process import ERROR_FILE_VARIABLE

_ANY = ("",)
# What may be said of a job of one rank, and how; where the ranks of a job meet does not matter to one.
_FLAGS = {
    "--nnodes": ("1", "1:1"),
    "--node-rank": ("0",),
    "--nproc-per-node": ("1",),
    "--max-restarts": ("0",),
    "--master-addr": _ANY,
    "--master-port": _ANY,
}
_TORCHRUNS_OWN = ("PET_", "PYTHON_EXEC")
"""Variables that say more to torchrun than its flags."""


@dataclass(frozen=True, slots=True)
class LoneRank:
    """`python -m module *arguments`."""

    module: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """`code` is below 0 for a signal, as in `subprocess`; `reason` is what the rank recorded, if it did."""

    pid: int
    code: int
    reason: str


def lone_rank(argv: Sequence[str], environment: Mapping[str, str]) -> LoneRank | None:
    """The rank of a torchrun command line, if it is the only one of its job and nothing else is asked for. Pure."""
    if any(name.startswith(_TORCHRUNS_OWN) for name in environment):
        return None
    words = list(argv)
    while words and words[0] != "-m":
        name, equals, value = words.pop(0).partition("=")
        if not equals and words:
            value = words.pop(0)
        allowed = _FLAGS.get(name.replace("_", "-"), ())
        if not value or (allowed is not _ANY and value not in allowed):
            return None
    if len(words) < 2 or words[1].startswith("-"):
        return None
    return LoneRank(words[1], tuple(words[2:]))


class Running(Protocol):
    """A child process; `wait` returns its exit code, below 0 for a signal."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...


Start = Callable[[LoneRank, Mapping[str, str]], Running]
"""Starts a rank in a session of its own, with that added to the environment. Raises OSError."""


def executed(rank: LoneRank, environment: Mapping[str, str]) -> Running:
    """A rank that imports for itself."""
    command = [sys.executable, "-u", "-m", rank.module, *rank.arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)


def run(rank: LoneRank, directory: str, start: Start = executed) -> RankEnd:
    """Runs it to its end; the reason of a bad end goes through a file in `directory`, which may be there from an
    earlier life. Raises OSError when it cannot be started."""
    error_file = Path(directory) / "error.json"
    error_file.unlink(missing_ok=True)
    process = start(rank, {**_environment(), ERROR_FILE_VARIABLE: str(error_file)})
    code = process.wait()
    if code != 0:  # what it started, such as a compiler, ends with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    return RankEnd(process.pid, code, _recorded(error_file))


def _environment() -> dict[str, str]:
    """What torchrun says to a rank, but for the address of a store."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    job = {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none"}
    return {**ranks, **sizes, **job, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def _recorded(error_file: Path) -> str:
    """As `baton.process.record_error` wrote it; empty when the rank wrote nothing, or was killed while it did."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(error_file.read_text(encoding="utf-8"))["message"]["message"])
    return ""
