"""`baton plan`: the cheapest cluster for a load, and what surrounds it: other rates, a lost worker, its own error."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.core.errors import StartupError
from coordinator.policy.pick import PREFIX_SLACK
from coordinator.policy.split import Split
from sim.scale.costs import Calibration
from sim.scale.members import ClusterShape
from sim.scale.planner import (
    Cheapest,
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
from sim.scale.workload import fitting, scaled
from sim.stats import Slo
from sim.trace import TraceRow

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
HEADROOM = (2.0, 5.0)
ONE_POOL = (
    f"the longest cached prefix, unless more than {PREFIX_SLACK} more sequences run there than on the emptiest worker"
)
"""Without a prefill pool."""
ROUTING = (
    "prefill: the worker that has the fewest tokens to compute, its backlog and what it has cached of the prompt"
    f" counted; decode: {ONE_POOL}"
)
"""The production dispatcher's policy (coordinator/policy/pick.py): it has no other."""


@dataclass(frozen=True, slots=True)
class Point:
    """The planned cluster, or another one, at `factor` times the rate."""

    factor: float
    size: Size
    evaluated: Evaluated


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything about a plan. `other` is the best plan without a prefill pool, or with one if the cheapest has none;
    `one_fewer` are the plan's load on clusters without one of its workers; `needed` are the
    sizes that meet the limits at HEADROOM times the rate, None where none does. If it is `infeasible`, `result` has
    room to spare and the others are empty."""

    settings: Mapping[str, str]
    slo: Slo
    requests: int
    too_long: int
    result: Cheapest | Infeasible
    other: Cheapest | Infeasible
    curve: tuple[Point, ...] = ()
    one_fewer: tuple[Point, ...] = ()
    needed: Mapping[float, Size | None] = field(default_factory=dict)
    replays: int = 0
    seconds: float = 0.0

    @property
    def infeasible(self) -> bool:
        return isinstance(self.result, Infeasible)

    @property
    def routing(self) -> str:
        return ROUTING if self.result.size.prefill else ONE_POOL

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
            "routing": self.routing,
            "outcome": _evaluated(result.evaluated),
            "errors": {"prefill": dict(result.pair.prefill.errors), "decode": dict(result.pair.decode.errors)},
            "warnings": self.warnings,
            "replays": self.replays,
            "other": {
                "feasible": isinstance(self.other, Cheapest),
                "workers": asdict(self.other.size),
                "price_per_hour": self.other.pair.price(self.other.size),
            },
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
    seed: int = 1,
    headroom: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Searches all pairs of calibrations, and each of them without a prefill pool, and replays what surrounds the
    cheapest plan.

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

    def evaluate(pair: Pair, size: Size, factor: float = 1.0) -> Evaluated:
        nonlocal replays
        replays += 1
        if factor not in loads:
            loads[factor] = scaled(kept, factor, seed)
        split: Split = "always" if size.prefill else "never"
        shape = ClusterShape(pair.prefill, size.prefill, pair.decode, size.decode, split=split)
        replay = Replay(shape, loads[factor])
        evaluated = evaluate_times(replay.run(slo), replay.measured.times, slo)
        line = f"{size}: {evaluated.outcome.met_share:.1%} met" + (f" at {factor:g}x" if factor != 1.0 else "")
        progress(line)
        return evaluated

    pairs = [
        Pair(prefill, decode, prices.get(prefill.name, 1.0), prices.get(decode.name, 1.0))
        for prefill in calibrations
        for decode in calibrations
    ]
    two_pools = cheapest([search(pair, slo, kept, evaluate) for pair in pairs])
    one_pool = cheapest([search_one_pool(p, slo, kept, evaluate) for p in pairs if p.prefill is p.decode])
    result = cheapest([two_pools, one_pool])
    made = (settings, slo, len(rows), too_long, result, one_pool if result is two_pools else two_pools)
    if isinstance(result, Infeasible):
        return PlanReport(*made, replays=replays, seconds=time.monotonic() - began)
    pair, size = result.pair, result.size
    curve = [Point(f, size, result.evaluated if f == 1.0 else evaluate(pair, size, f)) for f in FACTORS]
    fewer = [Point(1.0, s, result.tried.get(s) or evaluate(pair, s)) for s in one_fewer(size)]
    needed: dict[float, Size | None] = {}
    for factor in HEADROOM if headroom else ():
        evaluate(pair, size, factor)
        look = search if size.prefill else search_one_pool
        at = look(pair, slo, loads[factor], lambda p, s, f=factor: evaluate(p, s, f))  # type: ignore[misc]
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
