"""The store of a job over several nodes, without a network."""

from __future__ import annotations


class FakeStore:
    """The marks that nodes set."""

    def __init__(self, *marks: str) -> None:
        self.marks, self.looks = list(marks), 0

    def set(self, key: str, value: str, /) -> None:
        self.marks.append(key)

    def check(self, keys: list[str], /) -> bool:
        self.looks += 1
        return all(key in self.marks for key in keys)


class Gone(FakeStore):
    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection was closed")
