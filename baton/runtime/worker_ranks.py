"""The ranks of one worker as processes: how they start together, follow their leader, and end together.

Rank 0 leads: it runs the tier's worker. The other ranks only follow. All meet in the store of rank 0 (or of torchrun),
and open the lockstep channel before they load, so that a rank that fails while loading reports why to the others. A
rank lost later ends all ranks at once, from the channel's own thread: a step that waits for it would not return soon.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.core.errors import BatonError, InvariantError, RankLost, StartupError, innermost
from baton.core.ranks import Ranks
from baton.engine.device import choose_device
from baton.engine.loading import OnStage, load_runner
from baton.engine.lockstep import Channel, FollowerChannel, LeaderChannel, RankFailed
from baton.engine.options import EngineOptions
from baton.engine.parallel import leave_exit_barrier, open_store
from baton.engine.rank_peer import CONNECT_TIMEOUT_S, MEET_TIMEOUT_S
from baton.engine.runner import Runner
from baton.runtime.adapters import FollowerAdapters, RankAdapters
from baton.runtime.edge_ranks import FollowerEndpoints, WorkerEndpoints
from baton.runtime.frames import AdapterLoaded, LoadAdapter
from baton.runtime.options import error_line
from baton.runtime.process import EXIT_RANK_LOST, FORWARD_VARIABLE, drain_signals, record_error, under_torchrun
from baton.transfer.edge_endpoint import LocalEndpoints, MakeEndpoint, make_buffers
from baton.transfer.nccl import local_gpus
from baton.transfer.shared_buffers import keep_memory_exportable
from baton.transfer.staging_buffers import kept_limit
from baton.transfer.stream_pool import know_streams

log = logging.getLogger("baton.worker")

RETRY_S = 1.0
LOSS_REPORT_WAIT_S = 0.5
"""How long a failed operation waits for the channel to report which rank was lost; the process ends meanwhile."""
LAST_MESSAGE_S = 2.0
"""How long the other ranks let a rank that reported an error exit first, so that the agent takes its exit code."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """What a leader has of all ranks of its worker."""

    # The followers replay its steps.
    runner: Runner
    pids: tuple[int, ...]
    # Makes endpoints of edges at all ranks.
    endpoints: MakeEndpoint
    adapters: RankAdapters
    # Sets what is called, from any thread, with the rank of a follower that received SIGTERM.
    on_leave: Callable[[Callable[[int], object]], None] = lambda handler: None


@contextmanager
def lead(ranks: Ranks, options: EngineOptions, on_stage: OnStage) -> Iterator[RankGroup]:
    """Runs the block as the leader; when it ends, all ranks end: normally, or with the block's error."""
    if ranks.size == 1:
        _prepare_device(options, ranks)
        runner = load_runner(options, on_stage)
        local = _local_endpoints(runner, options, ranks)
        yield RankGroup(runner, (os.getpid(),), local, RankAdapters(runner.adapters))
        return
    store = open_store(os.environ)
    limit_s = CONNECT_TIMEOUT_S if _start_together(ranks) else MEET_TIMEOUT_S
    channel = LeaderChannel.open(store, ranks.size, options.host, lambda error: _end(ranks, error), limit_s)
    with _reporting_errors(channel):
        _prepare_device(options, ranks)
        runner = load_runner(options, on_stage, ranks=ranks, store=store)
        channel.serving()
        runner.lead(channel.send)
        endpoints = WorkerEndpoints(_local_endpoints(runner, options, ranks), channel)
        adapters = RankAdapters(runner.adapters, channel.send, ranks.size - 1)

        def receive(rank: int, report: object) -> None:
            if isinstance(report, AdapterLoaded):
                adapters.receive(rank, report)
            else:
                endpoints.receive(rank, report)

        channel.on_report = receive
        yield RankGroup(runner, channel.pids, endpoints, adapters, channel.set_leave_handler)
    channel.stop("drained")


def follow(ranks: Ranks, options: EngineOptions) -> None:
    """Computes the steps that the leader plans until the leader has drained."""
    store, channel = _join(ranks)
    with _reporting_errors(channel):
        _prepare_device(options, ranks)
        runner = load_runner(options, ranks=ranks, store=store)
        endpoints = FollowerEndpoints(
            _local_endpoints(runner, options, ranks), channel.report, partial(_end_by_bug, channel)
        )

        adapters = FollowerAdapters(runner.adapters, channel.report)

        def execute(order: Any) -> None:
            if isinstance(order, LoadAdapter):
                adapters.load(order)
            else:
                endpoints.execute_order(order)

        channel.set_order_handler(execute)
        channel.serving()
        signalled = _ask_leader_to_drain(channel)
        log.info("rank %d of %d: following the leader", ranks.rank, ranks.size)
        reason = channel.follow(runner.step, adapters.drop)
        endpoints.close()
    channel.close()
    if signalled:
        leave_torchrun(ranks)
    log.info("rank %d exits: %s", ranks.rank, reason)


def leave_torchrun(ranks: Ranks) -> None:
    """Called at the end of a rank that drained at a signal: without it, the torchruns of other nodes would wait."""
    if not ranks.on_one_node and ranks.local_rank == 0 and under_torchrun() and FORWARD_VARIABLE not in os.environ:
        leave_exit_barrier(os.environ)


def _ask_leader_to_drain(channel: FollowerChannel) -> list[int]:
    """Makes this follower ask its leader to drain at the first signal, and end at the second; it goes on until the
    leader has drained. Returns the list to which received signals are appended."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        threading.Thread(target=channel.leave, name="leave", daemon=True).start()  # sending may wait

    for number in drain_signals():
        signal.signal(number, on_signal)
    return received


def _start_together(ranks: Ranks) -> bool:
    """Whether one launcher starts all ranks, so that none waits long for another."""
    return ranks.on_one_node or under_torchrun()


def _join(ranks: Ranks) -> tuple[Any, FollowerChannel]:
    """Connects to the leader. A leader on another node may start later, or the leader of the rank that this one
    replaces may not have exited yet."""
    deadline = time.monotonic() + (0.0 if _start_together(ranks) else MEET_TIMEOUT_S)
    logged = False
    while True:
        try:
            store = open_store(os.environ)
            return store, FollowerChannel.open(store, ranks.rank, lambda error: _end(ranks, error))
        except StartupError as error:
            if time.monotonic() >= deadline:
                raise
            if not logged:
                logged = True
                log.info(
                    "waiting up to %.0f s for rank 0 of this worker (MASTER_ADDR): %s", MEET_TIMEOUT_S, error.message
                )
        time.sleep(RETRY_S)


def _prepare_device(options: EngineOptions, ranks: Ranks) -> None:
    """Before anything is allocated or queued there."""
    device = choose_device(options.device, ranks.local_rank)
    if device.type == "cuda" and options.edge_kind == "ipc":
        keep_memory_exportable()
    know_streams(device)


def _local_endpoints(runner: Runner, options: EngineOptions, ranks: Ranks) -> LocalEndpoints:
    layers, device = runner.kv.layers, runner.kv.device
    kind = runner.facts.edge_kind
    buffers = make_buffers(kind, device, kept_limit(options.staging_bytes, ranks.size))
    expect = partial(runner.kv.expect, ahead=False)
    behind = runner.marks.order_behind
    gpus = local_gpus(ranks.local_size) if kind == "nccl" else ()
    layout = runner.layout
    return LocalEndpoints(
        layers, layout.block_size, options.host, kind, expect, buffers, order_behind=behind, gpus=gpus, layout=layout
    )


@contextmanager
def _reporting_errors(channel: Channel) -> Iterator[None]:
    """Reports an error in the block to the other ranks before it propagates."""
    try:
        yield
    except BaseException as error:
        cause = innermost(error)
        if isinstance(cause, RankLost):
            time.sleep(LOSS_REPORT_WAIT_S)  # the channel detects which rank is lost, and ends this process
            if channel.lost is not None:
                time.sleep(2 * LAST_MESSAGE_S)
        line = cause.message if isinstance(cause, BatonError) else f"{type(cause).__name__}: {cause}"
        record_error(line)
        channel.fail(line)
        raise


def _end_by_bug(channel: Channel, error: InvariantError) -> None:
    """Ends this process after a violated invariant off its main thread, which waits for the leader's next plan."""
    line = f"{type(error).__name__}: {error}"
    record_error(line)
    log.critical("fatal error, exiting (restart required): %s", error, exc_info=error)
    channel.fail(line)
    os._exit(1)


def _end(ranks: Ranks, error: RankLost) -> None:
    """Handles the loss of another rank: ends this process, whose worker will be restarted."""
    if isinstance(error, RankFailed):
        time.sleep(LAST_MESSAGE_S)
    record_error(error.message)
    print(f"{error_line(error)} (detected by rank {ranks.rank})", file=sys.stderr, flush=True)
    os._exit(EXIT_RANK_LOST)
