"""A model in GGUF as a checkpoint directory: derived once, kept in the user's cache.

The directory has what the other parts of Baton read of a checkpoint (`config.json`, `tokenizer.json`,
`tokenizer_config.json`, `chat_template.jinja`) and, in place of weights, an index of the tensors in the GGUF files
(baton.models.gguf_index). Its name contains the path, size and time of every file, so a changed file gets another one.
It is written under a temporary name and renamed: no process sees part of it. Reading a file's metadata takes a second,
which is why its result is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from baton.core.errors import StartupError
from baton.engine.kernels.build import CannotBuild, cache_dir
from baton.gguf.config import ROPE_FACTORS, config_json, rope_heads, tensor_name
from baton.gguf.tokenizer import tokenizer_config, tokenizer_json
from baton.models.gguf_index import INDEX, GGUFIndex, StoredInGGUF

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""The tensor types that are read."""
VERSION = 2
"""Of what is derived; another number derives it again."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file that `path` is, or, for a directory with one model in GGUF and no `config.json`, holds.

    Raises:
        StartupError: the directory holds several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    models = {
        match.group(1, 3) if (match := _PART.fullmatch(file.name)) else file.name: file for file in reversed(files)
    }
    if len(models) > 1:
        raise StartupError(f"{path} holds {len(models)} models in GGUF: name one of its files")
    return next(iter(models.values()), None)


def checkpoint_directory(file: Path) -> Path:
    """Returns the checkpoint directory derived from a GGUF file, or from all files of a split model.

    Raises:
        StartupError: a file is missing or damaged, or needs what Baton does not compute; one line that names it.
    """
    files = _all_parts(file.resolve())
    try:
        stats = [part.stat() for part in files]
        base = cache_dir() / "gguf"
    except OSError as error:
        raise StartupError(f"{file}: {error.strerror}") from None
    except CannotBuild as error:
        raise StartupError(f"a model in GGUF needs a cache directory: {error}") from None
    known = [(str(part), status.st_size, status.st_mtime_ns) for part, status in zip(files, stats, strict=True)]
    digest = hashlib.sha256(json.dumps([VERSION, known]).encode()).hexdigest()[:16]
    target = base / f"{file.stem[:40]}-{digest}"  # a character has up to 4 of the 255 bytes of a name
    if not (target / INDEX).is_file():
        derived = _derive(files)
        try:
            _write(derived, target)
        except OSError as error:
            message = f"cannot write the cache {base}: {error.strerror}"
            raise StartupError(f"{file.name}: {message}; set BATON_CACHE_DIR to use another") from None
    return target


def _write(texts: dict[str, str], target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as made:
        for name, text in texts.items():
            (Path(made) / name).write_text(text, encoding="utf-8")
        try:
            os.rename(made, target)
        except OSError:  # another process was first
            if not (target / INDEX).is_file():
                raise
        else:
            os.mkdir(made)  # for TemporaryDirectory to remove


def _all_parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [file]
    base, _, count = match.groups()
    parts = [file.with_name(f"{base}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise StartupError(f"{file.name} is one of {int(count)} files, and {part.name} is missing")
    return parts


def _derive(files: list[Path]) -> dict[str, str]:
    """Returns the texts of the directory's files by name."""
    readers = [_open(file) for file in files]
    known = [_metadata(file, reader) for file, reader in zip(files, readers, strict=True)]
    _check_parts(files, known)
    metadata = known[0]
    try:
        stored = [(number, tensor) for number, reader in enumerate(readers) for tensor in reader.tensors]
        factors = next((tensor.data.tolist() for _, tensor in stored if tensor.name == ROPE_FACTORS), ())
        config = config_json(metadata, [tensor.name for _, tensor in stored], factors)
        tokenizer, names = tokenizer_json(metadata), tokenizer_config(metadata)
        index = GGUFIndex(tuple(map(str, files)), _tensors(stored, config))
    except StartupError as error:
        raise StartupError(f"{files[0].name}: {error.message}") from None
    except Exception as error:  # values of kinds that no writer makes
        reason = f"{type(error).__name__}: {error}"
        raise StartupError(f"{files[0].name}: damaged metadata: {' '.join(reason.split())[:200]}") from None
    texts = {
        "config.json": json.dumps(config, indent=1),
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(names),
        INDEX: index.as_json(),
    }
    template = metadata.get("tokenizer.chat_template")
    return texts | ({"chat_template.jinja": template} if isinstance(template, str) else {})


def _open(file: Path) -> Any:
    import numpy as np  # imported here: only the first start with a file needs them
    from gguf import GGUFReader

    class Bounded(GGUFReader):  # type: ignore[misc]
        """The package reads beyond the end as empty arrays, so a damaged count of 2**50 would fill the memory. And it
        takes each of a tokenizer's strings out of a `memmap`, where a slice costs ten times one of a plain array."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise EOFError("the file ends before the data that its header announces")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Bounded(file)
    except Exception as error:  # of numpy, by what is damaged
        raise StartupError(f"{file.name}: not a GGUF file, or damaged: {' '.join(str(error).split())[:200]}") from None
    if reader.byte_order == "S":
        raise StartupError(f"{file.name}: a GGUF file in the byte order of other machines is not supported")
    return reader


def _metadata(file: Path, reader: Any) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise StartupError(f"{file.name}: damaged metadata: {' '.join(str(error).split())[:200]}") from None


def _check_parts(files: list[Path], known: list[dict[str, Any]]) -> None:
    """Raises StartupError for a part that another name has made a whole model, or another part."""
    for number, (file, metadata) in enumerate(zip(files, known, strict=True)):
        count, own = metadata.get("split.count", 0), metadata.get("split.no", number)
        if isinstance(own, int) and isinstance(count, int) and count and (own, count) != (number, len(files)):
            named = f"part {number + 1} of {len(files)}" if len(files) > 1 else "a whole model"
            raise StartupError(
                f"{file.name}: by its metadata it is part {own + 1} of {count} of a split model, by its name {named}"
            )


def _tensors(stored: list[tuple[int, Any]], config: dict[str, Any]) -> dict[str, StoredInGGUF]:
    tensors: dict[str, StoredInGGUF] = {}
    for number, tensor in stored:
        if tensor.name == ROPE_FACTORS:
            continue
        name, kind = tensor_name(tensor.name), tensor.tensor_type.name
        if name is None or name in tensors:
            raise StartupError(
                f"tensor {tensor.name} {'is not part of this model' if name is None else 'is there twice'}"
            )
        if kind not in KINDS:
            raise StartupError(
                f"tensor {tensor.name} has type {kind}, which is not supported (only {', '.join(KINDS)})"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[name] = StoredInGGUF(number, kind, shape, int(tensor.data_offset), rope_heads(name, config))
    return tensors
