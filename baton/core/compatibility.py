"""What must be equal between the members of a cluster: one record, one comparison, one message.

The coordinator compares it when a worker joins, both workers of a link when it is dialled, the ranks of a worker before
they load, and `baton up` before it starts anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from baton.core.kv_layout import KVLayout

PROTOCOL_VERSION = 18
"""Must be raised when anything on the wire changes: proto/, or what edges send (tests/runtime/test_wire_version.py)."""

_SHOWN_CHARS = 80
_DIGEST_CHARS = 12

_HINTS = {
    "device": "auto depends on the machine: set --device",
    "dtype": "auto depends on the machine: set --dtype",
    "kernels": "auto depends on the machine: set --kernels",
    "edge_kind": "auto depends on the device: set --edge-kind",
    "model_digest": "config.json is equal, the weights are not",
    "block_size": "one must be a multiple of the other, and equal at all ranks of a worker",
    "max_num_tokens": "it follows from --step-tokens and --max-running",
    "decode_lengths": "it follows from --draft and --draft-tokens",
}
"""What to know about a field that differs."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What must be equal at all workers of a cluster. Of two block sizes, one must be a multiple of the other.

    A field comes before those that it explains; in another protocol version the meaning of the others may differ.
    """

    protocol_version: int
    code_version: str
    exact: bool
    dtype: str
    quantize: str
    # Which path computes the model: "baton" or "transformers".
    model_impl: str
    edge_kind: str
    config_digest: str
    # Of config.json and all weight bytes.
    model_digest: str
    vocab_size: int
    max_model_len: int
    # Of the whole model, whatever part of its heads a rank has.
    layout: KVLayout


class Difference(NamedTuple):
    """The first field that differs, and both values as they are shown."""

    field: str
    ours: str
    theirs: str

    def between(self, here: str, there: str) -> str:
        """Returns the message; it begins with the field's name and a colon. `here` has our value, `there` theirs."""
        hint = _HINTS.get(self.field)
        return f"{self.field}: {self.ours} at {here} and {self.theirs} at {there}" + (f"; {hint}" if hint else "")


def difference(ours: object, theirs: object, *, same_block_size: bool = False) -> Difference | None:
    """Returns the first field in which two records differ that prevents the two from working together, or None.

    A record is a dataclass, or what `values_by_name` returned for one. `same_block_size`: a multiple is a difference.
    """
    a, b = values_by_name(ours), values_by_name(theirs)
    for name in dict.fromkeys((*a, *b)):
        mine, other = a.get(name), b.get(name)
        if mine == other or (name == "block_size" and not same_block_size and _one_divides(mine, other)):
            continue
        return Difference(name, _shown(name, mine), _shown(name, other))
    return None


def values_by_name(record: Any) -> Mapping[str, Any]:
    """Returns the values of a record and of the dataclasses in it, by the names that messages show. Sequences of
    dataclasses are counted first, and then listed."""
    return record if isinstance(record, Mapping) else dict(_walk(record, ""))


def _walk(record: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        name, value = f"{prefix}{field.name}", getattr(record, field.name)
        if is_dataclass(value):
            yield from _walk(value, prefix)
        elif isinstance(value, tuple) and all(map(is_dataclass, value)):
            yield name, len(value)
            for index, item in enumerate(value):
                yield from _walk(item, f"{name}[{index}].")
        else:
            yield name, value


def _one_divides(mine: Any, other: Any) -> bool:
    small, large = sorted((mine, other))
    return bool(small >= 1 and large % small == 0)


def _shown(name: str, value: Any) -> str:
    """Returns a value as one short line of ASCII: it may come from any peer."""
    return ascii(value[:_DIGEST_CHARS] if name.endswith("_digest") else value)[:_SHOWN_CHARS]
