"""How much of the storage limit one of several tenants may use. Pure."""

from __future__ import annotations


def room(limit: int, own: int, of_others: int) -> int:
    """Returns how many more bytes a tenant may store; `own` and `of_others` are the bytes that it and all others hold.

    It may hold half of what the others leave. So there is room for another one, however many have filled their shares.
    """
    return max(0, limit - of_others) // 2 - own
