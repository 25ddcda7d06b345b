"""What must be equal between the members of a cluster: one record, one comparison, one message.

The coordinator compares it when a worker joins, both workers of a link when it is dialled, the ranks of a worker before
they load, and `baton up` before it starts anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from baton.core.kv_layout import KVLayout

PROTOCOL_VERSION = 20
"""Must be raised when anything on the wire changes: proto/, or what edges send (tests/runtime/test_wire_version.py)."""
SERVED_VERSIONS = range(PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 2)
"""Protocol versions of workers that a coordinator serves. Links need equal ones."""

_SHOWN_CHARS = 80
_DIGEST_CHARS = 12

_HINTS = {
    "device": "auto depends on the machine: set --device",
    "dtype": "auto depends on the machine: set --dtype",
    "kv_dtype": "it follows from --kv-dtype, and with auto from --dtype",
    "kernels": "auto depends on the machine: set --kernels",
    "int8_activations": "auto depends on the machine: set --activations",
    "edge_kind": "auto depends on the device: set --edge-kind",
    "model_digest": "config.json is equal, the weights are not",
    "block_size": "one must be a multiple of the other, and equal at all ranks of a worker",
    "max_num_tokens": "it follows from --step-tokens and --max-running",
    "decode_lengths": "it follows from --draft and --draft-tokens",
}
"""What to know about a field that differs."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What must be equal at two workers that share a link, except the version of their code. Of two block sizes, one
    must be a multiple of the other.

    A field comes before those that it explains.
    """

    protocol_version: int
    code_version: str
    exact: bool
    dtype: str
    kv_dtype: str
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
    # Of tokenizer.json; empty if there is none.
    tokenizer_digest: str = ""


class Difference(NamedTuple):
    """The first field that differs, and both values as they are shown."""

    field: str
    ours: str
    theirs: str

    def between(self, here: str, there: str) -> str:
        """Returns the message; it begins with the field's name and a colon. `here` has our value, `there` theirs."""
        hint = _HINTS.get(self.field)
        return f"{self.field}: {self.ours} at {here} and {self.theirs} at {there}" + (f"; {hint}" if hint else "")


def difference(ours: object, theirs: object, *, one_worker: bool = False) -> Difference | None:
    """Returns the first field in which two records differ that prevents the two from working together, or None.

    A record is a dataclass, or what `values_by_name` returned for one. `one_worker`: they are of ranks of one worker,
    which must also have one version of the code, and one block size.
    """
    a, b = values_by_name(ours), values_by_name(theirs)
    for name in dict.fromkeys((*a, *b)):
        mine, other = a.get(name), b.get(name)
        if mine == other or (not one_worker and _may_differ(name, mine, other)):
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


def _may_differ(name: str, mine: Any, other: Any) -> bool:
    """Returns whether two workers may have these values."""
    if name == "block_size":
        return _one_divides(mine, other)
    no_tokenizer = name == "tokenizer_digest" and not (mine and other)
    return name == "code_version" or no_tokenizer


def _one_divides(mine: Any, other: Any) -> bool:
    small, large = sorted((mine, other))
    return bool(small >= 1 and large % small == 0)


def _shown(name: str, value: Any) -> str:
    """Returns a value as one short line of ASCII: it may come from any peer."""
    return ascii(value[:_DIGEST_CHARS] if name.endswith("_digest") else value)[:_SHOWN_CHARS]
