"""torch's store with a limit for each answer: its own calls wait in native code, some of them for ever, where no
signal's handler runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Store(Protocol):
    """What of torch's TCPStore is used. Each raises RuntimeError when the store is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class BoundedStore:
    """A store that answers within `answer_s` or counts as gone: each call is made on a thread of its own, and one that
    is not answered is left behind. All raise RuntimeError when the store is gone."""

    def __init__(self, store: Store, answer_s: float) -> None:
        self._store, self._answer_s = store, answer_s
        self._silent = False

    def set(self, key: str, value: str, /) -> None:
        self._ask(lambda: self._store.set(key, value))

    def check(self, keys: list[str], /) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def read(self, key: str, /) -> str:
        """The value of a key, empty where it has none: torch would wait until somebody sets it."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "")

    def _ask(self, call: Callable[[], _T]) -> _T:
        if self._silent:  # the one connection is still busy with the last call
            raise RuntimeError("the store does not answer")
        answers: SimpleQueue[tuple[_T | None, Exception | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=ask, name="store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._answer_s)
        except Empty:
            self._silent = True
            raise RuntimeError(f"the store has not answered within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # what `call` returned
