"""The model that is served, alone and with each of its LoRA adapters, as the protocol describes it: metadata,
configuration, repository, and statistics, which are counts and durations of inference requests.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.core.errors import BatonError, NotFound
from coordinator.inference.model import INPUTS, OUTPUTS
from coordinator.pipeline import Pipeline
from coordinator.policy.adapters import AdapterTable
from coordinator.policy.quotas import Client
from coordinator.submission import Delta, Sink, Submission


@dataclass(slots=True)
class Duration:
    """How often, and how long in all, in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class Statistics:
    """`success` and `fail` count prompts, the others choices: `queue` until its prompt is computed, `compute_input`
    the prompt, `compute_infer` the output. `last_inference` is in Unix milliseconds."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    inference_count: int = 0
    execution_count: int = 0
    last_inference: int = 0

    def ended(self, answers: Sequence[Delta], seconds: float) -> None:
        """Counts a prompt with the last delta of each of its choices."""
        self.success.add(seconds)
        self.execution_count += 1
        self.last_inference = round(time.time() * 1000)
        for line in (answer.timeline for answer in answers if answer.timeline is not None):
            lengths = {span.name: span.end_s - span.start_s for span in line.spans}
            self.inference_count += 1
            self.queue.add(lengths.get("queue", 0.0) + lengths.get("prefill_queue", 0.0))
            self.compute_input.add(lengths.get("prefill", 0.0))
            self.compute_infer.add(lengths.get("decode", 0.0))
            self.compute_output.add(lengths.get("detokenise", 0.0))

    def failed(self, seconds: float) -> None:
        self.fail.add(seconds)

    def as_json(self) -> dict[str, Any]:
        """Returns them as in an entry of `model_stats`."""
        parts = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        return {
            "last_inference": self.last_inference,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {part: asdict(getattr(self, part)) for part in parts},
            "batch_stats": [],
        }


class CountingPipeline:
    """A pipeline that counts what it generates."""

    def __init__(self, pipeline: Pipeline, statistics: Statistics) -> None:
        self._pipeline, self._statistics = pipeline, statistics

    def admitted(self, client: Client, choices: int = 1) -> AbstractContextManager[None]:
        return self._pipeline.admitted(client, choices)

    def check_room(self, client: Client, limit_s: float | None = None) -> None:
        try:
            self._pipeline.check_room(client, limit_s)
        except BatonError:
            self._statistics.failed(0.0)
            raise

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        started, ended = time.monotonic(), list[Delta]()
        try:
            async with aclosing(self._pipeline.generate(submission, sink)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        ended.append(delta)
                        if len(ended) == submission.n:
                            self._statistics.ended(ended, time.monotonic() - started)
                    yield delta
        except Exception:
            self._statistics.failed(time.monotonic() - started)
            raise


VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics", "generate")


@dataclass(slots=True)
class ServedModel:
    """`server_version` is Baton's. A model with an adapter has a name of its own, and all share the statistics."""

    name: str
    server_version: str = "0"
    statistics: Statistics = field(default_factory=Statistics)
    adapters: AdapterTable = field(default_factory=AdapterTable)

    def check(self, name: str, version: str = "") -> str:
        """Returns the digest of the adapter of that name; empty for the model itself. Raises NotFound unless one has
        this name, and this version or none is given."""
        digest = self.adapters.chosen(name, self.name, "model_name")
        if version not in ("", VERSION):
            message = f"version {version[:40]!r} of {name} does not exist: there is version {VERSION}"
            raise NotFound(message, code="model_not_found", param="model_version")
        return digest

    def server(self) -> dict[str, Any]:
        """Returns the server's metadata as JSON."""
        return {"name": "baton", "version": self.server_version, "extensions": list(EXTENSIONS)}

    def metadata(self, name: str) -> dict[str, Any]:
        """Returns the model's metadata as JSON."""
        inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind in INPUTS]
        outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in OUTPUTS]
        return {"name": name, "versions": [VERSION], "platform": "baton", "inputs": inputs, "outputs": outputs}

    def config(self, name: str) -> dict[str, Any]:
        """Returns the model's configuration in Triton's form, as JSON."""
        inputs = [
            {"name": name, "data_type": _typed(kind), "dims": [1], "optional": name != "text_input"}
            for name, kind in INPUTS
        ]
        return {
            "name": name,
            "platform": "",
            "backend": "baton",
            "max_batch_size": 0,
            "input": inputs,
            "output": [{"name": name, "data_type": _typed(kind), "dims": [-1]} for name, kind in OUTPUTS],
            "model_transaction_policy": {"decoupled": True},
        }

    def repository_index(self, ready: bool, reason: str) -> list[dict[str, str]]:
        """Returns the models of the repository."""
        state = {"state": "READY", "reason": ""} if ready else {"state": "UNAVAILABLE", "reason": reason}
        names = self.name, *(adapter.name for adapter in self.adapters)
        return [{"name": name, "version": VERSION, **state} for name in names]

    def model_stats(self, name: str = "") -> dict[str, Any]:
        """Returns the statistics as JSON."""
        return {"model_stats": [{"name": name or self.name, "version": VERSION} | self.statistics.as_json()]}


def _typed(kind: str) -> str:
    return "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"
