"""What the constants of the speculation policy are worth, in virtual time (tests/support/drafting.py).

    python benchmarks/speculation_policy.py                              tokens per second of each load
    python benchmarks/speculation_policy.py _MARGIN=1 _KEPT=.99,_PRIOR=8 the change with constants set to other values
    python benchmarks/speculation_policy.py --save OUT                   (also: --against OUT, of another commit)

The loads differ in the acceptance of draft tokens, clients, lengths of answers and prices. The text of a random load,
the noise on what the scheduler observes and its stalls depend on the seed. Figures are tokens per second of virtual
time, so neither the machine nor its load matters.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import decode.speculation
from benchmarks.kit import command_line, parser, table
from tests.support.accepted_drafts import GREEDY, WARM, bits
from tests.support.drafting import Prices, serve
from tools.provenance import commit

SERVED = Prices()
ALONE = Prices(around_s=0.1e-3)
DEAR = Prices(token_s=0.8e-3)
MANY = Prices(around_s=3e-3)
SMALL = Prices(0.55e-3, 0.1e-3, 0.12e-3, 0.23e-3, 0.07e-3, behind_s=0.02e-3, around_s=0.12e-3)
SMALL = replace(SMALL, around_draft_tokens_s=0.1e-3)  # plain steps are cheap, draft tokens costly beside them
AROUND = Prices(around_s=0.1e-3, around_draft_tokens_s=0.3e-3, behind_s=0.016e-3)
LARGE = Prices(20e-3, 0.6e-3, 1.2e-3, 3.5e-3, 3e-3, 0.2e-3, behind_s=0.4e-3)
CHANGING = replace(SERVED, load=lambda now: 2.5 if int(now / 0.7) % 2 else 1.0)
STALLED = replace(ALONE, load=lambda now: 20.0 if now < 0.03 else 1.0)  # while the first steps run
RECORDED = {"greedy": bits(GREEDY), "T = 0.8": bits(WARM)}


@dataclass(frozen=True)
class Load:
    """`text` is recorded, or the acceptance of successive answers. `wrong` is the factor by which the price of a draft
    token was mismeasured at start."""

    text: str | tuple[float, ...]
    prices: Prices = SERVED
    clients: int = 1
    answers: int = 16
    length: int = 128
    max_tokens: int = 0
    wrong: float = 1.0

    def speed(self, seed: int, length: int | None = None) -> float:
        if isinstance(self.text, str):
            streams = RECORDED[self.text]
        else:
            generator = random.Random(seed)
            rates = [self.text[i % len(self.text)] for i in range(self.answers)]
            streams = [[generator.random() < rate for _ in range(self.length)] for rate in rates]
        model = self.prices.model(self.wrong)
        clients, max_tokens = self.clients, self.max_tokens
        return serve(
            streams, self.prices, clients=clients, length=length, model=model, seed=seed, max_tokens=max_tokens
        ).speed


LOADS = {
    "p = 0.05": Load((0.05,)),
    "p = 0.3": Load((0.3,)),
    "p = 0.5": Load((0.5,)),
    "p = 0.8": Load((0.8,)),
    "p = 0.95": Load((0.95,)),
    "p = 0.6, nothing around": Load((0.6,), ALONE),
    "p = 0.7, dear draft tokens": Load((0.7,), DEAR),
    "p = 0.9, dear draft tokens": Load((0.9,), DEAR),
    "p = 0.5, cheap plain steps": Load((0.5,), SMALL),
    "p = 0.78, cheap plain steps": Load((0.78,), SMALL),
    "p = 0.5, planning dear": Load((0.5,), AROUND),
    "p = 0.8, large model": Load((0.8,), LARGE),
    "recorded greedy": Load("greedy"),
    "recorded greedy, nothing around": Load("greedy", ALONE),
    "recorded T = 0.8": Load("T = 0.8"),
    "recorded T = 0.8, nothing around": Load("T = 0.8", ALONE),
    "p = 0.9 and 0.2 in turn": Load((0.9, 0.2), ALONE),
    "p from 0.05 to 0.9": Load((0.05,) * 8 + (0.9,) * 24, answers=32),
    "p from 0.9 to 0.05": Load((0.9,) * 8 + (0.05,) * 24, answers=32),
    "p = 0.7, answers of 24 of 512": Load((0.7,), answers=80, length=24, max_tokens=512),
    "p = 0.7, answers of 24": Load((0.7,), answers=80, length=24),
    "p = 0.8, answers of 400": Load((0.8,), answers=6, length=400),
    "p = 0.5, draft token believed free": Load((0.5,), wrong=0.0),
    "p = 0.5, the same, dear": Load((0.5,), DEAR, wrong=0.0),
    "greedy, draft token believed dear": Load("greedy", wrong=4.0),
    "greedy, much noise": Load("greedy", replace(SERVED, noise=0.5, one_in=20)),
    "greedy, changing load": Load("greedy", CHANGING),
    "greedy, first steps stall": Load("greedy", STALLED),
    "4 clients, p = 0.7, nothing around": Load((0.7,), ALONE, 4, 32),
    "4 clients, p = 0.6, large model": Load((0.6,), LARGE, 4, 32),
    "8 clients, p = 0.2": Load((0.2,), SERVED, 8, 48),
    "8 clients, p = 0.5": Load((0.5,), SERVED, 8, 48),
    "8 clients, p = 0.8": Load((0.8,), SERVED, 8, 48),
    "8 clients, half p = 0.9, half 0.2": Load((0.9, 0.2), SERVED, 8, 48),
    "8 clients, p = 0.8, answers of 24 of 512": Load((0.8,), SERVED, 8, 160, 24, 512),
    "8 clients, p = 0.8, large model": Load((0.8,), LARGE, 8, 48),
    "32 clients, p = 0.05": Load((0.05,), MANY, 32, 96),
    "32 clients, p = 0.6": Load((0.6,), MANY, 32, 96),
    "32 clients, p = 0.9": Load((0.9,), MANY, 32, 96),
}
Speeds = Mapping[str, list[float]]


def speeds(loads: Mapping[str, Load], seeds: int, values: Mapping[str, str]) -> dict[str, list[float]]:
    """Tokens per second by load, one figure a seed, with constants of these values wherever a module has them."""
    names = [module.name for module in pkgutil.iter_modules(decode.speculation.__path__)]
    modules = [importlib.import_module(f"decode.speculation.{name}") for name in names]
    kept = [(m, name, getattr(m, name)) for name in values for m in modules if hasattr(m, name)]
    if missing := set(values) - {name for _, name, _ in kept}:
        raise SystemExit(f"no constant {missing}")
    for module, name, value in kept:
        setattr(module, name, type(value)(float(values[name])))
    try:
        return {name: [load.speed(seed) for seed in range(1, seeds + 1)] for name, load in loads.items()}
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def changes(now: Speeds, before: Speeds) -> dict[str, tuple[float, float]]:
    """The mean change of each load in percent, and its standard error, of pairs with the same seed."""
    change = {}
    for name, values in now.items():
        each = [100.0 * (value / old - 1.0) for value, old in zip(values, before[name], strict=True)]
        change[name] = statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each))
    return change


def row(title: str, change: Mapping[str, tuple[float, float]]) -> list[str]:
    mean = statistics.fmean(percent for percent, _ in change.values())
    ranked = sorted(change.items(), key=lambda item: item[1][0])
    ends = [f"{name} {percent:+.1f} ± {error:.1f}" for name, (percent, error) in (*ranked[:3], *ranked[:-4:-1])]
    return [title, f"{mean:+.2f}", "; ".join(ends[:3]), "; ".join(ends[3:])]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("values", nargs="*", metavar="NAME=VALUE[,NAME=VALUE]")
    options.add_argument("--seeds", type=int, default=6)
    options.add_argument("--only", default="", help="loads with this text in their name")
    options.add_argument("--save", type=Path)
    options.add_argument("--against", type=Path)
    arguments = options.parse_args()
    print(f"{command_line()}\ncommit {commit()}\n")
    loads = {name: load for name, load in LOADS.items() if arguments.only in name}
    now = speeds(loads, arguments.seeds, {})
    if arguments.save:
        arguments.save.write_text(json.dumps(now))
    rows: list[list[str]] = []
    if arguments.against:
        rows.append(row("this commit", changes(now, json.loads(arguments.against.read_text()))))
    for value in arguments.values:
        other = speeds(loads, arguments.seeds, dict(each.split("=") for each in value.split(",")))
        rows.append(row(value, changes(other, now)))
        print(*rows[-1], sep=" | ", flush=True)
    if rows:
        print(table(["", "mean, %", "worst loads, %", "best loads, %"], rows))
        return
    plain = {name: [load.speed(seed, 0) for seed in range(1, arguments.seeds + 1)] for name, load in loads.items()}
    multiples = {name: [a / b for a, b in zip(values, plain[name], strict=True)] for name, values in now.items()}
    cells = [[name, f"{statistics.fmean(v):.3f}", f"{min(v):.3f}"] for name, v in multiples.items()]
    print(table(["load", "of no draft, mean", "worst seed"], cells))


if __name__ == "__main__":
    main()
