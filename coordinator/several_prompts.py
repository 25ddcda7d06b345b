"""One request with several prompts: a generation for each, admitted as one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Protocol

from coordinator.merged import merged
from coordinator.policy.quotas import Client
from coordinator.submission import Delta, Submission

AT_ONCE = 128
"""Prompts of one request that are admitted at the same time: the queue has room for those of several."""


class Generator(Protocol):
    """The methods of `Pipeline` that are called here."""

    def generate(self, submission: Submission) -> AsyncGenerator[Delta, None]: ...

    def admitted(self, client: Client, choices: int = 1) -> AbstractContextManager[None]: ...


async def generate_all(generator: Generator, submissions: Sequence[Submission]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of all prompts as they arrive, up to AT_ONCE prompts at the same time. All have the same number
    of choices; those of the second prompt are numbered after those of the first. Raises as `Pipeline.generate` does;
    the first error ends all."""
    first, left, began = submissions[0], iter(enumerate(submissions)), time.monotonic()
    with generator.admitted(first.client, first.n * min(len(submissions), AT_ONCE)):
        parts = [_in_turn(generator, left, began) for _ in range(min(len(submissions), AT_ONCE))]
        async with aclosing(merged(parts)) as deltas:
            async for delta in deltas:
                yield delta


async def _in_turn(
    generator: Generator, left: Iterator[tuple[int, Submission]], began: float
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of one prompt after another, taken from those that are left."""
    for number, submission in left:
        deadline_s = submission.deadline_s - (time.monotonic() - began)
        part = replace(submission, admitted=True, deadline_s=deadline_s)
        async with aclosing(generator.generate(part)) as deltas:
            async for delta in deltas:
                yield delta._replace(choice=number * submission.n + delta.choice)
