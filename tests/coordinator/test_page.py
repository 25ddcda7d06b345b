"""The page at `/` is one file that asks nothing of anybody else."""

from __future__ import annotations

import re

import httpx


async def test_it_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    links = set(re.findall(r"https?://[^\"' ]+", answer.text))
    assert links == {"http://www.w3.org/2000/svg"}, "only the name of a namespace"
    assert "innerHTML" not in answer.text and "eval(" not in answer.text
