"""The cluster token between processes on different nodes (network namespaces): only processes that have it join."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import netns
from tests.support.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(reason := netns.missing()), reason=reason or "never"),
]

HTTP, GRPC, CONTROL = 8100, 8102, 8101


def test_join_and_drain_require_the_cluster_token(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("right", "wrong")}
    for name, file in files.items():
        file.write_text(f"the {name} token, of more than sixteen characters\n")
        file.chmod(0o600)
    model = make_checkpoint(tmp_path / "m", "llama")
    with netns.nodes("head", "node") as network:
        head, node = network["head"], network["node"]
        control, url = f"{head.address}:{CONTROL}", f"http://{head.address}:{HTTP}"
        near = head.threads(1)

        def start(where: netns.Node, log: str, *words: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{log}.log").open("wb") as file:
                return where.start([sys.executable, "-m", *words], forked=True, stdout=file, stderr=file)

        def output_of(log: str) -> str:
            return (tmp_path / f"{log}.log").read_text(errors="replace")

        def workers() -> dict[str, Any]:
            try:
                found: dict[str, Any] = near.submit(lambda: httpx.get(f"{url}/workers", timeout=5.0).json()).result()
            except httpx.HTTPError:
                return {"workers": [], "joins_refused": {}}
            return found

        def await_workers(what: str, limit_s: float = 90.0, **state: str) -> None:
            deadline = time.monotonic() + limit_s
            while {w["id"]: w["state"] for w in workers()["workers"]} != state:
                assert time.monotonic() < deadline, f"{what}\n{output_of('head')}\n{output_of('good')}"
                time.sleep(0.1)

        serving = ["--model", str(model), "--host", head.address, "--control-host", head.address]
        serving += ["--port", str(HTTP), "--grpc-port", str(GRPC), "--control-port", str(CONTROL)]
        token = {name: ["--cluster-token-file", str(file)] for name, file in files.items()}
        bare = start(head, "bare", "coordinator", *serving)
        assert bare.wait(60) == 3 and "--cluster-token-file" in output_of("bare").splitlines()[-1]

        start(head, "head", "coordinator", *serving, *token["right"])
        joining = ["--model", str(model), "--coordinator", control, "--host", node.address, "--threads", "1"]
        joining += ["--dtype", "float32", "--kv-memory-gib", "0.02"]
        good = start(node, "good", "prefill", *joining, "--worker-id", "p0", *token["right"])
        wrong = start(node, "wrong", "prefill", *joining, "--worker-id", "p1", *token["wrong"])
        missing = start(node, "missing", "prefill", *joining, "--worker-id", "p2")
        assert wrong.wait(120) == 3 and "token: it is not this cluster's" in output_of("wrong")
        assert missing.wait(120) == 3 and "token" in output_of("missing").splitlines()[-1]
        await_workers("only p0", p0="ready")
        refused = workers()["joins_refused"]
        assert refused["token"] >= 1

        for log, words, code in (
            ("drain-wrong", token["wrong"], 3),
            ("drain-missing", [], 3),
            ("drain", token["right"], 0),
        ):
            assert {w["state"] for w in workers()["workers"]} == {"ready"}
            assert start(head, log, "launch.cli", "drain", "p0", url, *words).wait(60) == code, output_of(log)
            assert code == 0 or "token" in output_of(log)
        assert workers()["joins_refused"]["token"] == refused["token"] + 2
        assert good.wait(30) == 0
        await_workers("nobody")
        near.shutdown()
