"""A pytest plugin: the files whose tests took the most processor time, child processes included, and the sum of all.

Unlike durations, these figures are hardly larger on a busy machine. A process counts what it used since its last test
for the file of the test that ends, so imports and fixtures count; a child process counts once it has been waited for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

_SHOWN = 20
_SENT = "processor_s"
_TIMES = pytest.StashKey["Times"]()


class Times:
    """`seconds` by file: of this process, or, in the process that starts the others, of all of them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._counted = 0.0

    def count(self, file: str) -> None:
        now = sum(os.times()[:4])
        self.seconds[file] += now - self._counted  # type: ignore[assignment]
        self._counted = now


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TIMES] = Times()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    file = item.nodeid.partition("::")[0]
    done = yield
    item.config.stash[_TIMES].count(file)
    return done


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_SENT] = dict(session.config.stash[_TIMES].seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_TIMES].seconds.update(getattr(node, "workeroutput", {}).get(_SENT, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = config.stash[_TIMES].seconds
    terminalreporter.section(f"{seconds.total():.0f} s of processor time, of which")
    for file, spent in seconds.most_common(_SHOWN):
        terminalreporter.line(f"{spent:.1f}s processor {file}")
