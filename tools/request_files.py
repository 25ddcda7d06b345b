"""Which product files and functions one streamed chat completion executes, by process: a cluster of one prefill and one
decode worker with a draft model, a request to warm up, and a second one that is recorded.

    python tools/request_files.py [--list] [--tokens 32]

Every process of the cluster imports this file as `sitecustomize` and profiles its calls while `DIRECTORY/on` exists. A
window of the same length without a request is recorded first: "of them idle too" counts files that run without one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

DIRECTORY = "RECORDED_CALLS_DIRECTORY"
POLL_S = 0.02
SETTLE_S = 0.5
START_TIMEOUT_S = 180.0


class Calls:
    """Records which code a process executes, while it is switched on.

    Args:
        directory: `on` in it switches the recording on; when it is gone, what was called is written beside it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._codes: set[Any] | None = None  # None: switched off

    def start(self) -> None:
        sys.setprofile(self.profile)
        threading.setprofile(self.profile)
        threading.Thread(target=self._watch, name="calls", daemon=True).start()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._codes is not None and event == "call":
            self._codes.add(frame.f_code)

    def _watch(self) -> None:
        window = ""
        while True:
            switch = self._directory / "on"
            if self._codes is None and switch.exists():
                window = switch.read_text()
                self._codes = set()
            elif self._codes is not None and not switch.exists():
                codes, self._codes = self._codes, None
                self._write(window, [(code.co_filename, code.co_qualname) for code in codes])
            time.sleep(POLL_S)

    def _write(self, window: str, calls: list[tuple[str, str]]) -> None:
        words = sys.orig_argv  # a child of the coordinator has no `-m`
        module = words[words.index("-m") + 1] if "-m" in words else "child"
        out = self._directory / f"{window}-{os.getpid()}"
        out.with_suffix(".part").write_text(json.dumps({"process": module, "calls": sorted(calls)}))
        out.with_suffix(".part").rename(out.with_suffix(".json"))


def record(directory: Path, window: str, tokens: int, url: str) -> None:
    """Records one window in all processes; with `tokens` a request of that many is sent in it."""
    written = directory / "on.part"
    written.write_text(window)
    written.rename(directory / "on")
    time.sleep(SETTLE_S)
    if tokens:
        stream(url, tokens)
    else:
        time.sleep(SETTLE_S)
    time.sleep(SETTLE_S)
    (directory / "on").unlink()
    time.sleep(SETTLE_S)


def stream(url: str, tokens: int) -> None:
    """Streams a chat completion of `tokens` tokens; raises RuntimeError if fewer events arrive than a stream has."""
    body = {
        "model": json.loads(urllib.request.urlopen(f"{url}/v1/models").read())["data"][0]["id"],
        "messages": [{"role": "user", "content": "def fibonacci(n):\n    " * 40 + str(time.time())}],
        "max_completion_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        events = [line for line in response if line.startswith(b"data: ")]
    if len(events) < 3 or events[-1].strip() != b"data: [DONE]":
        raise RuntimeError(f"no complete stream: {events[-1:]}")


def files_of(directory: Path, window: str) -> dict[str, dict[str, set[str]]]:
    """By process the product files that ran in a window, and their functions."""
    by_process: dict[str, dict[str, set[str]]] = {}
    for path in sorted(directory.glob(f"{window}-*.json")):
        written = json.loads(path.read_text())
        files = by_process.setdefault(written["process"].split(".")[0], {})
        for name, function in written["calls"]:
            if (product := product_path(name)) is not None:
                files.setdefault(product, set())
                if not function.endswith(">"):  # neither comprehension nor lambda nor module
                    files[product].add(function)
    return {process: files for process, files in by_process.items() if files}


def product_path(name: str) -> str | None:
    from tools.shape import GENERATED, PACKAGES, ROOT

    path = Path(name)
    if not path.is_relative_to(ROOT):
        return None
    short = path.relative_to(ROOT).as_posix()
    return short if short.split("/")[0] in PACKAGES and not short.startswith(GENERATED) else None


def ready(process: subprocess.Popen[bytes], file: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists():
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.1)
    raise SystemExit(f"no ready cluster within {START_TIMEOUT_S:g} s")


def lines(directory: Path, all_files: int, listed: bool) -> Iterator[str]:
    """The report."""
    idle = {path for files in files_of(directory, "idle").values() for path in files}
    by_process = files_of(directory, "request")
    total = {path for files in by_process.values() for path in files}
    functions = {(path, name) for files in by_process.values() for path, names in files.items() for name in names}
    yield f"{len(total)} of {all_files} product files, {len(functions)} functions; of them idle too {len(total & idle)}"
    for process, files in sorted(by_process.items()):
        yield f"{process}: {len(files)} files, {sum(len(names) for names in files.values())} functions"
        if listed:
            yield from (f"    {path} ({len(names)})" for path, names in sorted(files.items()))


def main() -> None:
    from tools.shape import ROOT, product_files

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files of each process")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of the request")
    parser.add_argument("--model", default="builtin")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory, run_dir = Path(made), Path(made) / "run"
        (directory / "sitecustomize.py").write_text(Path(__file__).read_text())
        ports = [word for name in ("--port", "--grpc-port", "--control-port") for word in (name, "0")]
        flags = ["--model", arguments.model, "--device", "cpu", "--prefill", "1", "--decode", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "up", *ports, "--run-dir", str(run_dir), *flags],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", DIRECTORY: made},
        )
        try:
            url = ready(process, run_dir / "cluster.json")
            stream(url, arguments.tokens)
            record(directory, "idle", 0, url)
            record(directory, "request", arguments.tokens, url)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        print("\n".join(lines(directory, len(product_files()), arguments.list)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
elif __name__ == "sitecustomize" and DIRECTORY in os.environ:
    calls = Calls(Path(os.environ[DIRECTORY]))
    calls.start()
    os.register_at_fork(after_in_child=calls.start)
