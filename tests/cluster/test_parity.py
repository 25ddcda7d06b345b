"""Every architecture through a running cluster produces transformers' tokens, and each tier does only its own work."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.model_config import parse_model_config
from baton.runtime.event_log import VARIABLE as EVENT_LOG
from tests.support.checkpoints import ARCHS, make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.fault_cluster import ROOT, UP
from tests.support.fault_worker import VARIABLE as FAULTS
from tests.support.limits import HANG_S
from tests.support.oracle import greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CHUNK = 16
COUNT = 64
LONG, LONG_ONES = 400, 4
LENGTHS = (3, 7, 15, 16, 17, 31, 33, 48, 50, 64, 65, 80, 97, 100, 130, 150)


def prompts() -> list[list[int]]:
    return [[(7 * n + 13 * i * i + i) % 256 for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("arch", [pytest.param(a, marks=() if a == "qwen3" else pytest.mark.long) for a in ARCHS])
async def test_greedy_tokens_equal_transformers(arch: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", arch=arch)  # type: ignore[arg-type]
    (tmp_path / "shared").mkdir()
    env = {EVENT_LOG: str(tmp_path / "events"), FAULTS: str(tmp_path / "shared"), "PYTHONPATH": str(ROOT)}
    flags = {"served_model_name": "m", "dtype": "float32", "step_tokens": CHUNK}
    with cluster(model, env=env, run_dir=tmp_path / "run", program=UP, **flags) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(p, COUNT) for p in prompts()))
            over_grpc = await asyncio.gather(*(client.grpc_tokens(p, COUNT) for p in prompts()[:3]))
            streamed = await asyncio.gather(*(client.streamed(p, COUNT) for p in prompts()[:3]))
            for n in range(LONG_ONES):
                await complete_with_last_chunk_held([(5 * i + n) % 256 for i in range(LONG)], client, tmp_path)
            await client.idle(running)
        check_tokens(model, answers)
        for answer, ids, (text, stream_ids) in zip(answers, over_grpc, streamed, strict=False):
            assert tuple(answer["choices"][0]["token_ids"]) == ids == stream_ids
            assert answer["choices"][0]["text"] == text
        check_work(model, running, repeats=3)
        check_overlap(prefill_events(tmp_path))


async def complete_with_last_chunk_held(prompt: list[int], client: Client, where: Path) -> None:
    """KV is sent before all of it is computed, however fast a small model and however slow the machine: the last chunk
    is not computed until an earlier one has been sent."""
    last_chunk = where / "shared" / "prefill-0.hold_step"
    last_chunk.write_text(str(LONG - CHUNK))
    seen = sum(e["kind"] == "chunk_sent" for e in prefill_events(where))
    request = asyncio.create_task(client.complete(prompt, 2))
    async with asyncio.timeout(HANG_S):
        while sum(e["kind"] == "chunk_sent" for e in prefill_events(where)) == seen:
            await asyncio.sleep(0.05)
    last_chunk.unlink()
    await request


def prefill_events(where: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (where / "events" / "prefill-0.events.jsonl").read_text().splitlines()]


def check_tokens(model: Path, answers: list[dict[str, Any]]) -> None:
    undecided = 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens = tuple(answer["choices"][0]["token_ids"])
        expected = greedy(model, prompt, COUNT, likely=tokens)
        assert tokens[: expected.decided] == expected.tokens[: expected.decided]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == COUNT
        undecided += expected.decided < COUNT
    assert undecided <= 2, f"the oracle itself is undecided in {undecided} of {len(answers)}"


def check_work(model: Path, running: Cluster, repeats: int) -> None:
    """Decode computed no prompt token, and exactly the prompts' KV went over the edge: of layers with a window, what is
    in it for the next token."""
    workers = running.workers()
    layout = parse_model_config(json.loads((model / "config.json").read_text())).kv_layout(16, "float32")
    lengths = LENGTHS + 2 * LENGTHS[:repeats] + LONG_ONES * (LONG,)
    sent = sum(
        layer.bytes_per_token * min(length, layer.window - 1 if layer.window else length)
        for layer in layout.layers
        for length in lengths
    )
    assert workers["decode-0"]["prompt_tokens_computed"] == 0
    assert workers["prefill-0"]["prompt_tokens_computed"] == sum(lengths)
    assert workers["decode-0"]["kv_bytes_received"] == workers["prefill-0"]["kv_bytes_sent"] == sent
    assert workers["decode-0"]["tokens_generated"] == (len(LENGTHS) + 2 * repeats) * (COUNT - 1) + LONG_ONES


def check_overlap(events: list[dict[str, Any]]) -> None:
    """The first chunk of each long prompt was sent before the last one was computed."""
    long = 0
    for sequence in {str(e["sequence"]) for e in events}:
        mine = [e for e in events if str(e["sequence"]) == sequence]
        if sum(e["kind"] == "chunk_computed" for e in mine) < LONG // CHUNK:
            continue
        long += 1
        first_sent = next(e["t"] for e in mine if e["kind"] == "chunk_sent")
        last_computed = max(e["t"] for e in mine if e["kind"] == "chunk_computed")
        assert first_sent < last_computed, f"{sequence}: nothing was sent before all was computed"
    assert long == LONG_ONES
