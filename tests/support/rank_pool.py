"""Real processes as the ranks of a worker, controlled by a test.

    with RankPool(2) as pool:
        with pool.load(model_dir, tp=2) as runner:      # a RemoteRunner: the leader's runner, over a pipe
            runner.step_logits(plan)

Processes live as long as the pool and load one model after another. They are forks of one process with torch and
transformers (tests/support/forks.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import BatonError, InvariantError, RankLost
from baton.core.kv_layout import KVLayout
from baton.core.ranks import Ranks
from baton.core.step import StepOutcome, StepPlan
from baton.engine.draft_tokens_device import Queued
from baton.engine.launches import Launches
from baton.engine.loading import load_runner
from baton.engine.lockstep import FollowerChannel, LeaderChannel
from baton.engine.options import EngineOptions
from baton.engine.parallel import open_store
from baton.engine.runner import Runner
from baton.transfer.rendezvous import EdgeStore
from tests.support.device_choice import decide
from tests.support.forks import start

ANSWER_TIMEOUT_S = 60.0
LOST_EXIT_CODE = 9


@dataclass(frozen=True)
class Facts:
    rank: int
    pids: tuple[int, ...]
    layout: KVLayout
    local_layout: KVLayout
    kv_shapes: tuple[tuple[int, ...], ...]
    num_blocks: int
    max_model_len: int
    parameter_bytes: int


@dataclass(frozen=True)
class Lost:
    """A rank ended because another was lost; `at` is when it detected that, on the clock shared by all processes."""

    message: str
    at: float = 0.0


class RemoteRunner:
    """The leader's runner, for tests/support/engine_driver.py. `facts` has one entry per rank."""

    launches_ahead = False

    def __init__(self, pipe: Connection, facts: list[Facts]) -> None:
        self.facts = facts
        self.layout, self.num_blocks = facts[0].layout, facts[0].num_blocks
        self._pipe = pipe

    def step_logits(self, plan: StepPlan) -> list[Tensor]:
        logits: list[Tensor] = call(self._pipe, "step_logits", plan)
        return logits

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome: StepOutcome = call(self._pipe, "step", plan)
        return outcome

    def launch(self, plan: StepPlan, draft_tokens: Queued | None = None) -> None:
        call(self._pipe, "launch", plan if draft_tokens is None else (plan, draft_tokens))

    def collect(self) -> StepOutcome:
        outcome: StepOutcome = call(self._pipe, "collect", None)
        return outcome


class RankPool:
    def __init__(self, size: int) -> None:
        self._store = EdgeStore("127.0.0.1")
        self._rounds = 0
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(size):
            mine, theirs = multiprocessing.Pipe()
            with theirs:
                command = [sys.executable, "-m", "tests.support.rank_process"]
                self.processes.append(start(command, env={**os.environ}, stdin=theirs.fileno()))
            mine.send_bytes(multiprocessing.current_process().authkey)
            self.pipes.append(mine)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self.processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._store.close()

    def start(self, model_dir: Path | list[Path], tp: int, *, on_device: bool = False, **options: Any) -> list[Any]:
        """Loads a model on the first `tp` processes; returns each one's reply: Facts, an error, or Lost. An option (or
        the directory) given as a list has one value per rank. `on_device`: tokens are chosen and fed as on a GPU, as
        tensors; with torch's kernels."""
        self._rounds += 1
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory_bytes": 8 << 20}
        settings = {**defaults, **options, "model_dir": model_dir}
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        env["TORCHELASTIC_RESTART_COUNT"] = str(self._rounds)
        for rank, pipe in enumerate(self.pipes[:tp]):
            mine = {name: value[rank] if isinstance(value, list) else value for name, value in settings.items()}
            pipe.send(("load", env, Ranks(rank, tp, rank, tp), EngineOptions(**mine), on_device))
        answers = [receive(pipe) for pipe in self.pipes[:tp]]
        for pipe, found in zip(self.pipes, answers, strict=False):
            if isinstance(found, Exception):
                pipe.send(("heard",))
        return answers

    @contextlib.contextmanager
    def load(self, model_dir: Path, tp: int, **options: Any) -> Iterator[RemoteRunner]:
        answers = self.start(model_dir, tp, **options)
        for found in answers:
            if isinstance(found, Exception):
                raise found
        try:
            yield RemoteRunner(self.pipes[0], answers)
        finally:  # a failed assertion leaves the ranks to the next test
            call(self.pipes[0], "unload", None)
            for pipe in self.pipes[1:tp]:
                assert receive(pipe) == "unloaded"


def receive(pipe: Connection, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Returns the next message of a rank; Lost("") if the rank ended without one."""
    if not pipe.poll(timeout_s):
        raise TimeoutError("a rank does not answer")
    try:
        return pipe.recv()
    except EOFError:
        return Lost("")


def call(pipe: Connection, name: str, argument: Any) -> Any:
    pipe.send((name, argument))
    found = receive(pipe)
    if isinstance(found, Exception):
        raise found
    return found


def rank_process(pipe: Connection) -> None:
    """A rank, until its pool ends."""
    torch.set_num_threads(1)
    while (message := pipe.recv())[0] == "load":
        _, env, ranks, options, on_device = message
        try:
            _serve(pipe, env, ranks, options, on_device)
        except BatonError as error:
            pipe.send(type(error)(error.message))
    pipe.close()
    os._exit(0)


def _serve(pipe: Connection, env: dict[str, str], ranks: Ranks, options: EngineOptions, on_device: bool) -> None:
    failed = threading.Event()

    def lost(error: RankLost) -> None:
        if failed.is_set():
            return
        pipe.send(Lost(error.message, time.monotonic()))
        os._exit(LOST_EXIT_CODE)

    store: Any = open_store(env)
    channel: LeaderChannel | FollowerChannel
    if ranks.leads:
        channel = LeaderChannel.open(store, ranks.size, options.host, lost)
    else:
        channel = FollowerChannel.open(store, ranks.rank, lost)
    pids = channel.pids if isinstance(channel, LeaderChannel) else ()
    try:
        runner = load_runner(options, ranks=ranks, store=store)
    except BatonError as error:
        failed.set()
        pipe.send(type(error)(error.message))
        pipe.recv()  # lets the other ranks report their own errors before they detect that this one ended
        channel.close()
        return
    if on_device:
        runner.launches = Launches(runner.kv.device, runner.group, decide)
    channel.serving()
    pipe.send(_facts(runner, ranks.rank, pids))
    if isinstance(channel, FollowerChannel):
        try:
            channel.follow(runner.step)
        except RankLost:
            time.sleep(1.0)
            raise
        channel.close()
        pipe.send("unloaded")
        return
    runner.lead(channel.send)
    while (request := pipe.recv())[0] != "unload":
        try:
            call, argument = getattr(runner, request[0]), request[1]
            arguments = argument if isinstance(argument, tuple) else (argument,)
            pipe.send(call() if argument is None else call(*arguments))
        except InvariantError as error:
            pipe.send(InvariantError(error.message))
        except RankLost:
            time.sleep(1.0)  # meanwhile `lost` reports the cause and ends this process
            raise
    channel.stop("unloaded")
    pipe.send("unloaded")


def _facts(runner: Runner, rank: int, pids: tuple[int, ...]) -> Facts:
    shapes = tuple(tuple(keys.shape) for keys, _ in runner.kv.layers)
    return Facts(
        rank,
        pids,
        runner.layout,
        runner.kv.layout,
        shapes,
        runner.num_blocks,
        runner.max_model_len,
        runner.parameter_bytes,
    )
