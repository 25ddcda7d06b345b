"""A dispatcher whose choices a test moves through their stages by name, as `coordinator.policy.requests` does."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from baton.core.request import GenerateRequest
from coordinator.policy.choice import Choice, Stage
from coordinator.policy.dispatch import Dispatcher
from coordinator.policy.pool import Prefix, Worker
from coordinator.policy.quotas import ANONYMOUS, Client
from coordinator.policy.workers import WorkerTable


class Placement(NamedTuple):
    name: str
    prefill: str
    decode: str | None = None
    spare: str | None = None


def make_choice(
    name: str,
    prefill_tokens: int,
    kv_tokens: int,
    *,
    prefix: Prefix | None = None,
    age: int = 0,
    priority: int = 0,
    adapter: str = "",
    client: Client = ANONYMOUS,
) -> Choice:
    """A choice with a prompt of `prefill_tokens` tokens, whose KV grows to `kv_tokens` tokens. If these are equal, it
    needs no decode worker."""
    max_tokens = kv_tokens - prefill_tokens + 1
    request = GenerateRequest(name, (1,) * prefill_tokens, max_tokens, priority=priority, adapter=adapter)
    choice = Choice(replace(request, tenant=client.tenant), age, 0.0, 600.0, client)
    choice.prefix = prefix or {}
    return choice


class Placing:
    def __init__(self, table: WorkerTable, max_requests: int = 1 << 20, max_tokens: int = 1 << 30) -> None:
        self.table = table
        self.dispatcher = Dispatcher(table, max_requests, max_tokens)
        self.choices: dict[str, Choice] = {}

    def submit(self, choice: Choice, choices: int = 1) -> None:
        self.dispatcher.submit(choice, choices)
        self.choices[choice.name.request_id] = choice

    def submit_later(self, choice: Choice, first: str) -> None:
        self.dispatcher.submit_later(choice, self.choices[first].name)
        self.choices[choice.name.request_id] = choice

    def place(self) -> list[Placement]:
        placements = []
        for choice in self.dispatcher.place():
            self._move(choice, Stage.PREFILL)
            targets = [target.worker_id for target in choice.targets]
            assert choice.on_decode or targets[:1] == [choice.decode_worker] * choice.needs_decode
            placements.append(Placement(choice.name.request_id, choice.prefill_worker, *targets))
        return placements

    def names(self) -> list[str]:
        """Places what can start, and returns the names."""
        return [placement.name for placement in self.place()]

    def prefilled(self, name: str) -> None:
        choice = self.choices[name]
        if choice.stage is Stage.PREFILL:
            self._move(choice, Stage.HANDOVER)

    def handed_over(self, name: str, to: str = "") -> None:
        """All KV is at the preferred decode worker, or at `to`."""
        choice = self.choices[name]
        if to and to != choice.decode_worker:
            self.dispatcher.set_decode(choice, self.table.get(to))
        self._move(choice, Stage.DECODE)

    def produced(self, name: str, tokens: int) -> None:
        """`tokens` tokens are known now."""
        choice = self.choices[name]
        choice.tokens += [7] * (tokens - choice.produced)
        if choice.next_index > choice.grows_at:
            self.dispatcher.hold(choice)

    def reassign(self, name: str) -> Placement | None:
        choice = self.choices[name]
        if not self.dispatcher.reassign(choice):
            return None
        return Placement(name, choice.prefill_worker, *(target.worker_id for target in choice.targets))

    def reschedule(self, name: str) -> None:
        choice = self.choices[name]
        self.dispatcher.release(choice)
        choice.resume(choice.attempt + 1, 0.0)
        choice.stage = Stage.QUEUED
        self.dispatcher.enqueue(choice)

    def finish(self, name: str) -> None:
        self.dispatcher.finish(self.choices.pop(name))

    def worker(self, name: str) -> Worker:
        worker = self.table.get(name)
        assert worker is not None
        return worker

    def check(self) -> None:
        self.dispatcher.check(self.choices.values())

    def _move(self, choice: Choice, stage: Stage) -> None:
        choice.stage = stage
        self.dispatcher.hold(choice)
