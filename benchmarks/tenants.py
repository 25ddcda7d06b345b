"""Overload by one tenant: what is still served, how fast the rest is refused, and what another tenant notices.

    python benchmarks/tenants.py                     one prefill and one decode worker, built-in model, 60 s overloaded
    python benchmarks/tenants.py --seconds 10        a short run

In turns on one cluster: the peak, by a closed loop of one tenant; two small tenants alone, each with a twentieth of the
peak; the same two beside a third one that sends ten times as much as each; and beside one that sends so much that three
times the peak arrives. A refused request is not sent again. Times are those of a client on the same cores, which
computes too; beside them are the coordinator's own: to the first token from its log, to a refusal (from the head of the
request to the response) from `baton_http_refusal_seconds`. The first windows are a third as long as the last, so a run
takes 2.2 times `--seconds` and half a minute. Writes `benchmarks/results/tenants.md`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import cluster, parser, report, table
from sim.stats import percentile

SMALL, HEAVY = ("small-1", "small-2"), "heavy"
PROMPT_TOKENS, OUTPUT_TOKENS, CLIENTS, QUEUE = 96, 16, 24, 64
OVERLOAD, TENFOLD, SHARE = 3.0, 10.0, 0.05
REFUSAL_LIMIT_S = 0.05


@dataclass(frozen=True)
class Answer:
    """Of one request: its tenant, status, and the seconds to its first event, or to its refusal, and to its end."""

    tenant: str
    status: int
    first_s: float
    ended_at: float


class Load:
    def __init__(self, client: aiohttp.ClientSession, name: str) -> None:
        self._client, self._name, self._random, self.answers = client, name, random.Random(1), list[Answer]()
        self._sent = 0

    async def send(self, tenant: str) -> None:
        prompt = [300 + self._random.randrange(3600) for _ in range(PROMPT_TOKENS)]
        body = {"model": "builtin", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
        self._sent += 1
        headers = {"authorization": f"Bearer {key(tenant)}", "x-request-id": f"{self._name}-{self._sent}"}
        sent, first = time.monotonic(), 0.0
        async with self._client.post("/v1/completions", json=body, headers=headers) as answer:
            async for _ in answer.content.iter_any():
                first = first or time.monotonic() - sent
        self.answers.append(Answer(tenant, answer.status, first, time.monotonic()))

    async def closed(self, tenant: str, clients: int, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self.send(tenant)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, tenant: str, per_s: float, seconds: float) -> None:
        """Sends at random times, `per_s` on average, and waits for the last answer."""
        due, until, tasks = time.monotonic(), time.monotonic() + seconds, list[asyncio.Task[None]]()
        while (due := due + self._random.expovariate(per_s)) < until:
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(self.send(tenant)))
        await asyncio.gather(*tasks)


def key(tenant: str) -> str:
    return f"sk-benchmark-of-{tenant}"


def served(answers: Sequence[Answer], begun: float, seconds: float) -> float:
    """Requests per second that were answered completely within the window."""
    return sum(a.status == 200 and a.ended_at <= begun + seconds for a in answers) / seconds


def shown(answers: Sequence[Answer], *, small: bool, refused: bool) -> tuple[str, float]:
    """The percentiles of the times to the first token, or to a refusal, and the 99th in seconds."""
    times = sorted(a.first_s for a in answers if (a.tenant in SMALL) is small and (a.status != 200) is refused)
    p50, p99 = percentile(times, 50), percentile(times, 99)
    return f"{p50 * 1e3:.0f} / {p99 * 1e3:.0f} ms of {len(times)}", p99


def at_the_coordinator(log: str, name: str) -> str:
    """The percentiles of the times to the first token of small tenants in a window, as the coordinator logged them."""
    found = re.findall(rf"{name}-\d+-\w+ of small-\d finished.* first token after (\d+) ms", log)
    times = sorted(map(float, found))
    return f"{percentile(times, 50):.0f} / {percentile(times, 99):.0f} ms of {len(times)}"


async def scrape(client: aiohttp.ClientSession, operators: str) -> tuple[dict[float, float], float]:
    """The coordinator's refusals so far, by the upper bounds of their times in seconds, cumulated; and how often its
    event loop was blocked for more than 50 ms."""
    async with client.get(f"{operators}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    refusals = families["baton_http_refusal_seconds"].samples
    buckets = {float(s.labels["le"]): s.value for s in refusals if s.name.endswith("_bucket")}
    return buckets, families["baton_loop_stalls"].samples[0].value


def within(before: dict[float, float], after: dict[float, float]) -> str:
    """The upper bounds of the percentiles of the refusals between two scrapes, and the share within the limit."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    total = counts[float("inf")]
    p50, p99 = (next(bound for bound, count in counts.items() if count >= share * total) for share in (0.5, 0.99))
    share = counts[REFUSAL_LIMIT_S] / max(total, 1.0)
    return f"at most {p50 * 1e3:g} / {p99 * 1e3:g} ms of {total:.0f}; {share:.2%} within {REFUSAL_LIMIT_S * 1e3:g} ms"


async def measure(url: str, operators: str, log: Path, seconds: float) -> list[list[str]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:

        async def window(
            name: str, window_s: float, *loads: tuple[str, float], closed: int = 0
        ) -> tuple[list[Answer], float]:
            load, begun = Load(client, name), time.monotonic()
            if closed:
                await load.closed(HEAVY, closed, window_s)
            await asyncio.gather(*(load.open(tenant, per_s, window_s) for tenant, per_s in loads))
            await asyncio.sleep(1.0)
            return load.answers, served(load.answers, begun, window_s)

        await window("warm", seconds / 6, closed=4)
        answers, peak = await window("peak", seconds / 3, closed=CLIENTS)
        if not peak:
            raise SystemExit(f"no request was served: {Counter(a.status for a in answers)}")
        smalls = [(tenant, SHARE * peak) for tenant in SMALL]
        alone, _ = await window("alone", seconds / 3, *smalls)
        tenfold, _ = await window("tenfold", seconds / 3, *smalls, (HEAVY, TENFOLD * SHARE * peak))
        refused, stalls = await scrape(client, operators)
        both, goodput = await window("both", seconds, *smalls, (HEAVY, (OVERLOAD - 2 * SHARE) * peak))
        refused_after, stalls_after = await scrape(client, operators)
    logged = log.read_text(errors="replace")
    statuses = Counter((a.tenant in SMALL, a.status) for a in both)
    windows = {"alone": alone, "tenfold": tenfold, "both": both}
    times = {name: shown(of_window, small=True, refused=False) for name, of_window in windows.items()}
    beside = {name: f"p99 {times[name][1] / max(times['alone'][1], 1e-9):.2f} times" for name in windows}
    return [
        ["peak, closed loop", f"{peak:.1f} requests/s", ""],
        [f"served at {OVERLOAD:g} times the peak", f"{goodput:.1f} requests/s", f"{goodput / peak:.0%} of the peak"],
        ["time to a refusal at the coordinator, p50 / p99", within(refused, refused_after), "bar: 50 ms"],
        ["its event loop blocked for over 50 ms", f"{stalls_after - stalls:.0f} times", ""],
        ["the same at the client", shown(both, small=False, refused=True)[0], ""],
        ["small tenants alone: TTFT p50 / p99", times["alone"][0], ""],
        [f"beside one at {TENFOLD:g} times the load of each", times["tenfold"][0], beside["tenfold"]],
        [f"beside one with which {OVERLOAD:g} times the peak arrives", times["both"][0], beside["both"]],
        *([f"at the coordinator: {name}", at_the_coordinator(logged, name), ""] for name in windows),
        ["answers by status, small", str({s: n for (small, s), n in sorted(statuses.items()) if small}), ""],
        ["answers by status, heavy", str({s: n for (small, s), n in sorted(statuses.items()) if not small}), ""],
    ]


def main() -> None:
    options = parser(__doc__, "tenants.md")
    options.add_argument("--seconds", type=float, default=60.0, help="of the last window")
    options.add_argument("--note", default="", help="what else ran on the machine, for the report")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text("".join(f"{key(tenant)} name={tenant}\n" for tenant in (*SMALL, HEAVY)))
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
            log = next(running.run_dir.rglob("coordinator.log"))
            operators = json.loads((running.run_dir / "cluster.json").read_text())["admin"]
            rows = asyncio.run(measure(running.url, operators, log, given.seconds))
    what = (
        f"One prefill and one decode worker, built-in model without a draft; prompts of {PROMPT_TOKENS} random tokens,"
        f" {OUTPUT_TOKENS} tokens out; a queue of {QUEUE} requests, {given.seconds:g} s of overload."
    )
    report(
        given.out,
        "Tenants: overload by one of three",
        what,
        table(["what", "measured", "beside"], rows),
        about=given.note,
    )


if __name__ == "__main__":
    main()
