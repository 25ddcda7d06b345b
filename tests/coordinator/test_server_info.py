"""What gateways and load tools poll."""

from __future__ import annotations

import httpx


async def test_what_gateways_and_load_tools_ask(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert info["version"] == "1.2" and info["model"] == "tiny" and info["workers"] == {"prefill": 1, "decode": 1}
    (load,) = (await client.get("/loads")).json()
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (3, 2, 0.6)
    model = (await client.get("/get_model_info")).json()
    assert model["model_path"] == "tiny" and model["is_generation"] is True
    tokenizer = (await client.get("/tokenizer_info")).json()
    limit = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
    assert tokenizer["model_max_length"] == limit and "eos_token" in tokenizer
