"""The base of every public request body: nothing is coerced, nothing unknown is taken."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PrivateAttr


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    _ignored: frozenset[str] = PrivateAttr(frozenset())

    @property
    def ignored(self) -> frozenset[str]:
        """Names of fields that were given and change nothing; those of messages begin with `messages.`."""
        return self._ignored
