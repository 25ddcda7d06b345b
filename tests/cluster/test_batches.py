"""A batch through a running cluster whose coordinator is killed while the batch runs."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
LINES = 120


def test_a_batch_completes_after_its_coordinator_is_killed(tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"def f{i}(", "max_tokens": 24, "temperature": 0, "ignore_eos": True},
        }
        for i in range(LINES)
    ]
    with cluster("builtin", data_dir=tmp_path / "data", exact=True, draft="none") as running:
        client = openai.OpenAI(api_key="none", base_url=running.url + "/v1", max_retries=10)
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        killed_at = -1
        deadline = time.monotonic() + 60
        while batch.status != "completed" and time.monotonic() < deadline:
            time.sleep(0.02)
            batch = client.batches.retrieve(batch.id)
            counts = batch.request_counts
            if killed_at < 0 and counts is not None and counts.completed > 5:
                killed_at = counts.completed
                running.kill(running.coordinator_pid(), signal.SIGKILL)
        assert batch.status == "completed" and batch.output_file_id, batch
        assert 5 < killed_at < LINES, "it was over before the coordinator died"
        rows = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(LINES)]
        assert {row["response"]["status_code"] for row in rows} == {200}
        for i in (0, LINES - 1):
            alone = httpx.post(running.url + "/v1/completions", json=lines[i]["body"], timeout=30).json()
            assert rows[i]["response"]["body"]["choices"][0]["text"] == alone["choices"][0]["text"]
