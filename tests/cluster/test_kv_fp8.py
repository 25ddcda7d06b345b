"""KV in FP8 through a running cluster: a quarter of the bytes that float32 takes, and the tokens of one engine with the
same KV, over hand-overs in chunks, verified draft tokens and prefix hits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.engine.checkpoint import read_model_config
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.engine_driver import Job, run, tiny_runner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LENGTHS, COUNT = (3, 17, 64, 150), 24


async def test_tokens_are_those_of_one_engine_and_bytes_a_quarter(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", arch="qwen3")
    jobs = [Job([(7 * n + i * i % 11) % 256 for i in range(n)], COUNT) for n in LENGTHS]
    run(tiny_runner(model, exact=True, kv_dtype="fp8"), jobs)
    flags = {"exact": True, "kv_dtype": "fp8", "step_tokens": 32, "draft": "ngram", "draft_tokens": 3}
    with cluster(model, **flags) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(job.prompt, COUNT, model=None) for job in jobs))
            again = await client.complete(jobs[-1].prompt, COUNT, model=None)
            await client.idle(running)
        workers = running.workers()
    for job, answer in zip((*jobs, jobs[-1]), (*answers, again), strict=True):
        assert answer["choices"][0]["token_ids"] == job.output
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 144
    assert {worker["kv_dtype"] for worker in workers.values()} == {"float8_e4m3fn"}
    token_bytes = read_model_config(model).kv_layout(16, "float32").bytes_per_token // 4  # type: ignore[union-attr]
    sent = workers["prefill-0"]["kv_bytes_sent"]
    assert sent == workers["decode-0"]["kv_bytes_received"] == token_bytes * (sum(LENGTHS) + LENGTHS[-1] % 16)
    assert workers["decode-0"]["prompt_tokens_computed"] == 0
    assert workers["decode-0"]["speculation"]["accepted_tokens"] > 0, "rows of several tokens over KV in FP8"
