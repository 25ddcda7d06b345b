"""`baton calibrate`: applies controlled loads to a running cluster and fits the costs that the simulator needs.

On a host that workers, coordinator and client share (`shared_host`), costs are the processor time of the processes:
what else runs on the host does not count. Otherwise they are the seconds that workers report for their steps, and the
rest of the time between two steps."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.errors import BatonError, StartupError
from launch.bench.report import PACKAGES, machine_line
from launch.capacity.loads import ClosedLoop, LoadClient, Sample, started_s
from launch.cluster_api import Row
from launch.console import shown_command, versions
from sim.scale.costs import Calibration, DecodeCosts, FrontCosts, LinkCosts, PrefillCosts, Residual, WorkerKind
from sim.scale.fit import fit
from sim.stats import percentile

BACKLOG = 6  # clients that keep a prefill worker busy
SEQUENTIAL = 8  # requests of one client
OUTPUT_LEN = 96
LONG_OUTPUT_LEN = 384
"""So long that a batch runs whole for most of it, and that most of its KV is not shared."""
BATCHES = 1, 2, 4, 8, 16, 32, 64, 128, 256
HAND_OVERS = 12
MIXED_TURNS = 3  # requests of each client
REPEATS = 3
"""Each load is applied so often, and the median cost counts: processor time varies with what else is in the caches."""
_LEAST_LATENCY_S = 1e-5
_LEAST_BYTE_S = 1e-15  # where larger hand-overs take no longer
_QUIET = 25
"""The percentile of times of lone requests that counts: other load on the host only adds to them."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """What the loads may use of the cluster: the limits of each worker, and the number of decode workers."""

    max_model_len: int
    step_tokens: int
    max_running: int
    decode_workers: int = 1


def loads(limits: LoadLimits) -> list[ClosedLoop]:
    """Returns the loads: prompts of several lengths, alone and with a backlog; decode batches of several sizes and
    contexts; hand-overs of several sizes. A load that the cluster cannot hold is left out."""
    longest = limits.max_model_len - OUTPUT_LEN - 1
    lengths = [n for n in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) if n <= longest]
    of_worker = [*(n for n in BATCHES if n < limits.max_running), min(limits.max_running, BATCHES[-1])]
    batches = sorted({1, *(n * limits.decode_workers for n in of_worker)})
    short = min(32, longest)
    long_len = min(LONG_OUTPUT_LEN, limits.max_model_len - short - 1)
    # KV that all rows share would stay in a processor's cache: with long contexts each row has its own.
    contexts = [(short, n, True, output_len) for output_len in (OUTPUT_LEN, long_len) for n in batches]
    contexts += [
        (length, n, False, OUTPUT_LEN)
        for length, limit in ((longest // 4, 4), (longest - OUTPUT_LEN, 3))
        for n in batches[:limit]
        if length > 0
    ]
    chosen = [ClosedLoop("warm-up", SEQUENTIAL, 2, min(64, longest), 8)]
    chosen += [ClosedLoop("prefill", SEQUENTIAL, 1, n, 1) for n in lengths]
    chosen += [ClosedLoop("prefill backlog", 4 * BACKLOG, BACKLOG, n, 1) for n in lengths[1::2]]
    chosen += [ClosedLoop("decode", n, n, length, output, shared=shared) for length, n, shared, output in contexts]
    chosen += [ClosedLoop("hand-over", HAND_OVERS, 1, n, 8) for n in lengths if n <= limits.step_tokens]
    # Both roles at work at once, as they share caches and memory; other numbers of tokens per request than above.
    chosen += [
        ClosedLoop("mixed", MIXED_TURNS * clients, clients, length, output_len)
        for clients in batches[1:6:2]
        for length in lengths[2:6:2]
        for output_len in (OUTPUT_LEN // 6, OUTPUT_LEN // 2)
    ]
    return chosen


def calibrate(
    cluster: LoadClient, name: str, *, shared_host: bool, progress: Callable[[str], None], repeats: int = REPEATS
) -> Calibration:
    """Measures a cluster of one prefill and one decode worker, which serves nothing else meanwhile; on a shared host of
    any number of equal ones, whose costs depend on each other: they share caches.

    Raises:
        StartupError: it has other workers, a request failed, or its processes are not on this host (`shared_host`).
    """
    rows = cluster.rows()
    prefill, decode = (_kind_of(rows, role, alone=not shared_host) for role in ("prefill", "decode"))
    limits = LoadLimits(
        min(int(prefill["max_model_len"]), int(decode["max_model_len"])),
        int(prefill["step_tokens"]),
        int(decode["max_running"]) or 256,
        sum(row["role"] == "decode" and row["state"] == "ready" for row in rows),
    )
    kinds = [_kind(row) for row in (prefill, decode)]
    samples = []
    for load in loads(limits):
        progress(f"{load.name}: {load.requests} requests of {load.input_len} + {load.output_len} tokens")
        tried = [cluster.measure(load) for _ in range(repeats)]
        samples.append(sorted(tried, key=lambda s: s.cpu_s if shared_host else s.elapsed_s)[repeats // 2])
    if shared_host and not all(s.front_cpu_s and s.prefill.cpu_s for s in samples):
        raise StartupError("--shared-host: the processes of this cluster are not on this host")
    made = costs(samples, limits.step_tokens, shared_host=shared_host)
    about = {
        "model": cluster.target.model,
        "machine": machine_line(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shown_command(),
        "costs": "processor time" if shared_host else "seconds of workers' steps and between them",
        "dtype": str(decode["dtype"]),
        "kv_dtype": str(decode["kv_dtype"]),
        **versions(*PACKAGES),
    }
    return Calibration(
        name=name,
        block_size=int(decode["block_size"]),
        max_model_len=limits.max_model_len,
        token_bytes=made.token_bytes,
        tensor_parallel=int(decode["tensor_parallel"]),
        prefill=made.prefill,
        decode=made.decode,
        link=made.link,
        front=made.front,
        prefill_worker=kinds[0],
        decode_worker=kinds[1],
        residuals=made.residuals,
        about=about,
    )


def _kind(row: Row) -> WorkerKind:
    blocks, step_tokens, max_running = (int(row[name]) for name in ("blocks_total", "step_tokens", "max_running"))
    return WorkerKind(blocks, step_tokens, max_running, round(started_s(row), 2))


def _kind_of(rows: Iterable[Row], role: str, *, alone: bool) -> Row:
    mine = [row for row in rows if row["role"] == role and row["state"] == "ready"]
    if not mine or (alone and len(mine) > 1):
        raise StartupError(f"calibration needs one ready {role} worker; this cluster has {len(mine)}")
    for name in ("block_size", "max_model_len", "blocks_total", "step_tokens", "max_running", "tensor_parallel"):
        if len(values := {row.get(name) for row in mine}) > 1:
            raise StartupError(f"calibration needs equal {role} workers; their {name} are {sorted(values, key=str)}")
    return mine[0]


@dataclass(frozen=True, slots=True)
class Fitted:
    prefill: PrefillCosts
    decode: DecodeCosts
    link: LinkCosts
    front: FrontCosts
    token_bytes: int
    residuals: Mapping[str, Residual]


def costs(samples: Sequence[Sample], step_tokens: int, *, shared_host: bool) -> Fitted:
    """Fits the costs to the samples. Pure.

    Raises:
        StartupError: the samples do not determine them.
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.load.name, []).append(sample)
    try:
        prefill, decode, sends, residuals = _steps(by_name, step_tokens, shared_host)
        link, token_bytes, residuals["hand-over"] = _link(by_name["hand-over"], by_name["prefill"], decode, sends)
        front, more = _front(samples, by_name["prefill"], prefill)
    except BatonError as error:
        raise StartupError(f"the measurements do not determine the costs: {error.message}") from None
    return Fitted(prefill, decode, link, front, token_bytes, {**residuals, **more})


def _steps(
    by_name: Mapping[str, Sequence[Sample]], step_tokens: int, shared_host: bool
) -> tuple[PrefillCosts, DecodeCosts, dict[str, float], dict[str, Residual]]:
    """Fits the steps of both roles and, on a shared host, the processor time of hand-overs (fields of LinkCosts)."""
    mixed = [*by_name["hand-over"], *by_name.get("mixed", ())] if shared_host else []
    prompts = [*by_name["prefill"], *by_name["prefill backlog"], *mixed]
    coefficients, of_prefill = fit(
        {
            "base_s": [s.prefill.steps for s in prompts],
            "row_s": [s.load.requests * math.ceil(s.load.input_len / step_tokens) for s in prompts],
            "token_s": [s.prefill.prompt_tokens for s in prompts],
            "pair_s": [s.load.requests * _pairs(s.load.input_len) for s in prompts],
            "send_s": [s.handed_over for s in prompts],
            "send_token_s": [s.tokens_sent for s in prompts],
        },
        [s.prefill.cpu_s if shared_host else s.prefill.step_s for s in prompts],
    )
    sends = {name: coefficients.pop(name) for name in ("send_s", "send_token_s")}
    around = sorted((s.elapsed_s - s.prefill.step_s) / s.prefill.steps for s in by_name["prefill backlog"])
    prefill = PrefillCosts(**coefficients, idle_s=0.0 if shared_host else max(0.0, percentile(around, 50)))

    decode, receives, of_decode = _decode_steps(by_name["decode"], mixed, prefill, shared_host)
    return prefill, decode, sends | receives, {"prefill step": of_prefill, "decode step": of_decode}


def _decode_steps(
    alone: Sequence[Sample], mixed: Sequence[Sample], prefill: PrefillCosts, shared_host: bool
) -> tuple[DecodeCosts, dict[str, float], Residual]:
    """Fits the steps of decode batches `alone` and, on a shared host, with `mixed` loads, the processor time of
    hand-overs."""
    batches = [*alone, *mixed]
    # A line from each size to the next: what few rows cost does not predict what many do.
    rows = [s.rows for s in alone]
    lines = list(itertools.pairwise((0, *(n for n in BATCHES if min(rows) < n < max(rows)), math.inf)))
    coefficients, residual = fit(
        {
            "base_s": [s.decode.steps for s in batches],
            **{f"beyond {number}": [s.rows_beyond(number, last) for s in batches] for number, last in lines},
            "context_s": [s.context for s in batches],
            "draft_s": [s.decode.drafted for s in batches],
            "receive_s": [s.handed_over if shared_host else 0 for s in batches],
            "receive_token_s": [s.tokens_sent if shared_host else 0 for s in batches],
        },
        [s.decode.cpu_s if shared_host else s.decode.step_s for s in batches],
    )
    receives = {name: coefficients.pop(name) for name in ("receive_s", "receive_token_s")}
    beyond = tuple((int(number), coefficients.pop(f"beyond {number}")) for number, _ in lines)
    drafted = sum(s.decode.drafted for s in batches)
    accepted = min(sum(s.decode.accepted for s in batches) / drafted, 0.99) if drafted else 0.0
    fitted = DecodeCosts(
        row_s=beyond[0][1], token_s=prefill.token_s, accepted=accepted, beyond=beyond[1:], **coefficients
    )
    # On a shared host the time between two tokens includes what coordinator and client compute on the worker's core,
    # which their own costs are for; the worker itself never waits.
    if not drafted and not shared_host:
        lone = [s for s in alone if s.load.concurrency == 1]
        idle = [_period_s(s) - fitted.plain_s(1, s.context / s.decode.steps) for s in lone]
        fitted = replace(fitted, idle_s=max(0.0, percentile(sorted(idle), 50)))
    return fitted, receives, residual


def _pairs(tokens: float) -> float:
    """Returns over how many positions the tokens of a prompt attend."""
    return tokens * (tokens + 1) / 2


def _period_s(sample: Sample) -> float:
    """Returns the mean time between two tokens of a stream; its first gap, with the hand-over, does not count. (Not the
    median: a client may read several tokens at once.)"""
    gaps = [gap for record in sample.records for gap in record.gaps_s[1:]]
    return sum(gaps) / max(len(gaps), 1)


def _link(
    samples: Sequence[Sample], alone: Sequence[Sample], decode: DecodeCosts, work: Mapping[str, float]
) -> tuple[LinkCosts, int, Residual]:
    """Fits hand-overs: the gap between the first two tokens of a lone request, less one decode step and the processor
    time (`work`) between them. What a hand-over adds to the time of the first token, compared with the requests
    `alone`, is spent before; so is what does not fit into the gap, by the decode worker first."""
    tokens = sum(s.prefill.prompt_tokens for s in samples)
    token_bytes = max(1, round(sum(s.prefill.kv_bytes for s in samples) / tokens))
    without = {s.load.input_len: _ttft_s(s) for s in alone}
    added = sorted(_ttft_s(s) - without[s.load.input_len] for s in samples)
    offer_s = min(max(percentile(added, 50), 0.0), work["send_s"])
    sizes, gaps, known_s = list[float](), list[float](), list[float]()
    for s in samples:
        sizes.append(s.load.input_len * token_bytes)
        gaps.append(percentile(sorted(r.gaps_s[0] for r in s.records if r.gaps_s), _QUIET))
        step_s = decode.plain_s(1, s.load.input_len + 1) + decode.idle_s
        each_s = work["send_token_s"] + work["receive_token_s"]
        known_s.append(step_s + work["send_s"] - offer_s + work["receive_s"] + each_s * s.load.input_len)
    excess = sorted(known - gap for gap, known in zip(gaps, known_s, strict=True))
    before_s = min(max(percentile(excess, 50), 0.0), work["receive_s"] + work["send_s"] - offer_s)
    accept_s = min(before_s, work["receive_s"])
    offer_s += before_s - accept_s
    known_s = [known - before_s for known in known_s]
    left = [max(gap - known, _LEAST_LATENCY_S) for gap, known in zip(gaps, known_s, strict=True)]
    coefficients, _ = fit({"latency_s": [1.0] * len(sizes), "byte_s": sizes}, left)
    link = LinkCosts(
        coefficients["latency_s"],
        1.0 / coefficients["byte_s"] if coefficients["byte_s"] > _LEAST_BYTE_S else 1 / _LEAST_BYTE_S,
        max(work["send_s"] - offer_s, 0.0),  # rounding may have made it negative
        work["send_token_s"],
        work["receive_s"] - accept_s,
        work["receive_token_s"],
        offer_s,
        accept_s,
    )
    fitted = [known + link.latency_s + size / link.bytes_per_s for known, size in zip(known_s, sizes, strict=True)]
    errors = sorted(abs(value - gap) / gap for value, gap in zip(fitted, gaps, strict=True))
    return link, token_bytes, Residual(percentile(errors, 50), errors[-1], len(errors))


def _ttft_s(sample: Sample) -> float:
    """Returns the first-token time of a load's requests when nothing else delays them."""
    return percentile(sorted(r.ttft_s for r in sample.records if r.ttft_s is not None), _QUIET)


def _front(
    samples: Sequence[Sample], alone: Sequence[Sample], prefill: PrefillCosts
) -> tuple[FrontCosts, dict[str, Residual]]:
    around = []
    for s in alone:
        steps, tokens = s.prefill.steps / s.load.requests, s.prefill.prompt_tokens / s.load.requests
        step_s = (prefill.base_s + prefill.row_s + prefill.idle_s) * steps + prefill.token_s * tokens
        around.append(_ttft_s(s) - step_s - prefill.pair_s * _pairs(tokens))
    request_s = max(0.0, min(around))
    if not all(s.front_cpu_s for s in samples):
        return FrontCosts(request_s=request_s), {}
    terms: dict[str, list[float]] = {
        "request_cpu_s": [s.load.requests for s in samples],
        "prompt_token_cpu_s": [s.load.requests * s.load.input_len for s in samples],
        "message_cpu_s": [s.prefill.steps + s.decode.steps for s in samples],
        "token_cpu_s": [s.load.requests * s.load.output_len for s in samples],
    }
    front, of_front = fit(terms, [s.front_cpu_s for s in samples])
    del terms["prompt_token_cpu_s"]
    of_client_s = {f"client_{name}": values for name, values in terms.items()}
    client, of_client = fit(of_client_s, [s.client_cpu_s for s in samples])
    return FrontCosts(request_s=request_s, **front, **client), {"coordinator": of_front, "client": of_client}
