"""Through a running cluster: sending the first layers of a long last chunk begins before the chunk is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.edge_orders import SECTION_BYTES
from baton.engine.kernels.build import processor_levels
from baton.runtime.event_log import VARIABLE as EVENT_LOG
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not processor_levels(), reason="without compiled kernels a step is computed as one"),
]

LAYERS, HEADS, SIZE = 4, 8, 32
LENGTH, COUNT = 700, 8


async def test_first_layers_of_the_last_chunk_are_sent_before_it_is_computed(tmp_path: Path) -> None:
    options = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": SIZE}
    options["intermediate_size"] = 4096  # so that a layer takes longer than a message
    model = make_checkpoint(tmp_path / "m", arch="llama", max_position_embeddings=1024, **options)
    whole = LENGTH * LAYERS * 2 * HEADS * SIZE * 4
    assert SECTION_BYTES < whole < 2 * SECTION_BYTES  # two sections of two layers each
    env = {EVENT_LOG: str(tmp_path / "events")}
    prompts = [[(7 * i + 31 * n) % 256 for i in range(LENGTH)] for n in range(3)]
    flags = {"served_model_name": "m", "dtype": "float32", "step_tokens": LENGTH, "kernels": "auto"}
    with cluster(model, env=env, **flags) as running:
        async with Client(running) as client:
            answers = [await client.complete(prompt, COUNT) for prompt in prompts]
            await client.idle(running)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = tuple(answer["choices"][0]["token_ids"])
        expected = greedy(model, prompt, COUNT, likely=tokens)
        assert tokens[: expected.decided] == expected.tokens[: expected.decided]
    lines = (tmp_path / "events" / "prefill-0.events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    early = 0
    for name in {tuple(e["sequence"]) for e in events if e["kind"] == "offer"}:
        mine = [e for e in events if tuple(e.get("sequence", ())) == name]
        sent = [e for e in mine if e["kind"] == "chunk_sent"]
        assert sum(e["bytes"] for e in sent) == whole
        if len(sent) == 1:  # on a busy machine a step may end before its offer is accepted
            continue
        assert [e["layers"] for e in sent] == [[0, 2], [2, LAYERS]]
        begun = next(e["t"] for e in mine if e["kind"] == "chunk_send")
        early += begun < next(e["t"] for e in mine if e["kind"] == "chunk_computed")
    assert early
