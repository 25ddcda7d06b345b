"""The run directory: logs of the members, and the addresses of a cluster while it runs. It belongs to one `baton up`.

That process holds a lock on a file in the directory; the kernel releases the lock however the process ends. The file
stays: without the lock it means nothing, and removing it could remove the file that another process has just locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import StartupError
from baton.runtime.paths import expanded

LOCK = "up.lock"
CLUSTER = "cluster.json"
TOKEN = "cluster.token"
KEYS = "api.keys"
ROLL = "roll.json"
ROLL_REQUEST = "roll-request.json"
READY = "coordinator.json"
BATCHES_READY = "batches.json"
DATA = "data"

ROOM_BYTES = 256 * 1024
"""The space that it needs at a start: for addresses, and the first lines of every log."""


@contextlib.contextmanager
def run_directory(requested: str) -> Iterator[Path]:
    """Yields the directory of this run's logs, locked until the block ends: `requested`, else a new one in the cache
    directory, else a temporary one. Removes the addresses of an earlier run at the start, and its own at the end.

    Raises:
        StartupError: the directory cannot be created or written to, has no space, or is locked by another process;
            names it.
    """
    path = Path(os.path.realpath(expanded(requested))) if requested else _fresh()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, lock)
            _hold(lock, requested)
            _remove_addresses(path)  # of a run that was killed: not valid for this run
            with tempfile.TemporaryFile(dir=path) as file:  # a full disk still accepts empty files
                file.write(bytes(ROOM_BYTES))
        except OSError as error:
            reason = f"run directory {requested or path} cannot be used: {_reason(error)}"
            raise StartupError(f"{reason}; choose another with --run-dir") from None
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                _remove_addresses(path)


def write_token(path: Path) -> Path:
    """Writes a fresh cluster token into a run directory, readable only by its owner. Raises StartupError."""
    return _write_secret(path, TOKEN, secrets.token_hex(32) + "\n")


def write_keys(path: Path, keys: Iterable[str]) -> Path:
    """Writes API keys into a run directory, one per line, readable only by its owner. Raises StartupError."""
    return _write_secret(path, KEYS, "".join(f"{key}\n" for key in keys))


def _write_secret(path: Path, name: str, text: str) -> Path:
    secret = path / name
    with _writing(path):
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    return secret


def write_addresses(path: Path, addresses: Mapping[str, object]) -> None:
    """Writes the addresses of a ready cluster into a run directory, atomically. Raises StartupError."""
    partial = path / f"{CLUSTER}.partial"
    with _writing(path):
        partial.write_text(json.dumps(addresses) + "\n")
        partial.replace(path / CLUSTER)


def local_token(url: str) -> str:
    """Returns the token file of the cluster at `url` if this user's `baton up` runs it in a directory of the default
    location; else an empty string."""
    path = directory_of(url)
    return str(path / TOKEN) if path is not None and (path / TOKEN).exists() else ""


def directory_of(url: str) -> Path | None:
    """Returns the run directory of the cluster at `url`, if this user's `baton up` runs it in one of the default
    location."""
    with contextlib.suppress(RuntimeError):
        for addresses_file in _runs().glob(f"*/{CLUSTER}"):
            known = reading(addresses_file)
            urls = {str(known[name]).rpartition("//")[2] for name in ("url", "admin") if known.get(name)}
            if url.rpartition("//")[2].rstrip("/") in urls and is_held(addresses_file.parent):  # else it was killed
                return addresses_file.parent
    return None


def reading(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(file.read_text())
        return document if isinstance(document, dict) else {}
    return {}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(f"run directory {path} cannot be written: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """Returns `No space left on device`, and the file that caused the error, if any."""
    reason = error.strerror or str(error)
    return f"{reason}: {error.filename}" if error.filename else reason


def _hold(lock: int, requested: str) -> None:
    """Locks the directory. Raises StartupError when another process holds the lock; names its pid."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 32).decode(errors="replace").strip()
        holder = f"pid {pid}" if pid else "another process"
        raise StartupError(f"run directory {requested} is in use by {holder}; choose another with --run-dir") from None
    except OSError:
        return  # a file system without locks: no process is refused
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())


def is_held(path: Path) -> bool:
    """Returns whether a process holds the lock of a run directory; true on a file system without locks."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _remove_addresses(path: Path) -> None:
    # The request last: whoever waits for a roll reads its progress once that is removed.
    for name in (CLUSTER, READY, BATCHES_READY, TOKEN, KEYS, ROLL, ROLL_REQUEST):
        (path / name).unlink(missing_ok=True)


def _runs() -> Path:
    """Returns the default location. Raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "runs"


def _fresh() -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        path = _runs() / name
        path.mkdir(parents=True, mode=0o700)
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        first = _reason(error) if isinstance(error, OSError) else str(error)
    try:
        return Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))
    except OSError as error:
        where = f"in the cache directory ({first}) or the temporary directory ({_reason(error)})"
        raise StartupError(f"a run directory cannot be created {where}; set --run-dir") from None
