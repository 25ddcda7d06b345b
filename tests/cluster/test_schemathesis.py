"""schemathesis against a running cluster: from `/openapi.json` alone it finds no status 500 and no response that is not
described there, and a concurrent client's request gets the same text every time."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


async def run(url: str, seed: int) -> str:
    """Returns the output of schemathesis; fails if it found an error."""
    words = ["-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", CHECKS, "--seed", str(seed)]
    more = ["--phases", "coverage,fuzzing", "-n", "100", "--request-timeout", "60", "--generation-database", "none"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output = (await process.communicate())[0].decode(errors="replace")
    assert process.returncode == 0, output[-6000:]
    return output


async def send_until(running: Cluster, ended: asyncio.Event) -> list[str]:
    """Sends the same valid request until `ended` is set."""
    body = {"prompt": "def read_lines(path):", "max_tokens": 64, "temperature": 0}
    texts = []
    async with httpx.AsyncClient(timeout=60) as client:
        while not ended.is_set():
            answer = await client.post(running.url + "/v1/completions", json=body)
            texts.append(answer.json()["choices"][0]["text"])
    return texts


@pytest.mark.parametrize("seed", [1, 2])
async def test_schemathesis_finds_no_server_error_and_no_undocumented_response(tmp_path: Path, seed: int) -> None:
    with cluster("builtin", exact=True, data_dir=tmp_path / "data", tool_parser="hermes") as running:
        ended = asyncio.Event()
        honest = asyncio.create_task(send_until(running, ended))
        output = await run(running.url, seed)
        ended.set()
        texts = await honest
        assert len(texts) > 10 and len(set(texts)) == 1
        generated = re.search(r"(\d+) generated", output)
        assert generated is not None and int(generated[1]) > 2000, output[-3000:]
        running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")
