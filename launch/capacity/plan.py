"""`baton plan`: the cheapest cluster for a load, and what surrounds it: other rates, a lost worker, its own error.

Another rate is the same requests in more or less time: what the present users would do, as many at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from baton.core.errors import StartupError
from coordinator.policy.pick import PREFIX_SLACK
from coordinator.policy.split import Split
from sim.scale.costs import Calibration
from sim.scale.members import ClusterShape
from sim.scale.planner import (
    Cheapest,
    Evaluate,
    Evaluated,
    Infeasible,
    Pair,
    Size,
    cheapest,
    evaluate_times,
    one_fewer,
    search,
    search_one_pool,
)
from sim.scale.replay import Replay
from sim.scale.workload import fitting, sped_up
from sim.stats import Slo
from sim.trace import TraceRow

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
HEADROOM = (2.0, 5.0)
_DECODE = (
    f"the longest cached prefix, unless more than {PREFIX_SLACK} more sequences run there than on the emptiest worker"
)
_PREFILL = "the worker that has the fewest tokens to compute, its backlog and what it has cached of the prompt counted"
ROUTING: Mapping[Split, str] = {
    "always": f"prefill: {_PREFILL}; decode: {_DECODE}",
    "auto": f"each prompt apart or on the decode worker, where it costs least; prefill: {_PREFILL}; decode: {_DECODE}",
    "never": _DECODE,
}
"""What the production dispatcher does (coordinator/policy/pick.py, split.py), by `--split`."""
LOW_STREAM_WEIGHT = 0.01
"""With `--split auto`. At 1, its default, nearly all prompts are computed apart; docs/planning.md compares both."""
FLAGS: Mapping[Split, str] = {
    "always": "--split always",
    "auto": f"--split auto --stream-weight {LOW_STREAM_WEIGHT:g}",
    "never": "--split never",
}


class Routed(NamedTuple):
    """The cheapest cluster with one way to decide where prompts are computed."""

    split: Split
    plan: Cheapest | Infeasible


@dataclass(frozen=True, slots=True)
class Point:
    """The planned cluster, or another one, at `factor` times the rate."""

    factor: float
    size: Size
    evaluated: Evaluated


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything about a plan. `routed` are the best plans of each way to decide where prompts are computed, of which
    the one with `split` is the cheapest; `one_fewer` are the plan's load on clusters without one of its workers;
    `needed` are the sizes that meet the limits at HEADROOM times the rate, None where none does. If it is `infeasible`,
    `result` has room to spare and the others are empty."""

    settings: Mapping[str, str]
    slo: Slo
    requests: int
    too_long: int
    routed: tuple[Routed, ...]
    split: Split
    curve: tuple[Point, ...] = ()
    one_fewer: tuple[Point, ...] = ()
    needed: Mapping[float, Size | None] = field(default_factory=dict)
    replays: int = 0
    seconds: float = 0.0

    @property
    def result(self) -> Cheapest | Infeasible:
        return next(plan for split, plan in self.routed if split == self.split)

    @property
    def infeasible(self) -> bool:
        return isinstance(self.result, Infeasible)

    @property
    def routing(self) -> str:
        return ROUTING[self.split]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the figures."""
        lines = []
        front = self.result.evaluated.outcome.front_utilisation
        if front > 0.8:
            lines.append(
                f"one coordinator is not enough: its processor time would be {front:.1f} times the duration;"
                " the figures assume that it delays no token"
            )
        if self.too_long:
            lines.append(
                f"{self.too_long} of {self.requests} requests exceed the context of the calibrated model"
                f" ({self.result.pair.prefill.max_model_len} tokens) and are left out"
            )
        for kind in {
            self.result.pair.prefill.name: self.result.pair.prefill,
            self.result.pair.decode.name: self.result.pair.decode,
        }.values():
            if not kind.errors:
                lines.append(f"the simulator's error with the calibration {kind.name} was not measured")
        return lines

    def as_json(self) -> dict[str, Any]:
        result = self.result
        document: dict[str, Any] = {
            "settings": dict(self.settings),
            "slo": asdict(self.slo),
            "requests": self.requests,
            "too_long": self.too_long,
            "feasible": not self.infeasible,
            "workers": asdict(result.size),
            "kinds": {"prefill": result.pair.prefill.name, "decode": result.pair.decode.name},
            "tensor_parallel": {
                "prefill": result.pair.prefill.tensor_parallel,
                "decode": result.pair.decode.tensor_parallel,
            },
            "price_per_hour": result.pair.price(result.size),
            "split": self.split,
            "stream_weight": LOW_STREAM_WEIGHT if self.split == "auto" else None,
            "routing": self.routing,
            "outcome": _evaluated(result.evaluated),
            "errors": {"prefill": dict(result.pair.prefill.errors), "decode": dict(result.pair.decode.errors)},
            "warnings": self.warnings,
            "replays": self.replays,
            "others": [
                {
                    "split": split,
                    "feasible": isinstance(plan, Cheapest),
                    "workers": asdict(plan.size),
                    "price_per_hour": plan.pair.price(plan.size),
                }
                for split, plan in self.routed
                if split != self.split
            ],
        }
        if isinstance(result, Infeasible):
            nearest = result.evaluated.nearest
            document |= {"missed": list(result.missed), "nearest": None if nearest is None else asdict(nearest)}
            return document
        document["curve"] = [_point(point) for point in self.curve]
        document["one_fewer"] = [_point(point) for point in self.one_fewer]
        document["needed"] = {f"{f:g}": None if s is None else asdict(s) for f, s in self.needed.items()}
        return document


def _evaluated(evaluated: Evaluated) -> dict[str, Any]:
    return {**asdict(evaluated.outcome), "ttft_at_share_s": evaluated.ttft_s, "tpot_at_share_s": evaluated.tpot_s}


def _point(point: Point) -> dict[str, Any]:
    return {"factor": point.factor, "workers": asdict(point.size), **_evaluated(point.evaluated)}


def make_plan(
    rows: Sequence[TraceRow],
    slo: Slo,
    calibrations: Sequence[Calibration],
    prices: Mapping[str, float],
    settings: Mapping[str, str],
    *,
    headroom: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Searches all pairs of calibrations with prompts computed apart, and where each costs least, and each calibration
    without a prefill pool; then replays what surrounds the cheapest plan.

    Raises:
        StartupError: no request fits into the context of a calibration, or two calibrations do not fit together.
    """
    began, replays = time.monotonic(), 0
    longest = min(calibration.max_model_len for calibration in calibrations)
    kept, too_long = fitting(rows, longest)
    if not kept:
        raise StartupError(f"no request fits into {longest} tokens, the context of the calibrated model")
    for calibration in calibrations[1:]:
        for name in ("block_size", "token_bytes"):
            a, b = getattr(calibrations[0], name), getattr(calibration, name)
            if a != b:
                raise StartupError(
                    f"calibrations {calibrations[0].name} and {calibration.name} differ: {name} {a}, {b}"
                )
    loads = {1.0: kept}

    def replayed(split: Split, factor: float = 1.0) -> Evaluate:
        if factor not in loads:
            loads[factor] = sped_up(kept, factor)

        def evaluate(pair: Pair, size: Size) -> Evaluated:
            nonlocal replays
            replays += 1
            roles = (pair.prefill, size.prefill, pair.decode, size.decode)
            shape = ClusterShape(*roles, split=split, stream_weight=LOW_STREAM_WEIGHT)
            replay = Replay(shape, loads[factor])
            evaluated = evaluate_times(replay.run(slo), replay.measured.times, slo)
            rate = f" at {factor:g}x" if factor != 1.0 else ""
            progress(f"{size} {FLAGS[split]}: {evaluated.outcome.met_share:.1%} met{rate}")
            return evaluated

        return evaluate

    def search_all(split: Split, pairs: Sequence[Pair], factor: float = 1.0) -> Cheapest | Infeasible:
        evaluate = replayed(split, factor)
        if split == "never":
            return cheapest([search_one_pool(p, slo, loads[factor], evaluate) for p in pairs if p.prefill is p.decode])
        return cheapest([search(p, slo, loads[factor], evaluate, auto=split == "auto") for p in pairs])

    pairs = [
        Pair(prefill, decode, prices.get(prefill.name, 1.0), prices.get(decode.name, 1.0))
        for prefill in calibrations
        for decode in calibrations
    ]
    routed = tuple(Routed(split, search_all(split, pairs)) for split in ROUTING)
    result = cheapest([plan for _, plan in routed])
    split = next(split for split, plan in routed if plan is result)
    made = (settings, slo, len(rows), too_long, routed, split)
    if isinstance(result, Infeasible):
        return PlanReport(*made, replays=replays, seconds=time.monotonic() - began)
    pair, size, evaluate = result.pair, result.size, replayed(split)
    curve = [Point(f, size, result.evaluated if f == 1.0 else replayed(split, f)(pair, size)) for f in FACTORS]
    fewer = [Point(1.0, s, result.tried.get(s) or evaluate(pair, s)) for s in one_fewer(size)]
    if split == "auto" and size.prefill == 1:  # decode workers compute all prompts then
        without = Size(0, size.decode)
        fewer.insert(0, Point(1.0, without, replayed("never")(pair, without)))
    needed: dict[float, Size | None] = {}
    for factor in HEADROOM if headroom else ():
        at = search_all(split, [pair], factor)
        needed[factor] = at.size if isinstance(at, Cheapest) else None
    return PlanReport(
        *made,
        curve=tuple(curve),
        one_fewer=tuple(fewer),
        needed=needed,
        replays=replays,
        seconds=time.monotonic() - began,
    )


def lost(point: Point, planned: Size) -> str:
    """Returns which worker is missing."""
    return "one prefill worker lost" if point.size.prefill < planned.prefill else "one decode worker lost"


def why_missed(report: PlanReport) -> str:
    """Returns in one line which limit is infeasible, and the nearest feasible one."""
    result = report.result
    if not isinstance(result, Infeasible):
        return ""
    evaluated, share = result.evaluated, report.slo.share
    if result.missed == ("requests",):
        refused = ", ".join(f"{count} {code}" for code, count in evaluated.outcome.refused.items())
        return f"infeasible: more than {1 - share:.0%} of the requests fail with any number of workers ({refused})"
    names = {"ttft": (report.slo.ttft_s, evaluated.ttft_s), "tpot": (report.slo.tpot_s, evaluated.tpot_s)}
    parts = [
        f"{name}={names[name][0]:g} (with room to spare {share:.0%} have at most {names[name][1]:.3g} s)"
        for name in result.missed
    ]
    nearest = f"; nearest feasible: --slo {evaluated.nearest}" if evaluated.nearest else ""
    return f"infeasible with any number of workers: {' and '.join(parts)}{nearest}"
