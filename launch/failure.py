"""The box that ends the output of a failed job: which rank or member failed first, where, why, and what to do. Pure.

The agent prints it for the ranks of its node, and records the failure for `baton up`, which prints it again last.
"""

from __future__ import annotations

import contextlib
import signal
import textwrap
from dataclasses import dataclass

from baton.runtime.options import EXIT_STARTUP_ERROR
from baton.runtime.process import EXIT_RANK_LOST

_WIDTH = 112  # of the text in a box; a longer word, such as a path, is not broken
_LABEL = 11
_TOP, _SIDE, _BOTTOM = "┌─ ", "│ ", "└"


@dataclass(frozen=True, slots=True)
class Failure:
    """`who` is the member's name; `role` names its rank too; `code` is below 0 for a signal, as in `subprocess`;
    `by_agent`: its agent killed it."""

    who: str
    role: str
    host: str
    code: int
    error: str
    by_agent: bool = False

    @property
    def advice(self) -> str:
        """What to do, in one sentence."""
        return _ADVICE if self.by_agent else _BY_CODE.get(self.code, _ADVICE)


_ADVICE = "read the log above this box from its first error on; a supervisor restarts the worker"
_CRASH = "native code crashed: the stack is in the log above this box; report it with the model and `baton version`"
_BY_CODE: dict[int, str] = {
    EXIT_STARTUP_ERROR: "fix the cause that the error names, then restart; a retry would fail the same way",
    EXIT_RANK_LOST: "find the rank that the error names in the log of its own node",
    2: "correct the command line",
    -signal.SIGKILL: "unless it was killed manually, the host ran out of memory (see `dmesg`): lower --kv-memory-gib",
    -signal.SIGTERM: "it received SIGTERM; to drain workers first, send SIGTERM to the coordinator",
    **{-number: _CRASH for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)},
}


def describe_exit(code: int) -> str:
    """Returns `exit code 1`, or the signal behind a code below 0 (subprocess) or above 128 (a shell, the agent)."""
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        if number > 0:
            return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}"


def box(failure: Failure) -> list[str]:
    """Returns the lines of the box."""
    rows = {
        "role": failure.role,
        "host": failure.host,
        "exit": describe_exit(failure.code),
        "error": " ".join(failure.error.split()),
        "what to do": failure.advice,
    }
    lines: list[str] = []
    for label, text in rows.items():
        wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{label if index == 0 else '':<{_LABEL}}{line}" for index, line in enumerate(wrapped)]
    title = f"{failure.who} failed "
    width = max(len(title), *map(len, lines))
    top = _TOP + title + "─" * (width - len(title)) + "┐"
    return [top, *(f"{_SIDE}{line:<{width}} │" for line in lines), _BOTTOM + "─" * (width + 2) + "┘"]
