"""Decides whether a worker may join: its facts must be possible and match the coordinator's model and other workers.

All workers of one revision serve the same model in the same way. A worker that differs in this is refused, unless it
names a revision of its own (`--revision`), whose weights, config and options may then be others. The tokenizer and the
vocabulary are always the coordinator's. The version of the code does not matter, and protocol versions may be adjacent.

A join carries no config.json, only its digest; the KV layout and the vocabulary size show how two models differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from baton.core.commands import Join
from baton.core.compatibility import PROTOCOL_VERSION, SERVED_VERSIONS, Compatibility, Difference, difference
from baton.core.errors import JoinRefused, StartupError
from baton.core.kv_layout import KVDType
from baton.core.names import name_error
from baton.core.reshard import MAX_TENSOR_PARALLEL, local_layout
from baton.models.model_config import AnyConfig, ModelConfig

_ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The coordinator's model: the directory `where`, the digests of its config.json and its tokenizer.json, and the
    parsed config."""

    where: str
    config_digest: str
    config: AnyConfig
    tokenizer_digest: str = ""

    def difference(self, join: Join) -> str | None:
        """Returns how a worker's model differs from this one, starting with the field's name; None if it does not, or
        if it may: a worker with a revision needs only the same tokens."""
        tokens = {"vocab_size": self.config.vocab_size, "tokenizer_digest": self.tokenizer_digest}
        theirs = {name: getattr(join.facts, name) for name in tokens}
        if not join.revision and (differs := self._other_model(join.facts, join.worker_id)) is not None:
            return differs
        differing = difference(tokens, theirs)
        return differing and f"{differing.between('the coordinator', join.worker_id)}; it serves {self.where}"

    def _other_model(self, facts: Compatibility, worker: str) -> str | None:
        layout = facts.layout  # of a model that transformers computes only the workers know it
        if isinstance(self.config, ModelConfig):
            layout = self.config.kv_layout(facts.layout.block_size, cast(KVDType, facts.kv_dtype))
        own = replace(facts, config_digest=self.config_digest, vocab_size=self.config.vocab_size, layout=layout)
        differs = difference(own, facts)
        if differs is None or facts.config_digest == self.config_digest:
            return None
        also = difference(replace(own, config_digest=facts.config_digest), facts)
        visible = also.between("the coordinator", worker) if also else "the vocabulary size and the KV layout are equal"
        return f"{differs.between('the coordinator', worker)}; the coordinator's model is {self.where}; {visible}"


def check_join(join: Join, present: Iterable[Join], own: OwnModel | None) -> None:
    """Compares a join with the coordinator's model and with the workers of its revision that are `present`.

    Raises:
        JoinRefused: it does not fit; the message names the field and both values.
    """
    _check_possible(join)
    other_model = own.difference(join) if own is not None else None
    if other_model is not None:
        raise refused(join, other_model)
    for other in present:
        theirs = replace(other.facts, protocol_version=join.facts.protocol_version)
        if (differs := difference(theirs, join.facts)) is not None:
            revision = f" of revision {join.revision}" if join.revision else ""
            raise refused(join, f"{differs.between(other.worker_id, join.worker_id)}{revision}")


def refused(join: Join, reason: str) -> JoinRefused:
    """`reason` begins with the name of the field and a colon."""
    return JoinRefused(f"{join.role} worker {join.worker_id} refused: {reason}", param=reason.split(":")[0])


def _check_possible(join: Join) -> None:
    """Raises JoinRefused for values that no valid worker reports, or none that this coordinator can serve."""
    if wrong := name_error(join.worker_id):
        raise JoinRefused(f"{join.role} worker refused: worker_id: {wrong}", param="worker_id")
    for field, name in (("revision", join.revision), ("domain", join.domain)):
        if name and (wrong := name_error(name)):
            raise refused(join, f"{field}: {wrong}")
    if join.facts.protocol_version not in SERVED_VERSIONS:
        differs = difference({"protocol_version": PROTOCOL_VERSION}, {"protocol_version": join.facts.protocol_version})
        raise refused(join, cast(Difference, differs).between("the coordinator", join.worker_id))
    for name, size, least in (
        ("block_size", join.facts.layout.block_size, 1),
        ("blocks_total", join.blocks_total, 1),
        ("step_tokens", join.step_tokens, 0),
    ):
        if size < least:
            raise refused(join, f"{name}: {size} is below {least}")
    ranks = join.tensor_parallel
    if not 1 <= ranks <= MAX_TENSOR_PARALLEL:
        raise refused(join, f"tensor_parallel: {ranks} is not from 1 to {MAX_TENSOR_PARALLEL}")
    if join.pids and len(join.pids) != ranks:
        raise refused(join, f"tensor_parallel: {ranks} ranks but {len(join.pids)} pids")
    try:
        local_layout(join.facts.layout, ranks, 0)
    except StartupError as e:
        raise refused(join, f"tensor_parallel: {e.message}") from None
    if join.role == "decode" and _ADDRESS.fullmatch(join.link_address) is None:
        raise refused(join, f"link_address: {join.link_address[:100]!r} is not HOST:PORT")
