"""What determines a token that is drawn, for the sampler, the logits processors and the grammars."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import History


@dataclass(frozen=True, slots=True)
class Draw:
    """What determines one token besides its logits. `history` is the row's; `drafts` are the draft tokens between it
    and this draw, which count as output here. `sequence_id` only selects the table of seen tokens to reuse."""

    sampling: SamplingParams
    choice: int
    output_index: int
    history: History | None = None
    drafts: tuple[int, ...] = ()
    sequence_id: SequenceId | None = None
