"""No message exceeds the limit of its channel."""

from __future__ import annotations

import pytest

from baton.core.events import StepEvents, TokenEvent
from baton.core.request import SequenceId, TokenLogprob
from baton.runtime import codec
from baton.runtime.streams import MAX_MESSAGE_BYTES
from coordinator.translate import MAX_PROMPT_SCORES


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_most_log_probabilities_of_a_prompt_fit_into_a_message(top: int) -> None:
    longest = min(MAX_PROMPT_SCORES // (top + 1), 131_072)
    entry = TokenLogprob(151_935, -12.345678, 100_000, (151_934,) * top, (-1.2345678,) * top)
    event = StepEvents(tokens=(TokenEvent(SequenceId("r" * 128), 0, (1,), (entry,), (entry,) * longest),))
    assert codec.to_message(event).ByteSize() < 0.9 * MAX_MESSAGE_BYTES
