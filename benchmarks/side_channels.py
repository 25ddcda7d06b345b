"""What response times reveal: about an API key that is nearly right, and about another tenant's prompts.

    python benchmarks/side_channels.py [--keys 100000] [--trials 1000]

Keys: the time to check a key that is wrong in its first character, and one that is wrong in its last, in random order;
Welch's t over all samples (below 4.5: no detectable difference). Prefixes: a tenant's prompt of 8, 64 or 512 tokens is
computed; then the same prefix with another end is requested, beside a new one of that length. AUC is the share of pairs
in which the known one was answered sooner (0.5: no detectable difference). The requests come from another tenant and,
to show that the cache is detectable at all, from the same one. Prompts are random ids, for the built-in model. Writes
`benchmarks/results/side-channels.md`.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.errors import Unauthenticated
from benchmarks.kit import cluster, parser, report, table
from coordinator.api_keys import ApiKeys, read_api_keys

MAX_T, MOST_AUC, LEAST_AUC = 4.5, 0.55, 0.9
KEYS = {"a": "sk-a-0123456789abcdef", "b": "sk-b-0123456789abcdef"}
LENGTHS = (8, 64, 512)
END = 8  # tokens after each prefix
IDS = range(300, 4000)


def welch_t(one: Sequence[float], other: Sequence[float]) -> float:
    """Welch's t of two samples."""
    spread = statistics.variance(one) / len(one) + statistics.variance(other) / len(other)
    return (statistics.fmean(one) - statistics.fmean(other)) / math.sqrt(spread)


def key_times(keys: ApiKeys, samples: int) -> tuple[list[int], list[int]]:
    """Nanoseconds for `samples` checks of each of the two wrong keys."""
    right, others = KEYS["a"], "GHIJKLMNOPQRSTUVWXYZ"
    times: tuple[list[int], list[int]] = ([], [])
    draw = random.Random(0)
    for _ in range(2 * samples):
        which, other = draw.random() < 0.5, draw.choice(others)  # two fixed strings would differ by their addresses
        header = "Bearer " + (right[:-1] + other if which else other + right[1:])
        began = time.perf_counter_ns()
        try:
            keys.client(header)
        except Unauthenticated:
            times[which].append(time.perf_counter_ns() - began)
    return times


def auc(known: Sequence[float], fresh: Sequence[float]) -> float:
    """The share of pairs, one of each, in which the known prefix was answered sooner."""
    both = sorted([(t, 1) for t in known] + [(t, 0) for t in fresh])
    sooner, seen = 0, 0
    for _, is_known in both:
        seen += is_known
        sooner += 0 if is_known else seen
    return sooner / (len(known) * len(fresh))


class Prober:
    """Requests one token with a key, over one connection."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60.0)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def seconds(self, prompt: Sequence[int]) -> float:
        """The seconds that the answer takes."""
        body = json.dumps({"model": "builtin", "prompt": list(prompt), "max_tokens": 1})
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {text[:300]!r}")
        return took


def probe(url: str, owner_key: str, key: str, length: int, trials: int) -> float:
    """The AUC of `trials` prefixes that `owner_key` has cached, as measured with `key`, another one or the same."""
    owner, asks = Prober(url, owner_key), Prober(url, key)
    draw = random.Random(length)
    known, fresh = list[float](), list[float]()
    for number in range(trials):
        prefixes = {True: draw.choices(IDS, k=length), False: draw.choices(IDS, k=length)}
        owner.seconds([*prefixes[True], *draw.choices(IDS, k=END)])
        for is_known in (True, False) if number % 2 else (False, True):
            took = asks.seconds([*prefixes[is_known], *draw.choices(IDS, k=END)])
            (known if is_known else fresh).append(took)
    return auc(known, fresh)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def main() -> int:
    options = parser(__doc__, "side-channels.md")
    options.add_argument("--keys", type=int, default=100_000, help="samples of each wrong key")
    options.add_argument("--trials", type=int, default=1000, help="prefixes of each length")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "keys"
        file.write_text("".join(f"{key} name={name} tenant={name}\n" for name, key in KEYS.items()))
        file.chmod(0o600)
        times = key_times(read_api_keys(str(file)), arguments.keys)
        t = welch_t(*times)
        medians = [f"{statistics.median(side) / 1e3:.2f} us" for side in times]
        with cluster("--model", "builtin", "--draft", "none", "--api-key-file", str(file)) as running:
            url, (a, b), trials = running.url, KEYS.values(), arguments.trials
            for length in LENGTHS:
                probe(url, a, b, length, 20)  # warm-up
            found = [(n, probe(url, a, b, n, trials), probe(url, a, a, n, trials)) for n in LENGTHS]
    shown = [*medians, f"{t:+.2f}", _yes(abs(t) < MAX_T)]
    keys = table(("first character wrong", "last wrong", "t", f"below {MAX_T}"), [shown])
    rows = [
        [str(n), f"{other:.3f}", _yes(other <= MOST_AUC), f"{own:.3f}", _yes(own >= LEAST_AUC)]
        for n, other, own in found
    ]
    names = ("tokens", "AUC, another tenant", f"at most {MOST_AUC}", "AUC, the same tenant", f"at least {LEAST_AUC}")
    about = f"{arguments.keys:,} samples of each key; {arguments.trials:,} prefixes of each length."
    report(arguments.out, "What time gives away", keys, table(names, rows), about=about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
