"""A model whose context is longer than the KV pools: clients that give no length are served."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

BLOCK_BYTES = 16 * 28 * 2 * 8 * 128 * 4


@pytest.mark.parametrize("context", [pytest.param(40_960, marks=pytest.mark.long), 131_072])
def test_requests_without_options_are_served_within_the_pools(context: int, tmp_path: Path) -> None:
    """28 layers of 8 KV heads of 128. The pools hold 11 blocks of 16 tokens; the last token needs no KV."""
    shape = {"num_layers": 28, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 64}
    model = make_checkpoint(tmp_path / "m", "qwen3", max_position_embeddings=context, **shape)
    options = {"dtype": "float32", "kv_memory_gib": 11 * BLOCK_BYTES / (1 << 30)}
    with cluster(model, **options) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        (served,) = http.get("/v1/models").json()["data"]
        assert served["max_model_len"] == 177
        assert "11 KV blocks of 16 tokens, at most 177 tokens a sequence" in running.output.read_text()
        messages = [{"role": "user", "content": "hello"}]
        answer = http.post("/v1/chat/completions", json={"messages": messages, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert (
            answer.json()["usage"]["total_tokens"] == 177 and answer.json()["choices"][0]["finish_reason"] == "length"
        )
        prompt = {"prompt": [7] * 175}
        whole = http.post("/v1/completions", json={**prompt, "max_tokens": 2, "ignore_eos": True})
        assert whole.json()["usage"]["completion_tokens"] == 2, "the last of 177 tokens needs no KV"
        refused = http.post("/v1/completions", json={**prompt, "max_tokens": 3})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "exceeds_pool", "max_tokens")
        assert "needs KV for 177 tokens" in error["message"] and "holds 176" in error["message"]
