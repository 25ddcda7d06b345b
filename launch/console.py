"""Timed lines on the terminal, which may close without ending the cluster; and the versions of installed packages."""

from __future__ import annotations

import contextlib
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


class Console:
    def __init__(self) -> None:
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def stage(self, who: str, event: str) -> None:
        """`   2.1 s  decode-0      joined`"""
        self.plain(f"{self.elapsed_s():7.1f} s  {who:<12}  {event}")

    def quote(self, lines: Iterable[str]) -> None:
        """Prints lines of another program's output, indented."""
        for line in lines:
            self.plain(f"             | {line}")

    def plain(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stdout, flush=True)


def shown_command() -> str:
    """Returns the command line of this process, without its API key."""
    words = sys.argv[1:]
    for number, word in enumerate(words):
        if word.startswith("--api-key="):
            words[number] = "--api-key=..."
        elif number and words[number - 1] == "--api-key":
            words[number] = "..."
    return shlex.join(["baton", *words])


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of these packages ("not installed" if one is missing) and of Python."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return {**installed, "python": platform.python_version()}
