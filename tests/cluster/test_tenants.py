"""Tenants that share one worker: short prompts are answered while another tenant's prompt of many steps is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

KEYS = {tenant: f"sk-0123456789abcde{tenant}" for tenant in "ab"}
LONG, STEP = 1600, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tenants") / "m", arch="llama")


async def ask(http: httpx.AsyncClient, tenant: str, tokens: int, salt: str) -> Any:
    prompt = [(7 * number) % 251 for number in range(tokens)]
    bearer = {"authorization": f"Bearer {KEYS[tenant]}"}
    answer = await http.post("/v1/completions", json=body(prompt, 3, cache_salt=salt), headers=bearer)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"prefill": 0}, marks=pytest.mark.long)],  # tests/decode/test_prompts.py has the same turns
    ids=["prefill", "decode"],
)
async def test_short_prompts_are_answered_while_a_long_one_is_computed(
    model: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} tenant={tenant}\n" for tenant, key in KEYS.items()))
    keys.chmod(0o600)
    with cluster(model, exact=True, step_tokens=STEP, api_key_file=keys, admin_port=0, **flags) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=120.0) as http:
            long_alone, short_alone = await ask(http, "a", LONG, "alone"), await ask(http, "b", 5, "alone")
            long, answered = asyncio.create_task(ask(http, "a", LONG, "beside")), 0
            while not long.done():
                assert await ask(http, "b", 5, f"{answered}") == short_alone
                answered += 1
            assert await long == long_alone
        computed = sum(int(row["prompt_tokens_computed"]) for row in running.workers().values())
        assert computed >= 2 * LONG, "nothing of either long prompt was cached"
        assert answered > 4, f"of {LONG // STEP} steps; without turns only the first ones are answered"
