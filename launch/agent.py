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
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from baton.core.errors import StartupError
from baton.core.ranks import STORE_VARIABLE
from baton.runtime.options import EXIT_STARTUP_ERROR
from baton.runtime.process import EXIT_RANK_LOST, die_with_parent, record_error
from launch.child import Child, ChildSpec
from launch.failure import Failure, box
from launch.supervisor import Signals, run_together

SECONDARY_EXIT_CODES = (EXIT_RANK_LOST, -signal.SIGTERM)
"""Exit codes of a rank that ended because another rank did: by itself, or at a SIGTERM."""


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
        variables = {name: str(number) for name, number in numbers.items()}
        return variables | ({"MASTER_ADDR": self.master_addr} if size > 1 else {})


def parse_job(argv: Sequence[str], program: str = "launch.agent") -> Job:
    """Parses the flags; exits with code 2 and a message if they are invalid."""
    words, module = list(argv), []
    if "-m" in words:
        at = words.index("-m")
        words, module = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(prog=program, usage="%(prog)s [flags] -m module ...", allow_abbrev=False)

    def flag(name: str, variable: str, least: int, default: int, meaning: str) -> None:
        def number(text: str) -> int:
            if not text.isdecimal() or int(text) < least:
                raise argparse.ArgumentTypeError(
                    f"{text!r} must be {meaning}, at least {least} ({variable} of the scripts)"
                )
            return int(text)

        parser.add_argument(name, name[:2] + name[2:].replace("-", "_"), type=number, default=default)

    flag("--nnodes", "NNODES", 1, 1, "a number of nodes")
    flag("--node-rank", "NODE_RANK", 0, 0, "the number of this node")
    flag("--nproc-per-node", "RANKS", 1, 1, "a number of ranks")
    flag("--master-port", "MASTER_PORT", 0, 0, "a port")
    parser.add_argument("--master-addr", "--master_addr", default="127.0.0.1")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, choices=(0,), default=0)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"{' '.join(unknown)}: unsupported; for other torchrun flags use torchrun itself")
    if not module or module[0].startswith("-"):
        parser.error("-m must name the program of the ranks, prefill or decode")
    if flags.node_rank >= flags.nnodes:
        last = flags.nnodes - 1
        parser.error(f"--node-rank (NODE_RANK) is {flags.node_rank}: with {flags.nnodes} nodes the highest is {last}")
    if flags.nnodes > 1 and not flags.master_port:
        parser.error("a job over several nodes needs --master-addr and --master-port of node 0")
    meet = (flags.master_addr.strip("[]"), flags.master_port)
    return Job(module[0], tuple(module[1:]), flags.nnodes, flags.node_rank, flags.nproc_per_node, *meet)


def start_ranks(job: Job, store: socket.socket | None) -> list[Child]:
    """Starts the ranks of this node; rank 0 inherits `store`, on which it listens. Raises StartupError."""
    port = store.getsockname()[1] if store else job.master_port
    ranks = []
    for local_rank in range(job.ranks):
        environment = job.environment(local_rank, port)
        files: tuple[int, ...] = ()
        if store is not None and local_rank == 0:
            files = (store.fileno(),)
            environment[STORE_VARIABLE] = str(store.fileno())
        command = (sys.executable, "-m", job.module, *job.arguments)
        ranks.append(Child(ChildSpec(environment["RANK"], command, environment=environment, files=files)))
    return ranks


def run(job: Job) -> int:
    """Runs the ranks until all have ended; returns the exit code. Raises OSError or StartupError when a rank or the
    store cannot start."""
    meet_here = job.nodes * job.ranks > 1 and job.node_rank == 0
    with Signals() as signals:
        with bind(job, backlog=128) if meet_here else contextlib.nullcontext() as store:
            ranks = start_ranks(job, store)
        # Rank 0 holds the listening socket now: the port is free once rank 0 has ended.
        ended = run_together(ranks, signals)
        if ended.killed:
            return 128 + signals.last
    failed = [rank for rank in ended.children if rank.returncode]
    if not failed or (ended.stopped and all(rank.returncode in SECONDARY_EXIT_CODES for rank in failed)):
        return 0  # in the second case stopped while loading, or after another rank ended
    rank = first_failure(failed)
    where = f"started as {job.module}, rank {rank.spec.name} of {job.nodes * job.ranks}, pid {rank.pid}"
    reason = rank.reason or "no reason recorded; see the log above this box"
    return report(Failure(job.worker_id, where, socket.gethostname(), rank.returncode, reason, bool(rank.hung)))


def first_failure(failed: Sequence[Child]) -> Child:
    """Returns the first of `failed` (in the order of their ends) that failed by itself, else the first one. Ranks that
    the agent killed count only if there are no others. Pure."""
    ended = [rank for rank in failed if not rank.hung] or failed
    own = [
        rank
        for rank in ended
        if rank.returncode not in SECONDARY_EXIT_CODES or (rank.returncode != EXIT_RANK_LOST and rank.reason)
    ]
    return (own or ended)[0]


def report(failure: Failure) -> int:
    """Prints the box, and records the failure for the parent; returns the exit code to pass on."""
    record_error(failure.error, failure=asdict(failure))
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
    if job.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank sets its own threads
    try:
        code = run(job)
    except (OSError, StartupError) as error:
        record_error(reason := f"{job.module} cannot be started: {error}")
        print(f"error: {reason}", file=sys.stderr, flush=True)
        code = EXIT_STARTUP_ERROR
    sys.exit(code)


if __name__ == "__main__":
    main()
