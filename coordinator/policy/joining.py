"""Decides whether a worker may join: its facts must be possible and match the coordinator's model and other workers.

A join carries no config.json, only its digest; the KV layout and the vocabulary size show how two models differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from baton.core.commands import Join
from baton.core.compatibility import Compatibility, difference
from baton.core.errors import JoinRefused, StartupError
from baton.core.model_config import AnyConfig, DType, ModelConfig
from baton.core.names import name_error
from baton.core.reshard import MAX_TENSOR_PARALLEL, local_layout

_ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The coordinator's model: the directory `where`, the digest of its config.json, and the parsed config."""

    where: str
    config_digest: str
    config: AnyConfig

    def difference(self, facts: Compatibility, worker: str) -> str | None:
        """Returns how a worker's model differs from this one, starting with the field's name; None if it does not."""
        layout = facts.layout  # of a model that transformers computes only the workers know it
        if isinstance(self.config, ModelConfig):
            layout = self.config.kv_layout(facts.layout.block_size, cast(DType, facts.dtype))
        own = replace(facts, config_digest=self.config_digest, vocab_size=self.config.vocab_size, layout=layout)
        differs = difference(own, facts)
        if differs is None or facts.config_digest == self.config_digest:
            return None
        also = difference(replace(own, config_digest=facts.config_digest), facts)
        visible = also.between("the coordinator", worker) if also else "the vocabulary size and the KV layout are equal"
        return f"{differs.between('the coordinator', worker)}; the coordinator's model is {self.where}; {visible}"


def check_join(join: Join, present: Iterable[Join], own: OwnModel | None) -> None:
    """Compares a join with the coordinator's model and with the workers that are present.

    Raises:
        JoinRefused: it does not fit; the message names the field and both values.
    """
    _check_possible(join)
    other_model = own.difference(join.facts, join.worker_id) if own is not None else None
    if other_model is not None:
        raise refused(join, other_model)
    for other in present:
        if (differs := difference(other.facts, join.facts)) is not None:
            raise refused(join, differs.between(other.worker_id, join.worker_id))


def refused(join: Join, reason: str) -> JoinRefused:
    """`reason` begins with the name of the field and a colon."""
    return JoinRefused(f"{join.role} worker {join.worker_id} refused: {reason}", param=reason.split(":")[0])


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
