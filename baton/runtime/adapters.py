"""The LoRA adapters of a worker: their files, loading them at every rank, and following what the coordinator requires.

The coordinator sends all adapters that a worker must have (`SetAdapters`). The worker loads those that it lacks beside
its steps, drops others between two steps once no sequence uses them, and reports what it has. Followers read the files
themselves, at the leader's order; an adapter counts as loaded when every rank has it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import AdapterFailure, AdapterSource, AdapterStates, SetAdapters
from baton.core.errors import BatonError, InvalidRequest, Unavailable
from baton.models.adapter_config import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from baton.runtime.frames import AdapterLoaded, DropAdapter, LoadAdapter
from baton.runtime.paths import open_regular

log = logging.getLogger("baton.adapters")

RANKS_LOAD_S = 60.0
"""How long the followers of a worker may take to load an adapter."""
IN_USE_RETRY_S = 0.1  # until an adapter is tried to be dropped again
MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES = 1 << 20, 8 << 30


class Engine(Protocol):
    """The adapters of one rank: baton.engine.adapters.Adapters."""

    def load(self, digest: str, config_text: bytes, weights: bytes, max_rank: int) -> None: ...

    def drop(self, digest: str) -> None: ...


def read_adapter_files(path: str) -> tuple[bytes, bytes]:
    """Returns the bytes of an adapter's config and of its weights.

    Raises:
        InvalidRequest: one of the files is missing, no regular file, or too large.
    """
    return read_adapter_config(path), read_adapter_weights(path)


def read_adapter_config(path: str) -> bytes:
    """As `read_adapter_files`, the config only."""
    directory = Path(path)
    if not os.path.isdir(directory):
        raise _invalid(f"{path[:500]}: no such directory")
    if not os.path.exists(directory / WEIGHTS_FILE) and any(directory.glob("adapter_model.*")):
        raise _invalid(f"{path[:500]}: only {WEIGHTS_FILE} is read, no pickled weights")
    return _read(directory / CONFIG_FILE, MAX_CONFIG_BYTES)


def read_adapter_weights(path: str, max_bytes: int = MAX_WEIGHTS_BYTES) -> bytes:
    """As `read_adapter_files`, the weights only; a file of more than `max_bytes` is refused before it is read."""
    return _read(Path(path) / WEIGHTS_FILE, min(max_bytes, MAX_WEIGHTS_BYTES))


def _read(file: Path, limit: int) -> bytes:
    try:
        with open_regular(file) as opened:
            if (size := os.fstat(opened.fileno()).st_size) > limit:
                raise _invalid(f"{file} has {size} bytes, more than {limit}")
            return opened.read(size)
    except OSError as error:
        raise _invalid(f"{file}: {error.strerror}") from None


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="lora_path")


def load_adapter(engine: Engine, source: AdapterSource, max_rank: int) -> None:
    """Loads an adapter at this rank. Raises BatonError with one line if it cannot."""
    try:
        config, weights = read_adapter_files(source.path)
        if adapter_digest(config, weights) != source.digest:
            raise _invalid(f"{source.path}: other files than the coordinator has read there")
        engine.load(source.digest, config, weights, max_rank)
    except (MemoryError, RuntimeError) as error:  # torch has no class of its own for a host without memory
        log.exception("adapter %s", source.path)
        reason = str(error).split("\n")[0] or "out of memory"
        raise Unavailable(f"{source.path}: {reason[:200]}") from None


class RankAdapters:
    """The adapters of all ranks, for the leader. `send` sends a frame to the followers, of which there are
    `followers`."""

    def __init__(self, own: Engine, send: Callable[[object], None] = lambda frame: None, followers: int = 0) -> None:
        self._own, self._send, self._followers = own, send, followers
        self.present: frozenset[str] = frozenset()  # digests that every rank has, also after a change of the role
        self._numbers = itertools.count(1)
        self._reports: queue.SimpleQueue[tuple[int, AdapterLoaded]] = queue.SimpleQueue()

    def load(self, source: AdapterSource, max_rank: int) -> None:
        """Loads an adapter at every rank, and waits for it; not on the event loop. Raises BatonError with one line if
        a rank cannot; then none has it."""
        load_adapter(self._own, source, max_rank)
        if self._followers:
            self._load_at_followers(source, max_rank)
        self.present |= {source.digest}

    def _load_at_followers(self, source: AdapterSource, max_rank: int) -> None:
        errors: list[str] = []
        number, missing = next(self._numbers), set(range(1, self._followers + 1))
        self._send(LoadAdapter(number, source.digest, source.path, max_rank))
        deadline = time.monotonic() + RANKS_LOAD_S
        while missing and not errors:
            try:
                rank, report = self._reports.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                late = ", ".join(f"rank {rank}" for rank in sorted(missing))
                errors.append(f"{late}: not loaded within {RANKS_LOAD_S:g} s")
                break
            if report.number == number:  # else that of an order that timed out
                missing.discard(rank)
                errors += [f"rank {rank}: {report.error}"] if report.error else []
        if errors:
            self.drop(source.digest)
            raise Unavailable(errors[0])

    def drop(self, digest: str) -> None:
        """Drops an adapter at every rank, after the steps that have begun. Called between two steps."""
        self._own.drop(digest)
        self.present -= {digest}
        if self._followers:
            self._send(DropAdapter(digest))

    def receive(self, rank: int, report: AdapterLoaded) -> None:
        """Takes a follower's report, on any thread."""
        self._reports.put((rank, report))


class FollowerAdapters:
    """The adapters of a follower, at its leader's orders. One that is dropped while it is being loaded is not kept: the
    leader gives an adapter up when another rank cannot load it, or when a rank takes too long."""

    def __init__(self, engine: Engine, report: Callable[[object], None]) -> None:
        self._engine, self._report = engine, report
        self._lock = threading.Lock()
        self._required: set[str] = set()  # digests that were ordered and not dropped

    def load(self, order: LoadAdapter) -> None:
        """Begins to load, on a thread of its own: reading may take long."""
        with self._lock:
            self._required.add(order.digest)
        threading.Thread(target=self._load, args=(order,), name="load adapter", daemon=True).start()

    def drop(self, digest: str) -> None:
        """Called between two steps."""
        with self._lock:
            self._required.discard(digest)
            self._engine.drop(digest)

    def _load(self, order: LoadAdapter) -> None:
        error = ""
        try:
            load_adapter(self._engine, AdapterSource(order.digest, order.path), order.max_rank)
        except BatonError as e:
            error = e.message
        with self._lock:
            if order.digest not in self._required:
                self._engine.drop(order.digest)
        self._report(AdapterLoaded(order.number, error))


class WorkerAdapters:
    """The adapters of a worker. `ranks` is set before the worker serves, `loaded` are the digests of those that all
    ranks have. `between_steps` runs a function between two steps, and returns when it has run; `in_use` returns the
    digests that sequences use."""

    def __init__(self, in_use: Callable[[], Collection[str]], post: Callable[[AdapterStates], None]) -> None:
        self.ranks: RankAdapters | None = None
        self.loaded: frozenset[str] = frozenset()
        self._in_use, self._post = in_use, post
        self._required = SetAdapters()
        self._changed = asyncio.Event()

    def require(self, command: SetAdapters) -> None:
        self._required = command
        self._changed.set()

    def check(self, digest: str) -> None:
        """Raises Unavailable if a request's adapter is not loaded; the coordinator then reschedules the request."""
        if digest and digest not in self.loaded:
            raise Unavailable(f"adapter {digest:.12} is not loaded at this worker", code=ErrorCode.ABANDONED)

    async def run(self, between_steps: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        """Loads and drops adapters until cancelled."""
        while True:
            await self._changed.wait()  # until the coordinator requires others
            self._changed.clear()
            required, ranks, failed = self._required, self.ranks, []
            present = frozenset[str]() if ranks is None else ranks.present
            surplus = (self.loaded | present) - {source.digest for source in required.adapters}
            kept = surplus.intersection(self._in_use())
            if ranks is not None:
                self.loaded -= surplus - kept  # first, so that no request of them is accepted any more
                for digest in surplus - kept:
                    await between_steps(partial(ranks.drop, digest))
            for source in required.adapters:
                if source.digest in self.loaded:
                    continue
                try:
                    if ranks is None:
                        raise Unavailable("this worker loads no adapters")
                    if source.digest not in ranks.present:
                        await asyncio.to_thread(ranks.load, source, required.max_rank)
                    self.loaded |= {source.digest}
                    log.info("loaded adapter %.12s from %s", source.digest, source.path)
                except BatonError as e:
                    log.error("adapter %s: %s", source.path, e.message)
                    failed.append(AdapterFailure(source.digest, e.message))
            self._post(AdapterStates(tuple(sorted(self.loaded)), tuple(failed)))
            if kept:
                asyncio.get_running_loop().call_later(IN_USE_RETRY_S, self._changed.set)
