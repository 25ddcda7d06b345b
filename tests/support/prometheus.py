"""A real Prometheus for a test, which scrapes one target."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.topologies import free_ports

READY_S = 30.0


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Returns the series of an instant query."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        return list(answer["data"]["result"])

    def firing(self) -> set[str]:
        """Returns the names of the alerts that fire."""
        answer = httpx.get(f"{self.url}/api/v1/alerts").json()
        return {a["labels"]["alertname"] for a in answer["data"]["alerts"] if a["state"] == "firing"}


@contextlib.contextmanager
def prometheus(directory: Path, target: str, rules: Path, *, every: str = "1s") -> Iterator[Prometheus]:
    """Runs Prometheus over the metrics at `target` (a URL), scraped and evaluated at that interval."""
    (port,) = free_ports(1)
    scrape = {"job_name": "baton", "static_configs": [{"targets": [target.partition("//")[2]]}]}
    times = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    config = {"global": times, "rule_files": [str(rules)], "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/-/ready").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline, "Prometheus is not ready"
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(10)
