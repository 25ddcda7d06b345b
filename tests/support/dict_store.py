"""An in-process replacement for torchrun's store, for the ranks of a worker."""

from __future__ import annotations

import threading


class DictStore:
    """`get` waits for a key, as in the real store."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, 5.0):
                raise RuntimeError("wait timeout")
            return self._values[key].encode()
