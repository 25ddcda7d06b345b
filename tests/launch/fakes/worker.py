"""A fake worker: joins the fake coordinator and polls it for Drain.

FAKE_WORKER selects a failure: `refuse` (startup error), `crash` (dies before joining), `stubborn` (ignores Drain); of
the worker FAKE_WORKER_ID, if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from typing import Any

from baton.runtime.process import die_with_parent, record_error


def answer(request: str | urllib.request.Request) -> dict[str, Any]:
    return dict(json.loads(urllib.request.urlopen(request, timeout=1).read()))


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--worker-id")
    options, rest = parser.parse_known_args()
    mode = os.environ.get("FAKE_WORKER", "")
    if os.environ.get("FAKE_WORKER_ID", options.worker_id) != options.worker_id:
        mode = ""
    print("replaces:", os.environ.get("BATON_REPLACE", "no"), flush=True)
    print("worker starts with", *rest, "on cores", sorted(os.sched_getaffinity(0)), flush=True)
    if mode == "refuse":
        print("noise before", file=sys.stderr)
        record_error("tensor lm_head.weight in model.safetensors is damaged")
        print("error: tensor lm_head.weight in model.safetensors is damaged", file=sys.stderr)
        print("noise after", file=sys.stderr)
        sys.exit(3)
    if mode == "crash":
        raise RuntimeError("the fake worker crashes")
    url = f"http://{options.coordinator}"
    me = {"id": options.worker_id, "role": options.worker_id.split("-")[0], "state": "ready", "pids": [os.getpid()]}
    counts = ("steps", "step_s", "prompt_tokens_computed", "prompt_tokens_cached", "tokens_generated", "running")
    me |= dict.fromkeys((*counts, "waiting", "blocks_total", "blocks_free", "block_size"), 0)
    me["incarnation"] = os.getpid()
    give_up = time.monotonic() + 60
    run = 0  # of the coordinator that it has joined
    while time.monotonic() < give_up:
        try:
            if not run:
                run = answer(urllib.request.Request(url, json.dumps(me).encode()))["run"]
            now = answer(f"{url}/drain?{options.worker_id}")
            run = run if now["run"] == run else 0
            if now["drain"] and mode != "stubborn":
                print("drained by the coordinator", flush=True)
                return
        except OSError:
            run = 0
        time.sleep(0.05)


if __name__ == "__main__":
    main()
