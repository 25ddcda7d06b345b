"""`baton report`: what a cluster did in a window of time, from two responses to `GET /metrics`.

    goodput      requests per second that ended without error within both latency limits
    utilisation  seconds in steps / seconds that workers of the role were present
    wasted       prompt tokens computed in vain / prompt tokens computed
    cost         worker-hours x price, per million tokens

The coordinator counts requests by the upper bounds of their latencies, so limits are rounded down to such bounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import StartupError
from baton.runtime.paths import read_text, write_text
from coordinator.policy.timeline import TPOT_S, TTFT_S, counted_limit
from launch.cluster_api import get_metrics
from sim.stats import Slo

ROLES = "prefill", "decode"
CANCELLED = "cancelled"
OTHER = "given up before the first token, preempted, or in progress"
Labels = tuple[tuple[str, str], ...]


class Limits(NamedTuple):
    """Seconds to the first token, and per further one; 0: none."""

    ttft_s: float
    tpot_s: float


NO_LIMITS = Limits(0.0, 0.0)
NO_PRICES: Mapping[str, float] = {}
_START = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One response to `GET /metrics`, received at `at` (Unix seconds): its text, and the samples by name and labels."""

    at: float
    text: str
    samples: Mapping[tuple[str, Labels], float]

    def each(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yields labels and value of each sample of that name with these labels."""
        for (known, own), value in self.samples.items():
            if known == name and labels.items() <= set(own):
                yield dict(own), value

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.each(name, **labels))


@dataclass(frozen=True, slots=True)
class RoleReport:
    """`utilisation` is None if no worker was present, `cost` without a price."""

    worker_hours: float
    utilisation: float | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """`failed` are requests by error code, without those that their clients gave up. `good` ended without error within
    the limits `ttft_s` and `tpot_s`, 0: none. Tokens of prompts are those of requests that produced a token; `computed`
    and `wasted`, by reason, are tokens of prefills."""

    seconds: float
    restarted: bool
    requests: int
    failed: dict[str, int]
    cancelled: int
    good: int
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed: int
    wasted: dict[str, int]
    roles: dict[str, RoleReport]

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.seconds if self.seconds > 0 else 0.0

    @property
    def good_share(self) -> float | None:
        """Of the requests that ended, without those that their clients gave up; None if there are none."""
        ended = self.requests + sum(self.failed.values())
        return self.good / ended if ended else None

    @property
    def wasted_share(self) -> float | None:
        return sum(self.wasted.values()) / self.computed if self.computed else None

    @property
    def cost(self) -> float | None:
        """None without a price."""
        costs = [role.cost for role in self.roles.values() if role.cost is not None]
        return sum(costs) if costs else None

    def cost_per_million(self, tokens: int) -> float | None:
        return self.cost / tokens * 1e6 if self.cost is not None and tokens else None

    def as_json(self) -> dict[str, Any]:
        tokens = self.prompt_tokens + self.generated_tokens
        return asdict(self) | {
            "goodput_per_s": self.goodput_per_s,
            "good_share": self.good_share,
            "wasted_share": self.wasted_share,
            "cost": self.cost,
            "cost_per_million_generated": self.cost_per_million(self.generated_tokens),
            "cost_per_million_tokens": self.cost_per_million(tokens),
        }


def counted_limits(slo: Slo | None) -> Limits:
    """Returns the limits of an SLO, rounded down to counted ones. Raises InvalidRequest if one is below them all."""
    if slo is None:
        return NO_LIMITS
    return Limits(counted_limit(TTFT_S, slo.ttft_s), counted_limit(TPOT_S, slo.tpot_s))


def scrape(url: str) -> Scrape:
    """Raises StartupError if no coordinator answers at `url`."""
    return parse(get_metrics(url), time.time())


def parse(text: str, at: float) -> Scrape:
    """Raises StartupError if the text is not that of a coordinator."""
    try:
        families = [*text_string_to_metric_families(text)]
    except ValueError as error:
        raise StartupError(f"GET /metrics: not in Prometheus' format ({error})") from None
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    if (_START, ()) not in samples or ("baton_generated_tokens_total", ()) not in samples:
        raise StartupError("GET /metrics: these are not the metrics of a coordinator of Baton")
    return Scrape(at, text, samples)


def save_scrape(scraped: Scrape, path: str) -> None:
    try:
        write_text(path, json.dumps({"at": scraped.at, "metrics": scraped.text}))
    except OSError as error:
        raise StartupError(f"--save {path} cannot be written: {error.strerror or error}") from None


def load(path: str) -> Scrape:
    """Returns what `save_scrape` wrote. Raises StartupError."""
    try:
        saved = json.loads(read_text(path))
        return parse(str(saved["metrics"]), float(saved["at"]))
    except OSError as error:
        raise StartupError(f"--since {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError, StartupError):
        raise StartupError(f"--since {path} is not a file that `baton report --save` wrote") from None


def made_of(
    before: Scrape | None, after: Scrape, limits: Limits = NO_LIMITS, prices: Mapping[str, float] = NO_PRICES
) -> ClusterReport:
    """Reports on the time between two scrapes, or since the coordinator's start: without the first one, and if the
    coordinator was restarted after it. `prices` are per worker-hour, by role."""
    started_at = after.total(_START)
    restarted = before is not None and before.total(_START) != started_at
    if before is None or restarted:
        before = Scrape(started_at, "", {})
    earlier = before

    def rise(name: str, **labels: str) -> float:
        return after.total(name, **labels) - earlier.total(name, **labels)

    def by(name: str, label: str) -> dict[str, int]:
        values = (labels[label] for labels, _ in after.each(name))
        return {value: count for value in values if (count := round(rise(name, **{label: value})))}

    failed = by("baton_requests_failed_total", "code")
    cancelled = failed.pop(CANCELLED, 0)
    requests = rise("baton_request_seconds_count")
    computed, prefilled = map(rise, ("baton_pool_prompt_tokens_computed_total", "baton_prefilled_tokens_total"))
    wasted = by("baton_prefilled_tokens_wasted_total", "reason")
    if (other := round(computed - prefilled)) > 0:
        wasted[OTHER] = other
    return ClusterReport(
        seconds=after.at - before.at,
        restarted=restarted,
        requests=round(requests),
        failed=failed,
        cancelled=cancelled,
        good=round(_good(before, after, limits)) if any(limits) else round(requests),
        ttft_s=limits.ttft_s,
        tpot_s=limits.tpot_s,
        prompt_tokens=round(rise("baton_prompt_tokens_total")),
        cached_tokens=round(rise("baton_prompt_tokens_cached_total")),
        generated_tokens=round(rise("baton_generated_tokens_total")),
        computed=round(computed),
        wasted=wasted,
        roles={
            role: _role(
                rise("baton_pool_worker_seconds_total", role=role),
                rise("baton_pool_step_seconds_total", role=role),
                prices.get(role),
            )
            for role in ROLES
        },
    )


def _good(before: Scrape, after: Scrape, limits: Limits) -> float:
    """Returns the requests in cells whose bounds are not above the limits; 0: none."""
    name, count = "baton_requests_latency_total", 0.0
    for labels, value in after.each(name):
        within = all(
            not limit or float(labels[key]) <= limit
            for key, limit in (("ttft_le", limits.ttft_s), ("tpot_le", limits.tpot_s))
        )
        count += (value - before.total(name, **labels)) * within
    return count


def _role(worker_s: float, step_s: float, price: float | None) -> RoleReport:
    hours = worker_s / 3600
    return RoleReport(hours, step_s / worker_s if worker_s else None, None if price is None else hours * price)


def text_of(made: ClusterReport) -> Iterator[str]:
    """Yields the report as text."""
    since = " (since the coordinator's restart)" if made.restarted else ""
    yield f"window       {made.seconds:.1f} s{since}"
    failed = ", ".join(f"{count} {code}" for code, count in sorted(made.failed.items())) or "none"
    yield f"requests     {made.requests} without error; failed: {failed}; given up by clients: {made.cancelled}"
    named = (("first token within", made.ttft_s), ("each further one within", made.tpot_s))
    limits = ", ".join(f"{limited} {limit:g} s" for limited, limit in named if limit) or "no limits; see --slo"
    yield f"goodput      {made.goodput_per_s:.3g} requests/s, {_share(made.good_share)} of those that ended ({limits})"
    cached = _share(made.cached_tokens / made.prompt_tokens if made.prompt_tokens else None)
    yield f"tokens       {made.prompt_tokens} of prompts ({cached} cached), {made.generated_tokens} generated"
    reasons = "; ".join(f"{count} {why}" for why, count in made.wasted.items()) or "none"
    yield f"prefilled    {made.computed} tokens computed, {_share(made.wasted_share)} of them wasted: {reasons}"
    for name, role in made.roles.items():
        cost = "" if role.cost is None else f", cost {role.cost:.6g}"
        yield f"{name:<12} {role.worker_hours:.6g} worker-hours, {_share(role.utilisation)} of them in steps{cost}"
    if made.cost is not None:
        per = [made.cost_per_million(n) for n in (made.generated_tokens, made.prompt_tokens + made.generated_tokens)]
        generated, tokens = ("-" if cost is None else f"{cost:.6g}" for cost in per)
        yield f"cost         {made.cost:.6g}; {generated} per million generated tokens, {tokens} per million tokens"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def parse_prices(text: str) -> dict[str, float]:
    """Parses `2.5`, a price per worker-hour, or `prefill=1.5,decode=2.5`; nothing without a text.

    Raises:
        ValueError: the text has another form.
    """
    if not text:
        return {}
    if "=" not in text:
        prices = dict.fromkeys(ROLES, float(text))
    else:
        pairs = [part.partition("=") for part in text.split(",")]
        prices = {role: float(price) for role, _, price in pairs}
        if set(prices) != set(ROLES) or len(pairs) != len(ROLES):
            raise ValueError("give prefill and decode once each")
    if not all(0 <= price < float("inf") for price in prices.values()):
        raise ValueError("a price must be 0 or above")
    return prices
