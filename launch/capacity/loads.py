"""Controlled loads on a running cluster, and what each cost: counters of the workers, processor time, times at the
client."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import StartupError
from launch.bench.client import ServerTarget, run_load
from launch.bench.load import Session, completion
from launch.bench.stats import RequestRecord
from launch.cluster_api import Row, get_cluster

_IDS = range(300, 4000)
_STARTED = 19  # of the fields of /proc/PID/stat behind the name
_PROCESS_CPU_CLOCK = 2  # in the clock ids that clock_getcpuclockid(3) makes of process ids
COUNTED_S = 10.0
"""For the counters of the last request to arrive at the coordinator."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Requests of equal lengths in a closed loop. With `shared` all have the same prompt, of which prefill computes
    little after the first."""

    name: str
    requests: int
    concurrency: int
    input_len: int
    output_len: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RoleCounters:
    """Sums over the workers of one role: steps and the seconds in them, tokens, KV bytes that they sent (prefill) or
    received (decode); `cpu_s` is the processor time of their processes, 0 if they are not on this host."""

    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    cpu_s: float = 0.0

    def since(self, before: RoleCounters) -> RoleCounters:
        return RoleCounters(*(getattr(self, n) - getattr(before, n) for n in RoleCounters.__slots__))


@dataclass(frozen=True, slots=True)
class Sample:
    """One load and what it cost."""

    load: ClosedLoop
    records: tuple[RequestRecord, ...]
    prefill: RoleCounters
    decode: RoleCounters
    front_cpu_s: float
    client_cpu_s: float
    elapsed_s: float

    @property
    def cpu_s(self) -> float:
        """The processor time of all processes that are on this host."""
        return self.prefill.cpu_s + self.decode.cpu_s + self.front_cpu_s + self.client_cpu_s

    @property
    def handed_over(self) -> int:
        """The requests that did not end at prefill."""
        return self.load.requests if self.load.output_len > 1 else 0

    @property
    def tokens_sent(self) -> int:
        return 0 if self.load.shared else self.handed_over * self.load.input_len

    @property
    def rows(self) -> float:
        """The mean number of rows of its decode steps."""
        return (self.decode.tokens - self.decode.accepted) / self.decode.steps if self.decode.steps else 0.0

    def rows_beyond(self, number: float, last: float) -> float:
        """Returns how many rows of its decode steps, each with the mean number of them, come after the first `number`
        of a step, up to the `last` one."""
        return self.decode.steps * min(max(self.rows - number, 0.0), last - number)

    @property
    def context(self) -> float:
        """The positions that all decode rows of the load attend to."""
        first, count = self.load.input_len + 1, self.load.output_len - 1
        return self.load.requests * count * (first + (count - 1) / 2)


class LoadClient:
    """A client that applies loads to a running cluster. `seed` determines its prompts. Workers that may use only
    `core_share` of a core are stopped for the rest of the time: their processor time counts as the seconds that it
    lasts."""

    def __init__(self, url: str, target: ServerTarget, seed: int, core_share: float = 1.0) -> None:
        self.url, self.target, self._core_share = url, target, core_share
        self._source = random.Random(seed)

    def rows(self) -> tuple[Row, ...]:
        return get_cluster(self.url).workers

    def measure(self, load: ClosedLoop) -> Sample:
        """Applies a load.

        Raises:
            StartupError: a request failed, or the cluster does not reply.
        """
        prompt = self._prompt(load.input_len)
        sessions = [
            Session((completion(prompt if load.shared else self._prompt(load.input_len), load.output_len),))
            for _ in range(load.requests)
        ]
        if load.shared:  # the first computes the prompt
            first = self._counters()
            self._run([Session((completion(prompt, 2),))], 1)
            self._counted(first, 2)
        before, front, client, began = self._counters(), self._front_cpu_s(), time.process_time(), time.perf_counter()
        records = self._run(sessions, load.concurrency)
        elapsed_s, client_cpu_s = time.perf_counter() - began, time.process_time() - client
        front_cpu_s = self._front_cpu_s() - front
        after = self._counted(before, load.requests * load.output_len)
        for record in records:
            if record.error is not None:
                raise StartupError(f"load {load.name}: a request failed: {record.error}")
        prefill, decode = (after[role].since(before[role]) for role in ("prefill", "decode"))
        return Sample(load, tuple(records), prefill, decode, front_cpu_s, client_cpu_s, elapsed_s)

    def _prompt(self, length: int) -> list[int]:
        return self._source.choices(_IDS, k=length)

    def _run(self, sessions: Iterable[Session], concurrency: int) -> list[RequestRecord]:
        return asyncio.run(run_load(self.target, sessions, concurrency, lambda _: None))

    def _counted(self, before: Mapping[str, RoleCounters], tokens: int) -> dict[str, RoleCounters]:
        """Returns the counters once they are those of `before` and `tokens` tokens more, with the bytes of their
        hand-overs, which a prefill worker may report after the last token; or those after `COUNTED_S`."""
        deadline = time.monotonic() + COUNTED_S
        while True:
            last = self._counters()
            prefill, decode = (last[role].since(before[role]) for role in ("prefill", "decode"))
            complete = prefill.tokens + decode.tokens >= tokens and prefill.kv_bytes >= decode.kv_bytes
            if complete or time.monotonic() >= deadline:
                return last
            time.sleep(0.1)

    def _counters(self) -> dict[str, RoleCounters]:
        counters = {}
        rows = self.rows()
        for role, kv_bytes in (("prefill", "kv_bytes_sent"), ("decode", "kv_bytes_received")):
            mine = [row for row in rows if row["role"] == role and row["state"] == "ready"]
            drafts = [row["speculation"] or {} for row in mine]
            counters[role] = RoleCounters(
                steps=_sum(mine, "steps"),
                step_s=sum(float(row["step_s"]) for row in mine),
                prompt_tokens=_sum(mine, "prompt_tokens_computed"),
                tokens=_sum(mine, "tokens_generated"),
                kv_bytes=_sum(mine, kv_bytes),
                drafted=_sum(drafts, "drafted_tokens"),
                accepted=_sum(drafts, "accepted_tokens"),
                cpu_s=sum(cpu_seconds(pid) for row in mine for pid in row["pids"]) / self._core_share,
            )
        return counters

    def cpu_s(self) -> float:
        """Returns the processor time of the coordinator and all workers, as far as they are on this host."""
        return self._front_cpu_s() + sum(counters.cpu_s for counters in self._counters().values())

    def _front_cpu_s(self) -> float:
        return cpu_seconds(int(get_cluster(self.url).document["coordinator"].get("pid", 0)))


def started_s(row: Row) -> float:
    """Returns how long a worker took from the start of its process until it was ready; 0.0 if it is on another host."""
    try:
        fields = Path(f"/proc/{int(row['pids'][0])}/stat").read_text().rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    age_s = up_s - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, age_s - float(row["since_s"]))


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(int(row.get(name, 0)) for row in rows)


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process on this host, with that of its threads that have ended; 0.0 if there is
    no such process."""
    if not pid:
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CPU_CLOCK)
    except OSError:
        return 0.0
