"""What is in the store where edges meet."""

from __future__ import annotations

from baton.transfer.rendezvous import EdgeStore


def num_keys(store: EdgeStore) -> int:
    """Keys that edges have put there and not deleted."""
    assert store._store is not None
    return len([key for key in store._store.list_keys() if key.startswith(store.nonce)])
