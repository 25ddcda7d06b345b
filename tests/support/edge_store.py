"""What is in the store where edges meet."""

from __future__ import annotations

from baton.transfer.store import EdgeStore


def num_keys(store: EdgeStore) -> int:
    """Keys that edges have put there and not deleted."""
    return len([key for key in store._open().list_keys() if key.startswith(store.nonce)])
