"""The files that a topology names, as volumes of the pods: its paths are the paths in the containers. Pure, except for
reading checksums.

A file of secrets is an item of one Secret, under its own name. Models, drafts and adapters are below one directory, at
which a claim is mounted; the pods verify them by checksums before the containers start.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from baton.core.errors import StartupError
from baton.runtime.model_source import SMOLLM2
from launch.plan import Plan

CHECKSUMS_DIR = "/etc/baton/checksums"
ALL, WITHOUT_WEIGHTS = "SHA256SUMS", "coordinator.SHA256SUMS"
"""Keys of the ConfigMap: every file, and those that the coordinator reads."""
_PACKAGED = ("builtin", SMOLLM2)
_SECRET_FILES = ("cluster_token_file", "api_key_file", "tls_cert_file", "tls_key_file")
_PART = re.compile(r"-\d{5}-of-")
"""In the name of a GGUF file: one of several parts of a model, which are read together."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_MAX_BYTES = 1 << 20
"""Of a ConfigMap."""
_READABLE_BY_GROUP = 0o440
_SECRET_PATH = re.compile(r"(/(?!\.+/)[^/:\x00-\x1f\x7f]+)+/(?!\.\.|\.\Z)[-._A-Za-z0-9]{1,253}")
"""A directory that can be the mount of a volume, and a key of a Secret."""


def secret_paths(options: Mapping[str, Any], member: str) -> list[str]:
    """Returns the paths of the secret files that a member's options name. `member` is its role for TLS.

    Raises:
        StartupError: a path is not absolute, or its file cannot be a key of a Secret.
    """
    paths = [str(options[name]) for name in _SECRET_FILES if options.get(name)]
    if directory := options.get("cluster_tls_dir"):
        folder = str(directory).rstrip("/")
        paths += [f"{folder}/{name}.pem" for name in ("ca", member, f"{member}-key")]
    for path in paths:
        _check_absolute(path, member)
        if not _SECRET_PATH.fullmatch(path):
            valid = "a file below a directory, named with letters, digits and -._ only: that is its key in the Secret"
            raise StartupError(f"{member}: {path!r} must be the path of {valid}")
    return paths


def secret_volumes(secret: str, paths: Iterable[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns for each directory of the paths a volume with those files and its mount.

    Raises:
        StartupError: two of the paths would be the same key of the Secret.
    """
    keys: dict[str, str] = {}
    folders: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        folder, _, key = path.rpartition("/")
        if keys.setdefault(key, path) != path:
            raise StartupError(f"{keys[key]} and {path} would both be the key {key} of the Secret; rename one of them")
        folders.setdefault(folder, []).append(key)
    made = []
    for number, (folder, names) in enumerate(folders.items()):
        items = [{"key": name, "path": name} for name in names]
        volume = {"secretName": secret, "defaultMode": _READABLE_BY_GROUP, "items": items}
        name = f"secret-{number}"
        made.append(({"name": name, "secret": volume}, {"name": name, "mountPath": folder, "readOnly": True}))
    return made


def model_paths(plan: Plan) -> dict[str, bool]:
    """Returns the paths of the model, drafts and adapters, and whether each is the model.

    Raises:
        StartupError: one is neither part of the image nor an absolute path.
    """
    paths = {} if plan.model in _PACKAGED else {plan.model: True}
    for worker in plan.topology.workers:
        if worker.config.draft not in ("auto", "none", "ngram", *_PACKAGED):
            paths.setdefault(worker.config.draft, False)
    for adapter in plan.topology.coordinator.config.lora.split():
        paths.setdefault(adapter.partition("=")[2], False)
    for path in paths:
        _check_absolute(path, "model, draft or adapter")
    return paths


def mount_directory(paths: Iterable[str]) -> str:
    """Returns the directory at which the claim of models is mounted: the deepest one above all of them.

    Raises:
        StartupError: that is the root directory.
    """
    directory = os.path.commonpath([str(PurePosixPath(path).parent) for path in paths])
    if directory == "/":
        raise StartupError(f"{', '.join(paths)}: models, drafts and adapters must be below one directory, not /")
    return directory


def compute_checksums(paths: Iterable[str], directory: str) -> dict[str, str]:
    """Returns the SHA-256 of every file of the models, by its path relative to `directory`.

    Raises:
        StartupError: a model is not on this host, or cannot be read.
    """
    sums = {}
    for path in paths:
        root = Path(path)
        folder, pattern = (root, "**/*") if root.is_dir() else (root.parent, _PART.sub("-?????-of-", escape(root.name)))
        files = sorted(file for file in folder.glob(pattern) if file.is_file())
        if not files:
            raise StartupError(f"{path} is not on this host: give --checksums, or emit where the models are")
        for file in files:
            try:
                with file.open("rb") as opened:
                    sums[str(file.relative_to(directory))] = hashlib.file_digest(opened, "sha256").hexdigest()
            except OSError as error:
                raise StartupError(f"{file}: {error.strerror or error}") from None
    return sums


def parse_checksums(text: str) -> dict[str, str]:
    """Returns the sums by path in the output of sha256sum.

    Raises:
        StartupError: a line is no such output, or its path is not below the directory.
    """
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        path = PurePosixPath(match[2]) if match else PurePosixPath("/")
        if match is None or path.is_absolute() or ".." in path.parts:
            raise StartupError(f"--checksums: line {number} is not a sum of sha256sum with a relative path: {line:.80}")
        sums[str(path)] = match[1]
    return sums


def checksum_files(sums: Mapping[str, str], paths: Mapping[str, bool], directory: str) -> dict[str, str]:
    """Returns the content of the ConfigMap.

    Raises:
        StartupError: a model has no sums, or not those of its weights; or they are too many for a ConfigMap.
    """
    if odd := [name for name in sums if "\\" in name or "\n" in name]:
        raise StartupError(f"--checksums: {odd[0]!r}: a backslash or a new line in the name of a file")
    weights = set()
    for path, is_model in paths.items():
        relative = str(PurePosixPath(path).relative_to(directory))
        inside = [name for name in sums if name == relative or name.startswith(f"{relative}/")]
        tensors = {name for name in inside if name.endswith((".safetensors", ".gguf"))}
        if not tensors:
            raise StartupError(f"--checksums: no weights of {path}; a line for them begins with a sum, then {relative}")
        if is_model:
            weights |= {name for name in tensors if name.endswith(".safetensors")}
    lines = {name: f"{digest}  {name}\n" for name, digest in sorted(sums.items())}
    files = {ALL: "".join(lines.values()), WITHOUT_WEIGHTS: "".join(v for k, v in lines.items() if k not in weights)}
    if sum(map(len, files.values())) > _MAX_BYTES:
        raise StartupError(f"--checksums: {len(sums)} files are too many for a ConfigMap of 1 MiB")
    return files


def _check_absolute(path: str, member: str) -> None:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise StartupError(f"{member}: {path!r} must be an absolute path: that of the file in the pods")
