"""One request with several prompts: a generation for each, admitted as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Protocol

from coordinator.merged import merged
from coordinator.policy.quotas import Client
from coordinator.submission import Delta, Submission


class Generator(Protocol):
    """The methods of `Pipeline` that are called here."""

    def generate(self, submission: Submission) -> AsyncGenerator[Delta, None]: ...

    def admitted(self, client: Client, choices: int = 1) -> AbstractContextManager[None]: ...


async def generate_all(generator: Generator, submissions: Sequence[Submission]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of all prompts as they arrive. All have the same number of choices; those of the second prompt
    are numbered after those of the first. Raises as `Pipeline.generate` does; the first error ends all."""
    first = submissions[0]
    with generator.admitted(first.client, first.n * len(submissions)):
        parts = [_numbered(generator, number, each) for number, each in enumerate(submissions)]
        async with aclosing(merged(parts)) as deltas:
            async for delta in deltas:
                yield delta


async def _numbered(generator: Generator, number: int, submission: Submission) -> AsyncGenerator[Delta, None]:
    async with aclosing(generator.generate(replace(submission, admitted=True))) as deltas:
        async for delta in deltas:
            yield delta._replace(choice=number * submission.n + delta.choice)
