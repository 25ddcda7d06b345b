"""A fake worker: joins the fake coordinator and polls it for Drain.

FAKE_WORKER selects a failure: `refuse` (startup error), `crash` (dies before joining), `stubborn` (ignores Drain); of
the worker FAKE_WORKER_ID, if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request

from baton.runtime.process import die_with_parent, record_error


def main() -> None:
    die_with_parent()
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
    joined = False
    while time.monotonic() < give_up:
        try:
            if not joined:
                urllib.request.urlopen(urllib.request.Request(url, json.dumps(me).encode()), timeout=1).read()
                joined = True
            drain = json.loads(urllib.request.urlopen(url + "/drain", timeout=1).read())["drain"]
            if drain and mode != "stubborn":
                return
        except OSError:
            joined = False
        time.sleep(0.05)


if __name__ == "__main__":
    main()
