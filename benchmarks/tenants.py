"""Overload by one tenant: what is still served, how fast the rest is refused, and what another tenant notices.

    python benchmarks/tenants.py                     one prefill and one decode worker, built-in model, 60 s overloaded
    python benchmarks/tenants.py --seconds 10        a short run
    python benchmarks/tenants.py --quota 0.4         each worker with 0.4 of a core, as root
    python benchmarks/tenants.py --small 6 --share 0.125 --prompts 200-1500 --rounds 5

On one cluster, in turns, `--rounds` times: the peak, by a closed loop of one tenant; the small tenants alone
(`--small`), each with a `--share` of that peak; the same beside another one that sends ten times as much as each; and
beside one that sends so much that three times the peak arrives. Each round has its own peak, and percentiles and
goodput are those of all rounds together, since a machine does not keep its speed. A refused request is not sent again.
Times are those of a client on the same cores, which does as little as it can: it reads of an answer no more than where
it ends. Beside them are the coordinator's own: to the first token and the parts of it from its log, to a refusal (from
the head of the request to the response) from `baton_http_refusal_seconds`; and the processor time of each process. With
`--quota` the workers are the limit and not the host: coordinator and client have the rest of the cores. A round takes
3.5 times `--seconds`. Writes `benchmarks/results/tenants.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import Cluster, cluster, parser, report, table
from benchmarks.quota import quotas
from launch.cluster_api import get_cluster
from sim.scale.workload import Lengths, parse_lengths
from sim.stats import percentile

HEAVY = "heavy"
OUTPUT_TOKENS, CLIENTS, QUEUE = 16, 24, 64
OVERLOAD, TENFOLD = 3.0, 10.0
PAUSE_S = 1.0
REFUSAL_LIMIT_S = 0.05
LAST_CHUNK = b"\r\n0\r\n\r\n"
PROCESSES = ("client", "coordinator", "prefill", "decode")


@dataclass(frozen=True)
class Answer:
    """Of one request: its tenant, status, and the seconds to its first event, or to its refusal, and to its end."""

    tenant: str
    status: int
    first_s: float
    ended_at: float


class Connection(asyncio.Protocol):
    """A connection with one request at a time. It reads no more of an answer than its status, when its body began, and
    where it ends: after its last chunk, or after `content-length` bytes."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[tuple[int, float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[tuple[int, float]]:
        """Returns the status and the seconds until the first byte of the body; 0 for both if the connection is lost."""
        self.answer = asyncio.get_running_loop().create_future()
        self._received, self._body, self._left, self._status = b"", False, 0, 0
        self._sent, self._first_s = time.monotonic(), 0.0
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        if not self._body:
            head, _, received = received.partition(b"\r\n\r\n")
            if not received:
                self._received += data
                return
            self._body, self._status, self._first_s = True, int(head[9:12]), time.monotonic() - self._sent
            length = re.search(rb"content-length: (\d+)", head)
            self._left = int(length[1]) if length else 0
            data = received
        self._received = received[-len(LAST_CHUNK) :]
        if self._left:
            self._left -= len(data)
            ended = not self._left
        else:
            ended = self._received == LAST_CHUNK
        if ended and self.answer is not None:
            self.answer.set_result((self._status, self._first_s))
            self.answer = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None:
            self.answer.set_result((0, 0.0))


class Load:
    """Requests of one window, over connections that are kept, with prompts of random lengths, the same in each window
    of a round. Their tokens are written before, except a number in the first two, so that no two prompts of a run begin
    alike: none is in a prefix cache."""

    numbers = itertools.count(1)
    """Shared by all windows."""

    def __init__(self, url: str, name: str, prompts: Lengths, turn: int = 0) -> None:
        parts, self.name, self._round = urlsplit(url), name, turn
        self._randoms = dict[str, random.Random]()
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.answers, self._idle = list[Answer](), list[Connection]()
        self._prompts = prompts
        self._tokens = "".join(f",{token}" for token in random.Random(1).choices(range(1000, 3900), k=prompts.high - 2))
        options = {"model": "builtin", "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
        self._tail = f"],{json.dumps(options)[1:]}"
        self._head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"

    def _random_of(self, tenant: str) -> random.Random:
        """A tenant's own, so that its requests have the same lengths and times in each window, whoever else sends."""
        return self._randoms.setdefault(tenant, random.Random(f"{tenant} {self._round}"))

    async def send(self, tenant: str) -> None:
        number = next(self.numbers)
        tokens = self._tokens[: 5 * (self._prompts.draw(self._random_of(tenant)) - 2)]
        body = f'{{"prompt":[{300 + number % 3600},{300 + number // 3600}{tokens}{self._tail}'
        of = f"authorization: Bearer {key(tenant)}\r\nx-request-id: {self.name}-{number}\r\n"
        request = f"{self._head}{of}content-length: {len(body)}\r\n\r\n{body}".encode()
        connection = await self._connection()
        status, first_s = await connection.send(request)
        self._idle.append(connection)
        self.answers.append(Answer(tenant, status, first_s, time.monotonic()))

    async def _connection(self) -> Connection:
        while self._idle:
            if not (connection := self._idle.pop()).transport.is_closing():
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        return connection

    async def closed(self, tenant: str, clients: int, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self.send(tenant)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, tenant: str, per_s: float, seconds: float) -> None:
        """Sends at random times, `per_s` on average, and waits for the last answer."""
        times, tasks = random.Random(f"times of {tenant} {self._round}"), list[asyncio.Task[None]]()
        due, until = time.monotonic(), time.monotonic() + seconds
        while (due := due + times.expovariate(per_s)) < until:
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(self.send(tenant)))
        await asyncio.gather(*tasks)


def key(tenant: str) -> str:
    return f"sk-benchmark-of-{tenant}"


def shown(answers: Sequence[Answer], *, small: bool, refused: bool) -> tuple[str, float]:
    """The percentiles of the times to the first token, or to a refusal, and the 99th in seconds."""
    times = sorted(a.first_s for a in answers if (a.tenant != HEAVY) is small and (a.status != 200) is refused)
    p50, p99 = percentile(times, 50), percentile(times, 99)
    return f"{p50 * 1e3:.0f} / {p99 * 1e3:.0f} ms of {len(times)}", p99


def at_the_coordinator(log: str, name: str) -> tuple[str, str]:
    """The percentiles of the times to the first token of small tenants in a window, as the coordinator logged them, and
    of the parts of these: in the coordinator's queue and at the worker before the first step, and in steps."""
    pattern = rf"{name}-\d+-\w+ of small-\d+ finished.* queue (\d+) ms, prefill (\d+) ms.* first token after (\d+) ms"
    queue, prefill, first = zip(*(map(float, times) for times in re.findall(pattern, log)), strict=True)

    def percentiles(times: Sequence[float]) -> str:
        return f"{percentile(sorted(times), 50):.0f} / {percentile(sorted(times), 99):.0f} ms"

    parts = f"queue {percentiles(queue)}, prefill {percentiles(prefill)}"
    return f"{percentiles(first)} of {len(first)}", parts


def scrape(operators: str) -> tuple[dict[float, float], float]:
    """The coordinator's refusals so far, by the upper bounds of their times in seconds, cumulated; and how often its
    event loop was blocked for more than 50 ms."""
    metrics = httpx.get(f"{operators}/metrics", timeout=30.0).text
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    refusals = families["baton_http_refusal_seconds"].samples
    buckets = {float(s.labels["le"]): s.value for s in refusals if s.name.endswith("_bucket")}
    return buckets, families["baton_loop_stalls"].samples[0].value


def processes(operators: str, up: int) -> dict[str, list[int]]:
    """The pids of the client, the coordinator, which is a child of `baton up`, and the workers."""
    children = Path(f"/proc/{up}/task/{up}/children").read_text().split()
    coordinators = [int(pid) for pid in children if b"coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    pids = {"client": [os.getpid()], "coordinator": coordinators}
    for row in httpx.get(f"{operators}/workers", timeout=30.0).json()["workers"]:
        pids.setdefault(row["role"], []).extend(row["pids"])
    return pids


def processor_s(pids: Sequence[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def idle_s() -> float:
    """Processor time that no process of this host used so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Window:
    """The answers of windows of `seconds` in all, how many were `in_time`, complete before their window ended, the
    processor time of each kind of process until the last answer, and that of the host: all, and what nothing used."""

    name: str
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    in_time: int = 0
    used_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_s: float = 0.0
    idle_s: float = 0.0

    @property
    def served_per_s(self) -> float:
        return self.in_time / self.seconds

    @property
    def counts(self) -> tuple[int, int]:
        """Answers that were served, and refused."""
        good = sum(a.status == 200 for a in self.answers)
        return good, len(self.answers) - good

    def cost_row(self) -> list[str]:
        good, refused = self.counts
        used = (f"{self.used_s[name]:.2f} s" for name in PROCESSES)
        return [self.name, f"{good} / {refused}", *used, f"{self.idle_s / self.host_s:.0%}"]


def cost_table(windows: Mapping[str, Window]) -> str:
    """Processor time by process, and per request: of one that is served at the peak, and of a refusal what is left of
    the overloaded window without those that were served there."""
    peak, both = windows["peak"], windows["both"]
    (good, _), (good_both, refused) = peak.counts, both.counts
    each_s = {name: peak.used_s[name] / max(good, 1) for name in PROCESSES}
    refusal_s = {name: (both.used_s[name] - good_both * each_s[name]) / max(refused, 1) for name in PROCESSES}
    per_request = [
        ["one served, peak", "", *(f"{each_s[name] * 1e3:.2f} ms" for name in PROCESSES), ""],
        ["one refused, both", "", *(f"{refusal_s[name] * 1e3:.2f} ms" for name in PROCESSES), ""],
    ]
    rows = [*(window.cost_row() for window in windows.values()), *per_request]
    return table(["processor time", "served / refused", *PROCESSES, "host idle"], rows)


def within(counts: Mapping[float, float]) -> str:
    """The upper bounds of the percentiles of refusals, counted by the upper bounds of their times, and the share within
    the limit."""
    total = counts[float("inf")]
    p50, p99 = (next(bound for bound in sorted(counts) if counts[bound] >= share * total) for share in (0.5, 0.99))
    share = counts[REFUSAL_LIMIT_S] / max(total, 1.0)
    return f"at most {p50 * 1e3:g} / {p99 * 1e3:g} ms of {total:.0f}; {share:.2%} within {REFUSAL_LIMIT_S * 1e3:g} ms"


async def measure(
    running: Cluster,
    operators: str,
    up: int,
    seconds: float,
    rounds: int,
    smalls: Sequence[str],
    share: float,
    prompts: Lengths,
) -> tuple[list[list[str]], str]:
    """The rows of the report and the table of processor times. `share`: of the peak, for each of `smalls`."""
    pids, windows, p99s = processes(operators, up), dict[str, Window](), list[dict[str, float]]()

    async def window(name: str, window_s: float, *loads: tuple[str, float], closed: int = 0, turn: int = 0) -> float:
        """Returns how many requests were served per second."""
        known = windows.setdefault(name, Window(name))
        before = {kind: processor_s(of_kind) for kind, of_kind in pids.items()}
        load, began, idle = Load(running.url, name, prompts, turn), time.monotonic(), idle_s()
        if closed:
            await load.closed(HEAVY, closed, window_s)
        await asyncio.gather(*(load.open(tenant, per_s, window_s) for tenant, per_s in loads))
        for kind, of_kind in pids.items():
            known.used_s[kind] += processor_s(of_kind) - before[kind]
        known.host_s += (time.monotonic() - began) * (os.cpu_count() or 1)
        known.idle_s += idle_s() - idle
        known.seconds += window_s
        known.answers += load.answers
        in_time = sum(a.status == 200 and a.ended_at <= began + window_s for a in load.answers)
        known.in_time += in_time
        if not closed:
            p99s[turn - 1][name] = shown(load.answers, small=True, refused=False)[1]
        await asyncio.sleep(PAUSE_S)
        return in_time / window_s

    await window("warm", seconds / 6, closed=4)
    refused, stalls = defaultdict[float, float](float), 0.0
    for turn in range(1, rounds + 1):
        p99s.append({})
        peak = await window("peak", seconds / 2, closed=CLIENTS, turn=turn)
        if not peak:
            raise SystemExit(f"no request was served: {Counter(a.status for a in windows['peak'].answers)}")
        of_smalls = [(tenant, share * peak) for tenant in smalls]
        await window("alone", seconds, *of_smalls, turn=turn)
        await window("tenfold", seconds, *of_smalls, (HEAVY, TENFOLD * share * peak), turn=turn)
        before, stalls_before = scrape(operators)
        await window("both", seconds, *of_smalls, (HEAVY, (OVERLOAD - len(smalls) * share) * peak), turn=turn)
        after, stalls_after = scrape(operators)
        for bound in after:
            refused[bound] += after[bound] - before[bound]
        stalls += stalls_after - stalls_before
    peak, goodput, both = windows["peak"].served_per_s, windows["both"].served_per_s, windows["both"].answers
    logged = next(running.run_dir.rglob("coordinator.log")).read_text(errors="replace")
    statuses = Counter((a.tenant != HEAVY, a.status) for a in both)
    beside = ("alone", "tenfold", "both")
    times = {name: shown(windows[name].answers, small=True, refused=False) for name in beside}
    ratios = {name: f"p99 {times[name][1] / max(times['alone'][1], 1e-9):.2f} times" for name in beside}
    each = [" / ".join(f"{p99[name] * 1e3:.0f}" for name in beside) for p99 in p99s]
    rows = [
        ["peak, closed loop", f"{peak:.1f} requests/s", ""],
        [f"served at {OVERLOAD:g} times the peak", f"{goodput:.1f} requests/s", f"{goodput / peak:.0%} of the peak"],
        ["time to a refusal at the coordinator, p50 / p99", within(refused), "bar: 50 ms"],
        ["its event loop blocked for over 50 ms", f"{stalls:.0f} times", ""],
        ["the same at the client", shown(both, small=False, refused=True)[0], ""],
        ["small tenants alone: TTFT p50 / p99", times["alone"][0], ""],
        [f"beside one at {TENFOLD:g} times the load of each", times["tenfold"][0], ratios["tenfold"]],
        [f"beside one with which {OVERLOAD:g} times the peak arrives", times["both"][0], ratios["both"]],
        ["p99 by round: alone / tenfold / both, ms", ", ".join(each), ""],
        *([f"at the coordinator: {name}", *at_the_coordinator(logged, name)] for name in beside),
        ["answers by status, small", str({s: n for (small, s), n in sorted(statuses.items()) if small}), ""],
        ["answers by status, heavy", str({s: n for (small, s), n in sorted(statuses.items()) if not small}), ""],
    ]
    return rows, cost_table(windows)


def main() -> None:
    options = parser(__doc__, "tenants.md")
    options.add_argument("--seconds", type=float, default=60.0, help="of each window")
    options.add_argument("--rounds", type=int, default=1, help="of the three windows in turns")
    options.add_argument("--quota", type=float, default=0.0, help="of a core, for each worker; 0: no limit")
    options.add_argument("--small", type=int, default=2, help="tenants beside the heavy one")
    options.add_argument("--share", type=float, default=0.05, help="of the peak, for each small tenant")
    options.add_argument("--prompts", type=parse_lengths, default=Lengths(96, 96), help="tokens, such as 200-1500")
    options.add_argument("--note", default="", help="what else ran on the machine, for the report")
    given = options.parse_args()
    smalls = [f"small-{number + 1}" for number in range(given.small)]
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text("".join(f"{key(tenant)} name={tenant}\n" for tenant in (*smalls, HEAVY)))
        keys.chmod(0o600)
        flags = (
            "--model",
            "builtin",
            "--prefill",
            "1",
            "--decode",
            "1",
            "--draft",
            "none",
            "--api-key-file",
            str(keys),
        )
        with cluster(*flags, "--max-queued-requests", str(QUEUE), "--admin-port", "0") as running:
            known = json.loads((running.run_dir / "cluster.json").read_text())
            workers = get_cluster(known["admin"]).workers
            with quotas(workers, given.quota) if given.quota else contextlib.nullcontext():
                windows = given.seconds, given.rounds, smalls, given.share, given.prompts
                rows, costs = asyncio.run(measure(running, known["admin"], known["pid"], *windows))
    setting = (
        f"One prefill and one decode worker, built-in model without a draft; prompts of {given.prompts} random tokens,"
        f" {OUTPUT_TOKENS} tokens out; {given.small} small tenants, each with {given.share:g} of the peak; a queue of"
        f" {QUEUE} requests, {given.seconds:g} s of overload in each of {given.rounds} rounds"
        + (f"; each worker with {given.quota:g} of a core." if given.quota else ".")
    )
    report(
        given.out,
        "Tenants: overload by one of three",
        setting,
        table(["what", "measured", "beside"], rows),
        costs,
        about=given.note,
    )


if __name__ == "__main__":
    main()
