"""What things cost in seconds: the values that `baton calibrate` measures, and the simulator and the planner use. Pure.

A step costs a sum of few terms, each fitted by least squares:

    prefill   base + row x rows + token x tokens + pair x sum over rows of tokens x mean context
    decode    base + a curve over the number of rows + context x sum over rows of context
              + token x tokens of long rows (recomputation) + draft x draft tokens

The context of a token is the number of positions before it, its own included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.step import StepPlan

FORMAT = 1
_MAX, _MAX_WHOLE = 1e18, 1e9
"""Limits of a number: products of a few of them still are floats."""


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Seconds of a prefill worker's step. `pair_s` is the cost of one token attending to one position; `idle_s` passes
    between two steps without anything being computed."""

    base_s: float
    token_s: float
    row_s: float = 0.0
    pair_s: float = 0.0
    idle_s: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        tokens = pairs = 0.0
        for row in plan.rows:
            count = len(row.tokens)
            tokens += count
            pairs += count * (row.start + (count + 1) / 2)
        return self.base_s + self.row_s * len(plan.rows) + self.token_s * tokens + self.pair_s * pairs

    def prompt_s(self, tokens: int, step_tokens: int) -> float:
        """Returns the seconds that the steps of one prompt take without another in them."""
        steps = math.ceil(tokens / step_tokens)
        return (
            (self.base_s + self.row_s + self.idle_s) * steps
            + self.token_s * tokens
            + self.pair_s * tokens * (tokens + 1) / 2
        )


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of a decode worker's step. A row costs `row_s`, but each one beyond a number of `beyond` (rising) what
    stands there, up to the next number. `token_s` is the cost of a token in a long row; `draft_s` that of proposing and
    verifying one draft token, of which the share `accepted` is accepted (0: no speculation); `idle_s` passes between
    two steps without anything being computed."""

    base_s: float
    row_s: float
    context_s: float = 0.0
    token_s: float = 0.0
    draft_s: float = 0.0
    accepted: float = 0.0
    idle_s: float = 0.0
    beyond: tuple[tuple[int, float], ...] = ()

    def seconds(self, plan: StepPlan, draft_tokens: int = 0) -> float:
        context = long = 0
        for row in plan.rows:
            context += row.end
            long += len(row.tokens) - 1
        return self.plain_s(len(plan.rows), context) + self.token_s * long + self.draft_s * draft_tokens

    def plain_s(self, rows: float, context: float) -> float:
        """Returns the seconds of a step of `rows` rows of one token whose contexts add up to `context`."""
        curve_s, last, row_s = 0.0, 0, self.row_s
        for number, next_s in self.beyond:
            if rows <= number:
                break
            curve_s += row_s * (number - last)
            last, row_s = number, next_s
        return self.base_s + curve_s + row_s * (rows - last) + self.context_s * context


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A hand-over. Its last chunk takes `latency_s` plus its bytes over `bytes_per_s`; a link sends one chunk at a
    time. The others are processor time: of the prefill worker `offer_s` while the first chunk computes, `send_s` after
    the last one and `send_token_s` for each token; of the decode worker `accept_s` at the offer, `receive_s` at the end
    and `receive_token_s` for each token; 0 where it was not measured."""

    latency_s: float
    bytes_per_s: float
    send_s: float = 0.0
    send_token_s: float = 0.0
    receive_s: float = 0.0
    receive_token_s: float = 0.0
    offer_s: float = 0.0
    accept_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """`request_s` is the time from a client's request to the scheduler of its prefill worker, and from its first token
    back to the client. The others are processor time: at the coordinator for a request, each token of its prompt, a
    worker's message, and each token in it; and the same at the client that measured (`client_`). 0 where it was not
    measured."""

    request_s: float = 0.0
    request_cpu_s: float = 0.0
    prompt_token_cpu_s: float = 0.0
    message_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    client_request_cpu_s: float = 0.0
    client_message_cpu_s: float = 0.0
    client_token_cpu_s: float = 0.0

    def admit_cpu_s(self, prompt_tokens: int) -> float:
        return self.request_cpu_s + self.prompt_token_cpu_s * prompt_tokens

    def deliver_cpu_s(self, messages: int, tokens: int) -> float:
        return self.message_cpu_s * messages + self.token_cpu_s * tokens

    def read_cpu_s(self, messages: int, tokens: int) -> float:
        return self.client_message_cpu_s * messages + self.client_token_cpu_s * tokens


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A prefill or decode worker as it was measured: `blocks` of its KV pool, the limits of its options, and
    `start_s`, the time from its start to its first work (0: not measured)."""

    blocks: int
    step_tokens: int
    max_running: int = 0
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Residual:
    """How far a fit is from its measurements: the median and the largest relative error, of `count` values."""

    median: float
    largest: float
    count: int

    def __str__(self) -> str:
        return f"median {self.median:.1%}, largest {self.largest:.1%} of {self.count}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """One kind of worker, measured: `name` identifies it in prices and plans. `residuals` are by the name of the fit,
    `about` describes machine, model, versions and command, `errors` are those of the simulator against a real cluster,
    by the name of the number (`ttft_p50`), relative."""

    name: str
    block_size: int
    max_model_len: int
    token_bytes: int
    tensor_parallel: int
    prefill: PrefillCosts
    decode: DecodeCosts
    link: LinkCosts
    front: FrontCosts
    prefill_worker: WorkerKind
    decode_worker: WorkerKind
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def prompt_s(self, tokens: int) -> float:
        """Returns the seconds that a prompt, alone in its steps, and its hand-over take of a prefill worker."""
        link = self.link
        steps_s = self.prefill.prompt_s(tokens, self.prefill_worker.step_tokens)
        return steps_s + link.offer_s + link.send_s + link.send_token_s * tokens

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


_PARTS: dict[str, type] = {
    "prefill": PrefillCosts,
    "decode": DecodeCosts,
    "link": LinkCosts,
    "front": FrontCosts,
    "prefill_worker": WorkerKind,
    "decode_worker": WorkerKind,
}
_AT_LEAST_ONE = ("block_size", "max_model_len", "token_bytes", "tensor_parallel", "blocks", "step_tokens")


def parse_calibration(document: object) -> Calibration:
    """Returns the calibration that `as_json` describes.

    Raises:
        InvalidRequest: a field is missing, unknown or has a wrong value; the message names it.
    """
    values = _object(document, "")
    if (number := values.pop("format", None)) != FORMAT:
        raise InvalidRequest(f"format: {number!r} is not {FORMAT}; run `baton calibrate` again", param="format")
    for name, of in _PARTS.items():
        values[name] = _build(of, values.get(name), name)
    residuals = _object(values.get("residuals", {}), "residuals")
    values["residuals"] = {key: _build(Residual, source, f"residuals.{key}") for key, source in residuals.items()}
    values["about"] = {key: str(source) for key, source in _object(values.get("about", {}), "about").items()}
    errors = _object(values.get("errors", {}), "errors")
    values["errors"] = {key: _number(source, f"errors.{key}") for key, source in errors.items()}
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise InvalidRequest("name: must be a text that is not empty", param="name")
    calibration: Calibration = _build(Calibration, values, "")
    if calibration.link.bytes_per_s <= 0:
        raise InvalidRequest("link.bytes_per_s: must be above 0", param="link.bytes_per_s")
    if calibration.decode.accepted >= 1:
        raise InvalidRequest("decode.accepted: must be below 1, it is a share", param="decode.accepted")
    if not calibration.prefill.prompt_s(1, calibration.prefill_worker.step_tokens):
        raise InvalidRequest("prefill: a prompt takes no time", param="prefill")
    if not calibration.decode.plain_s(1, 1):
        raise InvalidRequest("decode: a step takes no time", param="decode")
    return calibration


def _object(source: object, name: str) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise InvalidRequest(f"{name or 'the calibration'}: must be a JSON object", param=name)
    return dict(source)


def _build(of: type, source: object, name: str) -> Any:
    values, prefix = _object(source, name), f"{name}." if name else ""
    known = {f.name: f for f in fields(of)}
    for key in values:
        if key not in known:
            raise InvalidRequest(f"{prefix}{key}: unknown field", param=f"{prefix}{key}")
    made = {}
    for key, f in known.items():
        if key not in values:
            if f.default is not MISSING or f.default_factory is not MISSING:
                continue
            raise InvalidRequest(f"{prefix}{key}: is missing", param=f"{prefix}{key}")
        value = values[key]
        if f.type in ("int", "float"):
            value = _number(value, prefix + key, whole=f.type == "int")
            if key in _AT_LEAST_ONE and value < 1:
                raise InvalidRequest(f"{prefix}{key}: must be at least 1, not {value}", param=prefix + key)
        elif key == "beyond":
            value = _beyond(value, prefix + key)
        made[key] = value
    return of(**made)


def _beyond(source: object, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(source, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in source
    ):
        raise InvalidRequest(f"{name}: must be pairs of rows and seconds, not {source!r:.40}", param=name)
    pairs = tuple((int(_number(rows, name, whole=True)), _number(seconds, name)) for rows, seconds in source)
    if any(later <= earlier for (earlier, _), (later, _) in itertools.pairwise(((0, 0.0), *pairs))):
        raise InvalidRequest(f"{name}: the numbers of rows must rise from 1 on", param=name)
    return pairs


def _number(value: object, name: str, *, whole: bool = False) -> float:
    limit = _MAX_WHOLE if whole else _MAX
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise InvalidRequest(f"{name}: must be a number from 0 to {limit:g}, not {value!r:.40}", param=name)
    if whole and value != int(value):
        raise InvalidRequest(f"{name}: must be a whole number, not {value!r:.40}", param=name)
    return int(value) if whole else float(value)
