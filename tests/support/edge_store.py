"""The contents of the store through which edges rendezvous."""

from __future__ import annotations

from baton.transfer.rendezvous import EdgeStore


def num_keys(store: EdgeStore) -> int:
    """Returns the number of keys that edges have set and not deleted."""
    assert store._store is not None
    return len([key for key in store._store.list_keys() if key.startswith(store.nonce)])
