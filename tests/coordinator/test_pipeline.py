"""One request as its client sees it: deltas, stop strings, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

import coordinator.reader
from baton.core.commands import Abort, Prefill
from baton.core.errors import DeadlineExceeded, InvalidRequest, QuotaExceeded, Unavailable
from baton.core.events import StepEvents, TokenEvent
from baton.core.request import SamplingParams, TokenLogprob
from coordinator.policy.quotas import Client, KeyLimits
from coordinator.structured_output import Constraint
from coordinator.submission import Delta, Submission
from coordinator.text.stream import TextStream, Vocabulary
from tests.support.builders import make_request
from tests.support.fake_workers import Reader, bench, run_to_end
from tests.support.nodes import until
from tests.support.tokenizers_kit import byte_fallback, byte_level


def ids(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


async def test_text_and_tokens_arrive_together_and_the_text_is_whole() -> None:
    async with bench("p0", "d0") as b:
        tokens = ids("Hello world, 中文")
        reader = b.submit(max_tokens=len(tokens))
        p, d = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, tokens[0])
        for index in range(1, len(tokens)):
            d.report(s, index, tokens[index])
        assert await reader.done() == tokens
        assert "".join(x.text for x in reader.deltas) == "Hello world, 中文"
        assert [x.finish_reason for x in reader.deltas[:-1]] == [None] * (len(reader.deltas) - 1)


async def test_stop_string_truncates_the_text_and_aborts_both_workers() -> None:
    async with bench("p0", "d0") as b:
        tokens = ids("Hello world")
        reader, budget = b.submit(max_tokens=50, stop=("lo wor",)), b.requests.losses.budget
        budget.tokens, (p, d) = 0.0, b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, tokens[0])
        p.hand_over(s, "d0")
        d.report(s, 0, *tokens, *ids("never seen"))
        read = await reader.done()
        last = reader.deltas[-1]
        assert "".join(x.text for x in reader.deltas) == "Hel"
        assert (last.finish_reason, last.stop_reason) == ("stop", "lo wor")
        assert last.usage is not None and last.usage.completion_tokens == len(read) <= len(tokens)
        for worker in (p, d):
            assert (await worker.received(Abort)).sequence == s
        assert budget.tokens > 0.0, "its answer is complete"


async def test_text_of_a_sentencepiece_model_follows_the_prompt_with_its_space() -> None:
    vocabulary = Vocabulary(byte_fallback())
    hello, world = vocabulary.tokens["▁Hello"], vocabulary.tokens["▁world"]
    async with bench("p0", "d0", vocabulary=vocabulary) as b:
        p, d = b.workers
        for number, (stop, text) in enumerate((((), " Hello world"), ((" world",), " Hello"))):
            reader = b.submit(str(number), prompt=(1, world), stop=stop)
            s = (await p.received(Prefill, number + 1)).request.sequence_id
            p.report(s, 0, hello)
            p.hand_over(s, "d0")
            d.report(s, 0, hello, world, hello, 2, ended="length")
            await reader.done()
            read = "".join(delta.text for delta in reader.deltas)
            assert read == text + ("" if stop else " Hello")


async def test_slow_reader_does_not_delay_workers_or_other_requests() -> None:
    """Only its own journal waits for it: its workers receive the end, and its reserved blocks are free for others."""
    async with bench("p0") as b:
        await b.add("d0", blocks=2)  # room for one request at a time
        p, d = b.workers
        slow = b.pipeline.generate(Submission("slow", (1, 2), 6))
        first = asyncio.ensure_future(slow.__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await first
        p.hand_over(s, "d0")
        d.report(s, 0, 5, 6, 7)
        d.report(s, 3, 8, 9, 10, ended="length")
        other = b.submit("other")
        s2 = (await p.received(Prefill, 2)).request.sequence_id
        p.report(s2, 0, 5)
        p.hand_over(s2, "d0")
        d.report(s2, 0, 5, 6, 7, 8, ended="length")
        assert len(await other.done()) == 4
        assert b.num_active == 0 and len(b.requests) == 1
        await until(lambda: len(d.session.output_log) == len(p.session.output_log) == 0)
        deltas = [delta async for delta in slow]
        assert [t for x in deltas for t in x.token_ids] == [6, 7, 8, 9, 10]
        assert deltas[-1].finish_reason == "length"


async def test_failure_frees_both_pools_even_if_the_client_does_not_read() -> None:
    async with bench("p0", "d0", "d1", hold_s=0.2, lease_s=0.5) as b:
        p, d, d1 = b.workers
        slow = b.pipeline.generate(Submission("slow", (1, 2), 6))
        first = asyncio.ensure_future(slow.__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        await first
        for worker in (d, d1):
            worker.wire.refuses = True
            worker.cut()
        assert (await p.received(Abort)).sequence == s
        await until(lambda: b.num_active == b.dispatcher.num_queued == 0, what="nothing held")
        with pytest.raises(Unavailable, match=r"no decode worker is left; no other joined within .* s \(--hold-s\)"):
            await slow.__anext__()


async def test_quota_charges_used_tokens_and_is_released_however_a_request_ends() -> None:
    who = Client("k", "t", limits=KeyLimits(requests_at_once=1, tokens_per_minute=600))
    async with bench("p0", "d0") as b:
        p, d = b.workers

        async def ask(name: str) -> list[Delta]:
            return [delta async for delta in b.pipeline.generate(Submission(name, (1, 2, 3), 4).of(who))]

        leaves = asyncio.create_task(ask("leaves"))
        await p.received(Prefill)
        with pytest.raises(QuotaExceeded, match="1 concurrent requests"):
            await ask("too-many")
        leaves.cancel()
        await asyncio.wait([leaves])
        reads = asyncio.create_task(ask("reads"))
        s = (await p.received(Prefill, 2)).request.sequence_id
        run_to_end(p, d, s)
        await reads
        account = b.pipeline._quotas._accounts["k"]
        assert account.running == 0 and account.tokens is not None
        assert account.tokens.level == pytest.approx(600 - 3 - 4, abs=1.0)


async def test_a_request_without_room_is_refused_and_counted_before_it_is_read() -> None:
    limited, other = Client("k", "t", limits=KeyLimits(requests_at_once=1)), Client("free", "t")
    async with bench(max_requests=2) as b:
        waits = b.submit("waits", client=limited)
        await until(lambda: b.dispatcher.num_queued == 1, what="a queued request")
        b.pipeline.check_room(other)
        with pytest.raises(QuotaExceeded, match="1 concurrent requests"):
            b.pipeline.check_room(limited)
        more = b.submit("more", client=other)
        await until(lambda: b.dispatcher.num_queued == 2, what="a full queue")
        with pytest.raises(Unavailable, match="2 choices with 6 prompt tokens are already waiting"):
            b.pipeline.check_room(other)
        assert b.pipeline.workers()["tenants"] == {"other": {"running": 0, "queued": 2}}
        await waits.leave()
        await more.leave()
        b.requests.draining = True
        with pytest.raises(Unavailable, match="draining"):
            b.pipeline.check_room(other)
        metrics = (await b.pipeline.metrics()).decode()
        for code in ("rate_limit_exceeded", "overloaded", "draining"):
            assert f'baton_requests_failed_total{{code="{code}"}} 1.0' in metrics
        assert 'baton_tenant_requests_refused_total{tenant="other"} 3.0' in metrics


async def test_prompts_admitted_as_one_request_are_charged_for_their_tokens_alone() -> None:
    who = Client("k", "t", limits=KeyLimits(requests_at_once=1, requests_per_minute=3, tokens_per_minute=20))
    async with bench("p0", "d0") as b:
        p, d = b.workers
        began = time.monotonic()
        with b.pipeline.admitted(who, choices=2):
            for number in range(2):
                submission = Submission(f"r-{number}", (1, 2, 3), 4, admitted=True).of(who)
                deltas = b.pipeline.generate(submission)
                first = asyncio.ensure_future(anext(deltas))
                run_to_end(p, d, (await p.received(Prefill, number + 1)).request.sequence_id)
                await first
                assert [delta async for delta in deltas]
            account = b.pipeline._quotas._accounts["k"]
            assert account.running == 2
        assert account.running == 0 and account.requests is not None and account.tokens is not None
        minutes = (time.monotonic() - began) / 60
        assert 2 <= account.requests.level <= 2 + 3 * minutes
        assert 20 - 2 * (3 + 4) <= account.tokens.level <= 20 - 2 * (3 + 4) + 20 * minutes
        with pytest.raises(QuotaExceeded), b.pipeline.admitted(who), b.pipeline.admitted(who):
            raise AssertionError("the second one is refused")
        assert account.running == 0


async def test_a_request_with_four_choices_counts_as_one_request() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        deltas = b.pipeline.generate(Submission("r", (1, 2, 3), 4, n=4))
        read = asyncio.create_task(anext(deltas))
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.report(s, 1, 6)
        for number in range(2, 5):
            await p.received(Prefill, number)
        counts = b.pipeline.workers()["coordinator"]
        assert (counts["requests"], counts["queued"], counts["choices"], counts["queued_choices"]) == (1, 0, 4, 0)
        await read
        await deltas.aclose()


async def test_deadline_is_enforced_even_if_the_client_does_not_read() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        slow = b.pipeline.generate(Submission("slow", (1, 2), 6, deadline_s=0.3))
        first = asyncio.ensure_future(slow.__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await first
        assert (await d.received(Abort)).sequence == s
        d.report(s, 0, 5, 6)
        with contextlib.suppress(DeadlineExceeded):
            await slow.__anext__()
            raise AssertionError("a passed deadline is an error")


@pytest.mark.parametrize("first", ["the choice's timer", "the policy's tick"])
async def test_missing_prompt_logprobs_are_awaited_until_the_deadline(first: str) -> None:
    """All tokens have arrived, so no worker can fail the request: only its deadline ends it, wherever that is seen."""
    async with bench("p0", "d0") as b:
        p, d = b.workers
        deadline_s = 60.0 if first == "the policy's tick" else 0.3
        asked = Submission("r", (1, 2), 2, SamplingParams(prompt_logprobs=1), deadline_s=deadline_s)
        delta = asyncio.ensure_future(b.pipeline.generate(asked).__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        d.report(s, 0, 5, 6, ended="length")
        if first == "the policy's tick":
            await until(lambda: b.in_flight(s).finish)
            assert not delta.done()
            b.cluster._execute(b.requests.tick(time.monotonic() + deadline_s))
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded):
                await delta
        assert len(b.requests) == 0


async def test_request_id_stays_in_use_until_the_client_has_read_the_end() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        slow = b.pipeline.generate(Submission("slow", (1, 2), 2))
        first = asyncio.ensure_future(slow.__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await first
        d.report(s, 0, 5, 6, ended="length")
        await until(lambda: b.num_active == 0)
        assert (await b.submit("slow").failed()).code == "duplicate_request"
        assert [t for x in [delta async for delta in slow] for t in x.token_ids] == [6]


async def test_closing_the_generator_aborts_the_request() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        deltas = b.pipeline.generate(Submission("r", (1, 2), 6))
        first = asyncio.ensure_future(deltas.__anext__())
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await first
        await deltas.aclose()
        assert len(b.requests) == 0
        assert (await d.received(Abort)).reason == (await p.received(Abort)).reason == "the client disconnected"


@pytest.mark.parametrize("reporter", ["prefill", "decode"])
async def test_usage_reports_cached_prompt_tokens(reporter: str) -> None:
    """Either worker may report it before the end."""
    async with bench("p0", "d0") as b:
        p, d = b.workers
        for name, cached in (("a", 2), ("b", 5), ("c", 0)):  # 5 includes output of an earlier attempt
            reader = b.submit(name, max_tokens=2)
            await until(lambda name=name: any(c.request.request_id == name for c in p.all(Prefill)))
            s = p.all(Prefill)[-1].request.sequence_id
            d.here.add(s)
            step_events = StepEvents(tokens=(TokenEvent(s, 0, (7,), cached_tokens=cached),))
            (p if reporter == "prefill" else d).session.post(step_events)
            await until(lambda reader=reader: reader.deltas)
            d.report(s, 0, 7, 8, ended="length")
            p.hand_over(s, "d0")
            await reader.done()
            usage = reader.deltas[-1].usage
            assert usage is not None and (usage.prompt_tokens, usage.cached_tokens) == (3, min(cached, 3))


async def test_stop_token_truncates_the_text_and_is_the_stop_reason() -> None:
    async with bench("p0", "d0") as b:
        tokens = ids("Hello world")
        reader = b.submit(max_tokens=50, sampling=SamplingParams(stop_token_ids=(tokens[-1],)))
        p, d = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, tokens[0])
        d.report(s, 0, *tokens, *ids("never seen"))
        assert await reader.done() == tokens
        assert "".join(x.text for x in reader.deltas) == byte_level().decode(tokens[:-1])
        assert (reader.deltas[-1].finish_reason, reader.deltas[-1].stop_reason) == ("stop", tokens[-1])


async def test_logprobs_come_with_their_tokens_and_prompt_logprobs_with_the_first_delta() -> None:
    async with bench("p0", "d0") as b:
        tokens = ids("Hello wonderful world")
        scores = [TokenLogprob(token, -1.0, 1) for token in tokens]
        params = SamplingParams(logprobs=0, prompt_logprobs=0)
        reader = b.submit(max_tokens=len(tokens), sampling=params)
        p, d = b.workers
        request = (await p.received(Prefill)).request
        s = request.sequence_id
        d.session.post(StepEvents(tokens=(TokenEvent(s, 0, tuple(tokens[:2]), tuple(scores[:2])),)))
        await asyncio.sleep(0.02)
        assert reader.deltas == []  # the prompt's have not arrived yet
        before = tuple(TokenLogprob(token, -2.0, 1) for token in request.prompt[1:])
        p.session.post(StepEvents(tokens=(TokenEvent(s, 0, (tokens[0],), (scores[0],), before),)))
        for index in range(2, len(tokens)):
            d.session.post(StepEvents(tokens=(TokenEvent(s, index, (tokens[index],), (scores[index],)),)))
        assert await reader.done() == tokens
        assert [score for x in reader.deltas for score in x.logprobs] == scores
        assert all(len(x.logprobs) == len(x.token_ids) for x in reader.deltas)
        assert [x.prompt_logprobs for x in reader.deltas] == [before] + [None] * (len(reader.deltas) - 1)


async def test_choices_share_one_prompt_and_end_independently() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=3, n=3, sampling=SamplingParams(prompt_logprobs=0))
        p, d = b.workers
        first = (await p.received(Prefill)).request
        p.session.post(
            StepEvents(tokens=(TokenEvent(first.sequence_id, 0, (5,), (), (TokenLogprob(1, -1.0, 1),) * 2),))
        )
        await asyncio.sleep(0.02)
        assert len(p.all(Prefill)) == 1  # the others wait until both workers have the prompt's KV
        p.hand_over(first.sequence_id, "d0")
        await until(lambda: len(p.all(Prefill)) == 3)
        others = [c.request for c in p.all(Prefill)[1:]]
        assert {r.choice for r in others} == {1, 2} and {r.prompt for r in others} == {first.prompt}
        assert {(r.sampling.seed, r.sampling.prompt_logprobs) for r in others} == {(first.sampling.seed, None)}
        for request in [*others, first]:
            s = request.sequence_id
            if request is not first:
                p.report(s, 0, 5)
                p.hand_over(s, "d0")
            d.report(s, 0, 5, 6, 7 + request.choice, ended="length")
        await until(lambda: sum(x.finish_reason is not None for x in reader.deltas) == 3)
        for choice in range(3):
            mine = [x for x in reader.deltas if x.choice == choice]
            assert [i for x in mine for i in x.token_ids] == [5, 6, 7 + choice]
            assert mine[-1].usage is not None and mine[-1].usage.completion_tokens == 3


async def test_other_choices_are_woken_when_the_first_one_ends_before_it_decodes() -> None:
    """Its reader may be slow, and see a stop string only after they have begun to wait. (Seed 3 of the simulator.)"""
    async with bench("p0", "d0") as b:
        first = b.cluster.admit(make_request("r", max_tokens=9), choices=2)
        reader = coordinator.reader.Reader(first, TextStream(Vocabulary(byte_level())))
        b.cluster.listen(first, reader.notify)
        p, _ = b.workers
        p.report((await p.received(Prefill)).request.sequence_id, 0, 5)
        await until(lambda: first.tokens)
        other = asyncio.create_task(reader.changed())
        await asyncio.sleep(0)
        b.cluster.end(first, "stop string", answered=True)
        await asyncio.wait_for(other, 3)
        assert first.ended
        b.cluster.forget(first)


async def test_failed_choice_ends_the_other_choices() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=9, n=2)
        p, d = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        await until(lambda: len(p.all(Prefill)) == 2)
        other = p.all(Prefill)[1].request.sequence_id
        p.fail(other, "worker_lost")
        assert (await reader.failed()).code == "worker_lost"
        await d.received(Abort, 2)
        assert {a.sequence for a in d.all(Abort)} == {s, other}
        assert b.num_active == len(b.requests) == 0


async def test_client_disconnect_ends_all_choices_including_those_not_started() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=9, n=4)
        p, _ = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await reader.got(1)
        await reader.leave()
        assert (await p.received(Abort)).sequence == s
        assert b.num_active == len(b.requests) == 0
        assert len(p.all(Prefill)) == 1


class SlowGrammars:
    """Compiles when `ready` is set. `asked`: the client of each request; `left`: how many were cancelled before."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.asked: list[str] = []
        self.left = 0

    async def compile(self, constraint: Constraint, client: str) -> str:
        self.asked.append(client)
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return f"grammar of {constraint.value}"


async def test_request_waiting_for_its_grammar_counts_against_the_quota() -> None:
    who = Client("k", "t", limits=KeyLimits(requests_at_once=2))
    async with bench("p0", "d0") as b:
        p, d = b.workers
        grammars: Any = SlowGrammars()
        b.pipeline._grammars = grammars

        def ask(name: str) -> Reader:
            return b.submit(name, client=who, constraint=Constraint("regex", name, "guided_regex"))

        leaves, stays = ask("leaves"), ask("stays")
        await until(lambda: grammars.asked == ["k", "k"])
        error = await ask("too-many").failed()
        assert isinstance(error, QuotaExceeded) and "2 concurrent requests" in error.message
        assert len(grammars.asked) == 2 and not len(b.requests)
        await leaves.leave()
        other = ask("other")
        await until(lambda: grammars.asked == ["k"] * 3 and grammars.left == 1)
        grammars.ready.set()
        for count in (1, 2):
            request = (await p.received(Prefill, count)).request
            assert request.sampling.grammar == f"grammar of {request.request_id}"
            run_to_end(p, d, request.sequence_id)
        await asyncio.gather(stays.done(), other.done())
        assert b.pipeline._quotas._accounts["k"].running == 0


async def test_structured_output_is_refused_by_field_name_without_a_compiler() -> None:
    async with bench("p0", "d0") as b:
        error = await b.submit(constraint=Constraint("regex", "a", "guided_regex")).failed()
        assert isinstance(error, InvalidRequest) and error.param == "guided_regex"


async def test_a_vector_is_the_only_delta_and_no_decode_worker_is_needed() -> None:
    async with bench("p0") as b:
        assert b.pipeline.ready() == (False, "no decode worker is ready")
        b.pipeline._generates = False
        assert b.pipeline.ready() == (True, "ready")
        reader = b.submit(prompt=(1, 2, 3), max_tokens=1, pooling="last")
        (p,) = b.workers
        command = await p.received(Prefill)
        event = TokenEvent(command.request.sequence_id, 0, (), cached_tokens=1, pooled=b"\0\0\x80?")
        p.session.post(StepEvents(tokens=(event,)))
        assert await reader.done() == []
        (delta,) = reader.deltas
        assert (delta.pooled, delta.finish_reason) == (event.pooled, "stop")
        assert delta.usage is not None and delta.usage.prompt_tokens == 3
        assert (delta.usage.completion_tokens, delta.usage.cached_tokens) == (0, 1)
        metrics = (await b.pipeline.metrics()).decode()
        assert "baton_prompt_tokens_total 3.0" in metrics
