"""`python -m launch.agent`: runs the ranks of one worker on this node as child processes that start and end together.

Its flags and the environment of each rank are those of torchrun: `--nnodes --node-rank --nproc-per-node --master-addr
--master-port -m module arguments`. A worker that spans several nodes has one agent on each. The agent does not import
torch and opens at most one port, where the ranks rendezvous: it listens on `--master-addr` only, and rank 0 serves the
store on it. Plain torchrun works in its place; decision 0027 explains the advantages of the agent:

- It exits with the code of the rank that failed first, and the last thing it prints is one box about that rank.
- It dies with its parent, and its ranks with it, even under `kill -9`. A user's `decode.py` does not shadow Baton's.
- The first SIGTERM, SIGINT or SIGHUP drains the worker, a second one kills it.
- A rank that outlives a failed one by KILL_DELAY_S, or sends no heartbeat for AGENT_SILENCE_S, is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

from baton.core.liveness import AGENT_SILENCE_S, KILL_DELAY_S
from baton.core.ranks import STORE_VARIABLE
from baton.runtime.options import EXIT_STARTUP_ERROR
from baton.runtime.process import (
    BEAT_VARIABLE,
    ERROR_FILE_VARIABLE,
    EXIT_RANK_LOST,
    PARENT_VARIABLE,
    die_with_parent,
    kill_tree,
)
from launch.failure import Failure, box
from launch.signals import Signals

SECONDARY_EXIT_CODES = (EXIT_RANK_LOST, -signal.SIGTERM)
"""Exit codes of a rank that ended because another rank did: by itself, or at a SIGTERM."""

TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """`python -m module *arguments`, as `ranks` processes on each of `nodes` nodes. Port 0: any free one."""

    module: str
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    node_rank: int = 0
    ranks: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def worker_id(self) -> str:
        options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        options.add_argument("--worker-id", nargs="?")
        return options.parse_known_args(self.arguments)[0].worker_id or self.module

    def environment(self, local_rank: int, port: int) -> dict[str, str]:
        """The environment variables that torchrun sets for a rank."""
        rank, size = self.node_rank * self.ranks + local_rank, self.nodes * self.ranks
        numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": self.ranks}
        numbers |= {"GROUP_RANK": self.node_rank, "GROUP_WORLD_SIZE": self.nodes}
        if size > 1:
            numbers["MASTER_PORT"] = port
        found = {name: str(number) for name, number in numbers.items()}
        return found | ({"MASTER_ADDR": self.master_addr} if size > 1 else {})


def parse_job(argv: Sequence[str], program: str = "launch.agent") -> Job:
    """Parses the flags; exits with code 2 and a message if they are invalid."""
    words, module = list(argv), []
    if "-m" in words:
        at = words.index("-m")
        words, module = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(prog=program, usage="%(prog)s [flags] -m module ...", allow_abbrev=False)

    def flag(name: str, variable: str, least: int, default: int, what: str) -> None:
        def number(text: str) -> int:
            if not text.isdecimal() or int(text) < least:
                raise argparse.ArgumentTypeError(
                    f"{text!r} must be {what}, at least {least} ({variable} of the scripts)"
                )
            return int(text)

        parser.add_argument(name, name[:2] + name[2:].replace("-", "_"), type=number, default=default)

    flag("--nnodes", "NNODES", 1, 1, "a number of nodes")
    flag("--node-rank", "NODE_RANK", 0, 0, "the number of this node")
    flag("--nproc-per-node", "RANKS", 1, 1, "a number of ranks")
    flag("--master-port", "MASTER_PORT", 0, 0, "a port")
    parser.add_argument("--master-addr", "--master_addr", default="127.0.0.1")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, choices=(0,), default=0)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"{' '.join(unknown)}: unsupported; for other torchrun flags use torchrun itself")
    if not module or module[0].startswith("-"):
        parser.error("-m must name the program of the ranks, prefill or decode")
    if found.node_rank >= found.nnodes:
        last = found.nnodes - 1
        parser.error(f"--node-rank (NODE_RANK) is {found.node_rank}: with {found.nnodes} nodes the highest is {last}")
    if found.nnodes > 1 and not found.master_port:
        parser.error("a job over several nodes needs --master-addr and --master-port of node 0")
    meet = (found.master_addr.strip("[]"), found.master_port)
    return Job(module[0], tuple(module[1:]), found.nnodes, found.node_rank, found.nproc_per_node, *meet)


class Rank:
    """One child process. `code` is its exit code, below 0 for a signal; `hung` is why this agent killed it."""

    def __init__(self, job: Job, local_rank: int, port: int, store: socket.socket | None) -> None:
        """Raises OSError when it cannot be started."""
        self.number = job.node_rank * job.ranks + local_rank
        self.code: int | None = None
        self.hung = ""
        # An unlinked file: it disappears with the processes, however they end.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._beats, beats = os.pipe()
        os.set_blocking(self._beats, False)
        self._last_beat: float | None = None
        files = [self._errors.fileno(), beats]
        variables = {
            **job.environment(local_rank, port),
            ERROR_FILE_VARIABLE: f"/dev/fd/{files[0]}",
            BEAT_VARIABLE: str(beats),
        }
        if store is not None:
            files.append(store.fileno())
            variables[STORE_VARIABLE] = str(store.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", job.module, *job.arguments],
                env={**os.environ, **variables},
                pass_fds=files,
                start_new_session=True,
            )
        finally:
            os.close(beats)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reason(self) -> str:
        """Why the agent killed it, or what it left with `baton.runtime.process.record_error`; empty without either."""
        if self.hung:
            return self.hung
        self._errors.seek(0)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(self._errors.read())["message"]["message"])
        return ""

    def poll(self, now: float, *, reset_heartbeat: bool = False) -> None:
        """Detects that it ended, or that it hangs; `reset_heartbeat` ignores its silence so far."""
        if self.code is not None:
            return
        if reset_heartbeat and self._last_beat is not None:
            self._last_beat = now
        with contextlib.suppress(BlockingIOError):
            while os.read(self._beats, 512):
                self._last_beat = now
        self.code = self._process.poll()
        if self.code is not None:
            os.close(self._beats)
            if self.code != 0:  # its own children, such as a compiler, end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGTERM)
        elif self._last_beat is not None and now - self._last_beat >= AGENT_SILENCE_S:
            self.kill(f"hung: no heartbeat for {AGENT_SILENCE_S:g} s; its agent killed it")

    def terminate(self) -> None:
        if self.code is None:
            self._process.terminate()

    def kill(self, why: str) -> None:
        """Kills it and all its descendants."""
        if self.code is None and not self.hung:
            self.hung = why
            kill_tree(self.pid)


def run(job: Job) -> int:
    """Runs the ranks until all have ended; returns the exit code. Raises OSError when a rank or the store cannot
    start."""
    ranks: list[Rank] = []
    meets_here = job.nodes * job.ranks > 1 and job.node_rank == 0
    with Signals() as signals:
        with bind(job, backlog=128) if meets_here else contextlib.nullcontext() as store:
            port = store.getsockname()[1] if store else job.master_port
            for local_rank in range(job.ranks):
                ranks.append(Rank(job, local_rank, port, store if local_rank == 0 else None))
        # Rank 0 holds the listening socket now: the port is free once rank 0 has ended.
        ended: list[Rank] = []
        asked, killed, failed_at = 0, False, None
        looked_at = time.monotonic()
        while len(ended) < len(ranks):
            signals.wait(TICK_S)
            was_suspended, now = time.monotonic() - looked_at > 4 * TICK_S, time.monotonic()
            looked_at = now
            for rank in ranks:
                rank.poll(now, reset_heartbeat=was_suspended)  # the machine may have been suspended
            ended += [rank for rank in ranks if rank.code is not None and rank not in ended]
            if signals.stops > asked:
                for rank in ranks:
                    if asked:
                        killed = True
                        rank.kill("killed at a second signal")
                    else:
                        rank.terminate()
                asked = signals.stops
            if failed_at is None and any(rank.code for rank in ended):
                failed_at = now
            if failed_at is not None and now - failed_at >= KILL_DELAY_S:
                for rank in ranks:
                    rank.kill(f"hung: still running {KILL_DELAY_S:g} s after another rank failed")
        if killed:
            return 128 + signals.last
    failed = [rank for rank in ended if rank.code]
    if not failed or (
        asked and all(rank.code in SECONDARY_EXIT_CODES for rank in failed)
    ):  # stopped while loading, or after another rank ended
        return 0
    return _report(job, first_failure(failed))


def first_failure(failed: Sequence[Rank]) -> Rank:
    """Returns the first of `failed` (in the order of their ends) that failed by itself, else the first one. Ranks that
    the agent killed count only if there are no others. Pure."""
    ended = [rank for rank in failed if not rank.hung] or failed
    own = [r for r in ended if r.code not in SECONDARY_EXIT_CODES or (r.code != EXIT_RANK_LOST and r.reason)]
    return (own or ended)[0]


def _report(job: Job, rank: Rank) -> int:
    """Prints the box about one rank; returns the exit code to pass on."""
    where = f"{job.module}, rank {rank.number} of {job.nodes * job.ranks}, pid {rank.pid}"
    reason = rank.reason or "no reason recorded; see the log above this box"
    return report(Failure(job.worker_id, where, socket.gethostname(), rank.code or 0, reason, by_agent=bool(rank.hung)))


def report(failure: Failure) -> int:
    """Prints the box; returns the exit code to pass on."""
    print("\n".join(box(failure)), file=sys.stderr, flush=True)
    return failure.code if failure.code > 0 else 128 - failure.code


def bind(job: Job, backlog: int = 0) -> socket.socket:
    """Binds a socket to the address of the ranks' store only, and listens if `backlog` is set. Raises OSError."""
    family = socket.AF_INET6 if ":" in job.master_addr else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((job.master_addr, job.master_port))
        if backlog:
            bound.listen(backlog)
        return bound
    except OSError as error:
        bound.close()
        where = f"{job.master_addr} port {job.master_port} (MASTER_ADDR, MASTER_PORT)"
        raise OSError(f"the ranks cannot rendezvous at {where}: {error.strerror or error}") from None


def main(program: str = "launch.agent", run: Callable[[Job], int] = run) -> NoReturn:
    """Runs the job of the command line. `launch.torchrun` has its own `run`."""
    die_with_parent()
    job = parse_job(sys.argv[1:], program)
    os.environ |= {PARENT_VARIABLE: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    if job.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank sets its own threads
    try:
        code = run(job)
    except OSError as error:
        print(f"error: {job.module} cannot be started: {error}", file=sys.stderr, flush=True)
        code = EXIT_STARTUP_ERROR
    sys.exit(code)


if __name__ == "__main__":
    main()
