"""What tests call in the child process of a BodyParser, which imports this module and not that of the tests."""

from __future__ import annotations

import os
import time

from tests.support.limits import HANG_S


def pid_of(body: bytes) -> int:
    return os.getpid()


def hang(body: bytes) -> None:
    time.sleep(HANG_S)
