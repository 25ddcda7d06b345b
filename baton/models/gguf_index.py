"""Where the tensors of a model in GGUF are: an index with the names and shapes of a Hugging Face checkpoint.

The index is written beside the config and tokenizer that are derived from the same file (baton.gguf), and read by the
engine (baton.engine.gguf_files).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

INDEX = "gguf.json"


@dataclass(frozen=True, slots=True)
class StoredInGGUF:
    """One tensor. `kind` is GGML's name of its type, `shape` [rows, columns] or [columns], `offset` where its bytes
    begin in file number `file`. With `rope_heads` its rows are those of that many heads, each with the two halves that
    the rotary embedding pairs interleaved, as llama.cpp stores them: row 2i belongs to row i, row 2i + 1 to i + d/2."""

    file: int
    kind: str
    shape: tuple[int, ...]
    offset: int
    rope_heads: int = 0


@dataclass(frozen=True, slots=True)
class GGUFIndex:
    """The absolute paths of the files of a model, in order, and its tensors by their Hugging Face names."""

    files: tuple[str, ...]
    tensors: Mapping[str, StoredInGGUF]

    def as_json(self) -> str:
        return json.dumps({"files": self.files, "tensors": {name: asdict(t) for name, t in self.tensors.items()}})

    @classmethod
    def parse(cls, text: str | bytes) -> GGUFIndex:
        """Parses what `as_json` returned."""
        known = json.loads(text)
        tensors = {
            name: StoredInGGUF(**given | {"shape": tuple(given["shape"])}) for name, given in known["tensors"].items()
        }
        return cls(tuple(known["files"]), tensors)
