"""`python -m launch.agent`: torchrun with eight repairs, the same flags otherwise.

1. torchrun's store listens on every address and anybody may write to it. `--rdzv-backend baton` (the default here)
   binds it to `--master-addr` only, and on one node to a port the kernel picks, so parallel jobs cannot collide.
2. torchrun exits with 1 and a traceback of its own whatever happened. The agent exits with its worker's code, and the
   last thing it prints is one box about the rank that failed first (`launch.failure`).
3. `kill -9` of torchrun orphans its workers. The agent names itself as their parent (`baton.process`) and they die
   with it; the agent in turn dies with the launcher.
4. `python -m` puts the directory it is called from first on the path, where a user's own `decode.py` would shadow a
   tier: the workers get PYTHONSAFEPATH.
5. torchrun kills its workers 30 s after a SIGTERM and exits with 1. The agent hands the first SIGTERM, SIGINT or SIGHUP
   to the ranks, whose leader drains (`baton.worker_main`), and exits with 0 when they have; a second signal kills them.
   While it waits for the job's other nodes (`launch.rendezvous`) there are no ranks: the first signal ends it, with 0.
6. torchrun leaves a directory for its ranks' errors behind. Without `--log-dir` the agent makes it, and removes it;
   what a killed agent left, the next one removes (`launch.rank_directory`).
7. torchrun loads torch and keeps a store where a job's only rank has nobody to meet. The agent starts that rank itself
   (`launch.lone_rank`), with the first six repairs where they apply. For a supervisor it starts that rank again and
   again (`launch.lives`), each time as a fork of itself, which has the imports done (`launch.preload`).
8. torchrun gives a rank that hangs 30 s to end once another has failed, and reports it as killed. The agent gives it
   5 s, and its box is about the rank that noticed (`launch.rank_failures`). One that hangs alone on its node is killed
   when its job is over on another (`launch.node_watch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn

from baton.options import EXIT_STARTUP_ERROR
from baton.process import (
    PARENT_VARIABLE,
    children,
    descendants,
    die_with_parent,
    lasting_imports,
    limit_name_lookups,
)
from launch import job_flags, lone_rank, rendezvous
from launch.failure import Failure, box
from launch.forked_rank import forked
from launch.lives import ToSupervisor
from launch.node_watch import NodeWatch
from launch.preload import Preloaded, PreloadRefused
from launch.rank_directory import make_rank_directory
from launch.rank_failures import FOLLOWED, first_failure, kill_soon, recorded


def main() -> NoReturn:
    die_with_parent()
    limit_name_lookups()
    supervisor = ToSupervisor.inherited(os.environ)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ["PYTHONSAFEPATH"] = "1"
    wrong = job_flags.refusal(sys.argv[1:], os.environ)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(EXIT_STARTUP_ERROR)
    stopping = _Stopping()
    stopping.listen()
    try:
        alone = lone_rank.lone_rank(sys.argv[1:], os.environ)
        code = _torchrun(stopping) if alone is None else _alone(alone, stopping, supervisor)
    finally:
        stopping.clean()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the workers have ended; unloading torch would take another second


def _alone(rank: lone_rank.LoneRank, stopping: _Stopping, supervisor: ToSupervisor | None) -> int:
    """Every life of it that is asked for; returns the code of the last."""
    try:
        stopping.made = make_rank_directory()
        preloaded = _preloaded(supervisor.preload if supervisor else ())
        start = partial(forked, close=preloaded.open_before) if preloaded else lone_rank.executed
        for life in count(1):
            if stopping.asked:  # during the imports, which had a child of their own
                return 0
            if supervisor is not None:
                how = "a fork of this process" if preloaded else "a process that imports for itself"
                print(f"agent: life {life} of {rank.module} is {how}", file=sys.stderr, flush=True)
            end = lone_rank.run(rank, stopping.made, start)
            if end.code == 0 or (stopping.asked and end.code in FOLLOWED):
                return 0
            code = _tell(rank.module, rank.arguments, "rank 0 of 1", end.pid, end.code, end.reason)
            if supervisor is None or stopping.asked or not supervisor.another(code):
                return code
            if preloaded and (changed := preloaded.stale()):
                print(f"agent: {changed} is another one than was imported; importing anew", file=sys.stderr, flush=True)
                _start_over(stopping, supervisor)
    except OSError as error:
        print(f"error: {rank.module} cannot be started: {error}", file=sys.stderr)
    return EXIT_STARTUP_ERROR


def _preloaded(names: Sequence[str]) -> Preloaded | None:
    """None where there is nothing to import beforehand, or it will not do."""
    if not names:
        return None
    try:
        return Preloaded(names)
    except PreloadRefused as refused:
        print(f"agent: its rank imports for itself: {refused}", file=sys.stderr, flush=True)
        return None


def _start_over(stopping: _Stopping, supervisor: ToSupervisor) -> NoReturn:
    """The same agent from the beginning, in this process. Raises OSError."""
    stopping.clean()
    environment = {**os.environ, **supervisor.passed_on(), PARENT_VARIABLE: str(os.getppid())}
    os.execve(sys.executable, sys.orig_argv, environment)


def _torchrun(stopping: _Stopping) -> int:
    with lasting_imports():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") and "LOGLEVEL" not in os.environ:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    kill_soon()
    watch: NodeWatch | None = None

    def watch_nodes(host: str, port: int, rank: int, nodes: int) -> None:
        nonlocal watch
        if nodes > 1:
            connect = partial(rendezvous.watch_store, host, port, nodes)
            watch = NodeWatch(connect, rank, nodes, partial(children, os.getpid()), rendezvous.say)
            watch.start()

    rendezvous.register(watch_nodes)
    args = parse_args(_with_defaults(sys.argv[1:]))  # type: ignore[no-untyped-call]
    _name_the_store(args)
    args.signals_to_handle = "SIGQUIT"  # the others are ours
    if args.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, with a warning; a rank sets its own threads
    if not args.log_dir:
        try:
            args.log_dir = stopping.made = make_rank_directory()
        except OSError as error:
            print(f"error: {args.training_script} cannot be started: {error}", file=sys.stderr)
            return EXIT_STARTUP_ERROR
    if stopping.asked:  # during the imports, which had a child of their own
        return 0
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        drained = stopping.asked and all(f.exitcode in FOLLOWED for f in error.failures.values())
        return 0 if drained else _report(error, args, watch)  # ranks that still loaded, or lost a leader that did
    except OSError as error:
        print(f"error: rendezvous at {args.rdzv_endpoint}: {error.strerror or error}", file=sys.stderr)
        return EXIT_STARTUP_ERROR
    finally:
        if watch is not None:
            watch.leave()
    return 0


class _Stopping:
    """`asked` once a signal to end has come. `made` is the directory that the agent leaves nothing of, once there."""

    def __init__(self) -> None:
        self.asked = False
        self.made = ""

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._received)

    def _received(self, number: int, frame: object) -> None:
        ranks = children(os.getpid())
        if self.asked or not ranks:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.clean()
            os._exit(128 + number if ranks else 0)  # without ranks there is nothing to drain
        self.asked = True
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def clean(self) -> None:
        if self.made:
            shutil.rmtree(self.made, ignore_errors=True)


def _with_defaults(argv: list[str]) -> list[str]:
    """Our rendezvous unless the caller names another one; the flags come before the module's own."""
    if any(word.startswith(("--rdzv-backend", "--rdzv_backend", "--standalone")) for word in argv):
        return argv
    return ["--rdzv-backend", "baton", *argv]


def _name_the_store(args: Any) -> None:
    """`--master-addr`, `--master-port` and `--node-rank` mean the same as for torchrun's static rendezvous."""
    if args.rdzv_backend != "baton":
        return
    if not args.rdzv_endpoint:
        host = f"[{args.master_addr}]" if ":" in args.master_addr else args.master_addr
        args.rdzv_endpoint = f"{host}:{args.master_port or 0}"
    args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"rank={args.node_rank}")))
    args.node_rank = 0


def _report(error: Any, args: Any, watch: NodeWatch | None) -> int:
    """A box about the rank that failed first, not one that ended because of it; returns the exit code to pass on."""
    rank = first_failure(error.failures)
    failure = error.failures[rank]
    ranks = int(str(args.nnodes).rpartition(":")[2]) * int(args.nproc_per_node)
    which = f"rank {rank} of {ranks}"
    reason = (watch.reason(int(failure.pid)) if watch is not None else "") or recorded(failure)
    module, arguments = str(args.training_script), args.training_script_args
    return _tell(module, arguments, which, int(failure.pid), int(failure.exitcode), reason)


def _tell(module: str, arguments: Sequence[str], which: str, pid: int, code: int, reason: str) -> int:
    """The box about one rank; returns the exit code to pass on."""
    told = _option(arguments, "--worker-id") or module
    reason = reason or "it left no reason; the log above this box is all there is"
    lines = box(Failure(told, f"{module}, {which}, pid {pid}", socket.gethostname(), code, reason))
    print("\n".join(lines), file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _option(words: Sequence[str], name: str) -> str:
    """The last value of an option on the worker's command line."""
    for index in range(len(words) - 1, -1, -1):
        if words[index].startswith(name + "="):
            return words[index].partition("=")[2]
        if words[index] == name and index + 1 < len(words):
            return words[index + 1]
    return ""


if __name__ == "__main__":
    main()
