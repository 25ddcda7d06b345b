"""An error while a worker prepares for its next role names that."""

from __future__ import annotations

import pytest

from baton.core.errors import BatonError, InvariantError, RankLost, StartupError
from baton.runtime.worker_main import _changing_role


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (StartupError("draft d: no config.json"), StartupError, "draft d: no config.json"),
        (RankLost("lost the connection to rank 1"), RankLost, "lost the connection to rank 1"),
        (RuntimeError("out of memory"), InvariantError, "RuntimeError: out of memory"),
    ],
)
def test_an_error_names_the_worker_and_the_role(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught, _changing_role("prefill-1", "decode"):
        raise error
    assert isinstance(caught.value, BatonError | InvariantError)
    assert caught.value.message == f"prefill-1 could not become a decode worker: {message}"
