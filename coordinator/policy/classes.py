"""Compatibility classes: which workers may be paired, and which of them may serve a request. Pure.

A class is a revision (`--revision` of its workers) in one domain (`--domain`), with one protocol version. Within a
revision all workers serve the same model in the same way (`coordinator.policy.joining`); within a class every prefill
worker can hand KV over to every decode worker. A request uses the workers of one class. It moves to another one only as
tokens, its prompt and its output so far, and once it has output only where that is continued by the same model
(`continues`). A class in which a role has no worker gets no request.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from baton.core.commands import Join, Role
from baton.core.compatibility import Compatibility, Difference, difference
from coordinator.policy.pool import Pool, Worker


class ClassKey(NamedTuple):
    revision: str
    domain: str
    protocol_version: int


def class_key(join: Join) -> ClassKey:
    return ClassKey(join.revision, join.domain, join.facts.protocol_version)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerClass:
    """The present workers of a class. It remains while it is empty, for the limits of the workers that it had last."""

    key: ClassKey
    prefill: Pool
    decode: Pool

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.prefill, self.decode

    def pool(self, role: Role) -> Pool:
        return self.prefill if role == "prefill" else self.decode

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill.workers, *self.decode.workers]

    @property
    def facts(self) -> Compatibility | None:
        """The facts that its workers share, if there are any."""
        return next((worker.join.facts for worker in self.workers), None)


def continues(before: Compatibility, after: Compatibility) -> Difference | None:
    """Returns the first field that prevents workers with the facts `after` from continuing the output of workers with
    the facts `before`; None if they can. In exact mode they must also generate the same tokens."""
    names = ["model_digest", "tokenizer_digest", "exact", "quantize"]
    if before.exact:
        names += ["dtype", "kv_dtype", "model_impl"]
    a, b = asdict(before), asdict(after)
    return difference({name: a[name] for name in names}, {name: b[name] for name in names})
