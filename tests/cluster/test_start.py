"""A cluster that cannot start reports one plain error, exits with a nonzero code and leaves no process running; a front
end without workers refuses requests immediately."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.cluster import start_cluster
from tests.support.launchers import find_box
from tests.support.limits import HANG_S, Stall

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def _missing(path: Path) -> Path:
    return path / "nowhere"


def _without_config(path: Path) -> Path:
    return path


def _cut(path: Path) -> Path:
    model = make_checkpoint(path / "m", arch="llama")
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    return model


def _no_such_hub_model(path: Path) -> Path:
    return Path("nobody/nothing")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_missing, ["nowhere"]),
        (_without_config, ["config.json"]),
        (_cut, ["model.safetensors"]),
        (_no_such_hub_model, ["nobody/nothing"]),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_start_with_one_error(
    make: Callable[[Path], Path], words: list[str], tmp_path: Path
) -> None:
    started = time.monotonic()
    running = start_cluster(make(tmp_path), run_dir=tmp_path / "run", forked=make is not _cut)
    assert running.process.wait(60) not in (0, None)
    assert not running.processes()
    lines = running.output.read_text().strip().splitlines()
    shown = find_box(lines)
    box = "\n".join(shown) if make is _cut else lines[-1]  # a worker detects the cut file, the launcher the others
    assert lines[-1] in (shown[-1:] if make is _cut else lines[-1:]) and "error" in box
    assert all(word in box for word in words), lines
    assert "Traceback" not in running.output.read_text()
    assert time.monotonic() - started < 45


@pytest.mark.parametrize("flag", ["port", "grpc_port"])
def test_a_port_in_use_ends_the_start_with_one_error(flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = start_cluster("builtin", run_dir=tmp_path / "run", **{flag: port})
        assert running.process.wait(60) not in (0, None)
        assert not running.processes()
    last = running.output.read_text().strip().splitlines()[-1]
    assert last.startswith("error: ") and str(port) in last, last


@pytest.mark.parametrize(
    ("flags", "named"), [({"decode_block_size": 24}, "24"), ({"draft": "no-such-directory"}, "no-such-directory")]
)
def test_invalid_options_end_the_start_with_an_error(flags: dict[str, object], named: str, tmp_path: Path) -> None:
    running = start_cluster("builtin", run_dir=tmp_path / "run", **flags)
    assert running.process.wait(60) not in (0, None)
    assert named in running.output.read_text().strip()[-1500:]


def test_a_request_without_workers_is_refused_with_503_after_the_hold(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", arch="llama")
    ready = tmp_path / "ready.json"
    ports = ["--port", "0", "--grpc-port", "0", "--control-port", "0"]
    command = [sys.executable, "-m", "coordinator", "--model", str(model), "--ready-file", str(ready), *ports]
    command += ["--hold-s", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        url = "http://" + json.loads(ready.read_text())["http"]
        with Stall() as stall:
            answer = httpx.post(url + "/v1/completions", json=body([1, 2, 3], 4) | {"model": "m"}, timeout=HANG_S)
        assert stall.took_s < stall.allows(2.0)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_prefill_worker"
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(url + "/live").status_code == 200
        assert httpx.get(url + "/ready").status_code == httpx.get(url + "/health").status_code == 503
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in modules, "the coordinator loaded torch"
    finally:
        process.terminate()
        assert process.wait(20) == 0
