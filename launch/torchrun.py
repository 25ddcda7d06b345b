"""`python -m launch.torchrun`: runs torchrun with the same flags as its child, and passes signals to the ranks.

    launch.torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr A --master-port P -m prefill ...
      └─ torchrun ... --max-restarts 0 --rdzv-id WORKER_ID --log-dir LOGS/WORKER_ID --tee 3 -m prefill ...
           └─ the ranks of this node

torchrun starts and watches the ranks. This process adds what torchrun lacks (decision 0027):

- The first SIGTERM, SIGINT or SIGHUP goes to the ranks, not to torchrun: they drain, torchrun sees them succeed, and
  the exit code is 0. torchrun itself would kill them after 30 s, and exit with 1. A second signal kills.
- If it is killed, torchrun is, and with torchrun its ranks.
- A port in use is reported before anything loads, a long wait for other nodes while it lasts.
- It exits with the code of the rank that failed first, if that rank recorded why; the last output is one box about it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

from baton.engine.rank_peer import MEET_TIMEOUT_S
from baton.runtime.process import (
    ERROR_FILE_VARIABLE,
    FORWARD_VARIABLE,
    HEARTBEAT_VARIABLE,
    PARENT_VARIABLE,
    children,
)
from launch.agent import SECONDARY_EXIT_CODES, Job, bind, main, report
from launch.child import Child, ChildSpec
from launch.failure import Failure, describe_exit
from launch.supervisor import TICK_S, Signals

_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
NOTICE_S = 10.0
"""Time until a node reports that it still waits for the others."""

EXIT_BARRIER_S = 5.0
"""How long a torchrun whose ranks have ended after a signal may wait for the torchruns of other nodes."""


def torchrun_command(job: Job, port: int, logs: Path) -> list[str]:
    """Returns torchrun's command for the ranks of one node; their logs go below `logs`. Pure."""
    address = f"[{job.master_addr}]" if ":" in job.master_addr else job.master_addr
    flags = {
        "nnodes": job.nodes,
        "node-rank": job.node_rank,
        "nproc-per-node": job.ranks,
        "max-restarts": 0,
        "master-addr": address,
        "master-port": port,
        "rdzv-id": job.worker_id,
        "rdzv-conf": f"timeout={MEET_TIMEOUT_S:.0f}",
        "role": job.worker_id,
        "log-dir": logs,
        "tee": 3,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", job.module, *job.arguments]


class Torchrun(Child):
    """torchrun as a child process. Raises StartupError when it cannot be started."""

    def __init__(self, job: Job, port: int, logs: Path) -> None:
        self._job = job
        self._error_file = logs / "error.json"
        self.has_started_ranks = False
        logs.mkdir(parents=True, exist_ok=True)
        self._error_file.unlink(missing_ok=True)
        environment = {ERROR_FILE_VARIABLE: str(self._error_file), FORWARD_VARIABLE: "1"}
        environment[HEARTBEAT_VARIABLE] = ""  # the ranks do not inherit the pipe from torchrun
        if _PREFIX not in os.environ:
            environment[_PREFIX] = "[${role_name} rank ${rank}] "
        as_parent = ("/bin/sh", "-c", f'{PARENT_VARIABLE}=$$ exec "$@"', "sh")  # torchrun is the parent of the ranks
        command = (*as_parent, *torchrun_command(job, port, logs))
        super().__init__(ChildSpec("torchrun", command, environment=environment))

    def ranks(self) -> list[int]:
        """Returns the pids of the ranks that torchrun has not seen end. Only ranks have sessions of their own. They
        have started once all handle SIGTERM."""
        ranks = []
        for pid in children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == pid:
                    ranks.append(pid)
        self.has_started_ranks = self.has_started_ranks or sum(map(_handles_sigterm, ranks)) == self._job.ranks
        return ranks

    @property
    def failure(self) -> Failure | None:
        """What the rank that failed first recorded, which torchrun copies; None if it recorded nothing."""
        job = self._job
        try:
            error = json.loads(self._error_file.read_bytes())["message"]
            code, reason, rank = int(error["errorCode"]), str(error["message"]), str(error["extraInfo"]["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        where = f"started as {job.module} by torchrun, rank {rank} of {job.nodes * job.ranks}"
        return Failure(job.worker_id, where, socket.gethostname(), code, reason)


def _handles_sigterm(pid: int) -> bool:
    """Whether a process has installed a handler (SigCgt in proc(5)); before that, SIGTERM makes it fail."""
    with contextlib.suppress(OSError, StopIteration):
        with open(f"/proc/{pid}/status", encoding="utf-8") as status:
            line = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def run(job: Job) -> int:
    """Runs torchrun until it ends; returns the exit code. Raises OSError or StartupError when it cannot be started."""
    logs = Path(os.environ.get("LOGS") or "logs") / f"{job.worker_id}{f'.{job.node_rank}' if job.node_rank else ''}"
    # Bound, but not listening: torchrun can listen on this port, and no other process gets it meanwhile.
    with Signals() as signals, bind(job) if job.node_rank == 0 else contextlib.nullcontext() as reserved:
        torchrun = Torchrun(job, reserved.getsockname()[1] if reserved else job.master_port, logs)
        code = _wait(job, torchrun, signals)
    if code is not None:
        return code
    failure = torchrun.failure
    if torchrun.returncode == 0 or (signals.stops and failure and failure.code in SECONDARY_EXIT_CODES):
        return 0
    if failure:
        return report(failure)
    ended = f"torchrun (node {job.node_rank} of {job.nodes}): {describe_exit(torchrun.returncode)}"
    print(
        f"error: {job.worker_id} on {socket.gethostname()}: {ended}; no rank of this node recorded why, see the first "
        f"error above; the logs of the ranks are in {logs}",
        file=sys.stderr,
        flush=True,
    )
    return torchrun.returncode if torchrun.returncode > 0 else 128 - torchrun.returncode


def _wait(job: Job, torchrun: Torchrun, signals: Signals) -> int | None:
    """Waits until torchrun ends by itself. Returns the exit code if it was killed instead: after a signal before it
    has started the ranks, in its exit barrier, or at a second signal."""
    started, notified = time.monotonic(), False
    asked, without_ranks_since = 0, math.inf
    while torchrun.poll() is None:
        signals.wait(TICK_S)
        ranks, now = torchrun.ranks(), time.monotonic()
        if signals.stops > asked:
            if asked or not torchrun.has_started_ranks:
                return _kill(torchrun, 128 + signals.last if asked else 0)
            asked = signals.stops
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        if asked and not ranks:
            without_ranks_since = min(without_ranks_since, now)
            if now - without_ranks_since >= EXIT_BARRIER_S:
                return _kill(torchrun, 0)
        if job.nodes > 1 and not torchrun.has_started_ranks and not notified and now - started >= NOTICE_S:
            notified = True
            where = f"{job.master_addr} port {job.master_port}"
            print(
                f"{job.worker_id}: node {job.node_rank} of {job.nodes} waits up to {MEET_TIMEOUT_S:.0f} s for the "
                f"other nodes at {where} (NODE_RANK, NNODES, MASTER_ADDR, MASTER_PORT)",
                file=sys.stderr,
                flush=True,
            )
    return None


def _kill(torchrun: Torchrun, code: int) -> int:
    torchrun.kill()
    return code


if __name__ == "__main__":
    main("launch.torchrun", run)
