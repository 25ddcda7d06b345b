"""The store of a job over several nodes, without a network."""

from __future__ import annotations

import threading


class FakeStore:
    """The marks that nodes set."""

    def __init__(self, *marks: str) -> None:
        self.marks, self.looks = dict.fromkeys(marks, "here"), 0

    def set(self, key: str, value: str, /) -> None:
        self.marks[key] = value

    def check(self, keys: list[str], /) -> bool:
        self.looks += 1
        return all(key in self.marks for key in keys)

    def get(self, key: str, /) -> bytes:
        return self.marks[key].encode()


class Gone(FakeStore):
    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection was closed")


class Silent(FakeStore):
    """Its host has lost power: calls wait for ever, as those of torch's store do."""

    def check(self, keys: list[str], /) -> bool:
        threading.Event().wait()
        return False
