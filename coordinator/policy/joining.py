"""Decides whether a worker may join: its facts must be possible and match the coordinator's model and other workers.

A join carries no config.json, only its digest; the KV layout and the vocabulary size show how two models differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from baton.core.commands import Join, WorkerFacts, short_digest
from baton.core.errors import JoinRefused, StartupError
from baton.core.model_config import DType, ModelConfig
from baton.core.names import name_error
from baton.core.reshard import MAX_TENSOR_PARALLEL, local_layout

_ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The coordinator's model: the directory `where`, the digest of its config.json, and the parsed config."""

    where: str
    config_digest: str
    config: ModelConfig

    def difference(self, facts: WorkerFacts) -> str | None:
        """Returns how a worker's model differs from this one, starting with the field's name; None if it does not."""
        if facts.config_digest == self.config_digest:
            return None
        digests = f"{short_digest(self.config_digest)} here, {short_digest(facts.config_digest)} at the worker"
        return f"config_digest: {digests}; the coordinator's model is {self.where}, {self._visible_difference(facts)}"

    def _visible_difference(self, facts: WorkerFacts) -> str:
        if facts.vocab_size != self.config.vocab_size:
            difference: str | None = f"vocab_size: {self.config.vocab_size} and {facts.vocab_size}"
        else:
            own = self.config.kv_layout(facts.layout.block_size, cast(DType, facts.dtype))
            difference = own.first_difference(facts.layout)
        if difference is None:
            return "the worker's has the same KV layout and vocabulary size but another config.json"
        return f"the worker's differs in {difference}"


def check_join(join: Join, others: Iterable[Join], own: OwnModel | None) -> None:
    """Compares a join with the coordinator's model and with the workers that are present.

    Raises:
        JoinRefused: it does not fit; the message names the field and both values.
    """
    _check_possible(join)
    difference = own.difference(join.facts) if own is not None else None
    if difference is not None:
        raise refused(join, difference)
    for other in others:
        difference = other.facts.first_difference(join.facts)
        if difference is not None:
            raise refused(join, difference + _owner_of_value(difference, join, other))


def refused(join: Join, difference: str) -> JoinRefused:
    """`difference` begins with the name of the field and a colon."""
    return JoinRefused(f"{join.role} worker {join.worker_id} refused: {difference}", param=difference.split(":")[0])


def _check_possible(join: Join) -> None:
    """Raises JoinRefused for values that no valid worker reports."""
    if wrong := name_error(join.worker_id):
        raise JoinRefused(f"{join.role} worker refused: worker_id: {wrong}", param="worker_id")
    for name, size, least in (
        ("block_size", join.facts.layout.block_size, 1),
        ("blocks_total", join.blocks_total, 1),
        ("step_tokens", join.step_tokens, 0),
    ):
        if size < least:
            raise refused(join, f"{name}: {size} is below {least}")
    ranks = join.facts.tensor_parallel
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


def _owner_of_value(difference: str, join: Join, other: Join) -> str:
    """Names the worker that has the other value: a digest or a number alone does not identify it."""
    if not difference.startswith("model_digest: "):
        return f"; the first is that of {other.worker_id}"
    what = "weights" if join.facts.config_digest == other.facts.config_digest else "config.json"
    return f"; {other.worker_id} on host {other.host[:253]!a} has different {what}"
