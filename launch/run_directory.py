"""The run directory: logs of the members, and the addresses of a cluster while it runs. It belongs to one `baton up`.

Who has it holds a lock on a file in it for life; the kernel drops the lock however the process ends. The file stays:
without the lock it says nothing, and who removed it could remove the one that another process has just locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from baton.core.errors import StartupError

LOCK = "up.lock"
CLUSTER = "cluster.json"
TOKEN = "cluster.token"
READY = "coordinator.json"

ROOM_BYTES = 256 * 1024
"""What must fit into it at a start: addresses, and the first lines of every log."""


@contextlib.contextmanager
def run_directory(wanted: str) -> Iterator[Path]:
    """The directory of this run's logs, held until the block ends: as asked, else a fresh one in the cache directory,
    else a temporary one. The addresses of a run before are not in it, nor are this one's afterwards.

    Raises:
        StartupError: the directory asked for cannot be made, not be written to, has no room, or another process has
            it; the message names it.
    """
    path = Path(wanted).expanduser().resolve() if wanted else _fresh()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, lock)
            _hold(lock, wanted)
            _forget_addresses(path)  # of one that was killed: nobody shall take them for this one's
            with tempfile.TemporaryFile(dir=path) as file:  # on a full disk files can still be made, and stay empty
                file.write(bytes(ROOM_BYTES))
        except OSError as error:
            what = f"run directory {wanted or path} cannot be used: {_reason(error)}"
            raise StartupError(f"{what}; choose another with --run-dir") from None
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                _forget_addresses(path)


def write_token(path: Path) -> Path:
    """A fresh cluster token in a run directory, for its owner alone. Raises StartupError."""
    token = path / TOKEN
    with _writing(path):
        token.unlink(missing_ok=True)
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    return token


def write_addresses(path: Path, addresses: Mapping[str, object]) -> None:
    """Those of a cluster that is ready, into a run directory, whole or not at all. Raises StartupError."""
    partial = path / f"{CLUSTER}.partial"
    with _writing(path):
        partial.write_text(json.dumps(addresses) + "\n")
        partial.replace(path / CLUSTER)


def local_token(url: str) -> str:
    """The token file of the cluster at `url` if this user's `baton up` runs it in a directory of the default place;
    else empty."""
    with contextlib.suppress(RuntimeError):
        for found in _runs().glob(f"*/{CLUSTER}"):
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(found.read_text())
                urls = {str(known.get(name)).partition("//")[2] for name in ("url", "admin")}
                if url.rpartition("//")[2].rstrip("/") in urls and (found.parent / TOKEN).exists():
                    return str(found.parent / TOKEN)
    return ""


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(f"run directory {path} cannot be written: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """`No space left on device`, and which file it was about if it was about one."""
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what


def _hold(lock: int, wanted: str) -> None:
    """Raises StartupError when another process has it, with the pid that it left there."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 32).decode(errors="replace").strip()
        whom = f"pid {pid}" if pid else "another process"
        raise StartupError(f"run directory {wanted} is in use by {whom}; choose another with --run-dir") from None
    except OSError:
        return  # a file system without locks: there nobody is refused
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())


def _forget_addresses(path: Path) -> None:
    for name in (CLUSTER, READY, TOKEN):
        (path / name).unlink(missing_ok=True)


def _runs() -> Path:
    """Raises RuntimeError where there is no home."""
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
        where = f"neither in the cache directory ({first}) nor in one for temporary files ({_reason(error)})"
        raise StartupError(f"a run directory can be made {where}; set --run-dir") from None
