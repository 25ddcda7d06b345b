"""Outputs that match a grammar: masks against a plain automaton, rows whose mask is late or whose grammar fails, and
whole generations with and without draft tokens."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.core.errors import InvariantError
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, finish_reason
from baton.core.step import DraftRow, Draw, GrammarFailure, History, Row, StepPlan
from baton.engine import grammar_automaton, grammars
from baton.engine.grammar_automaton import (
    COMPILED,
    Automaton,
    GrammarError,
    GrammarTooComplex,
    Lexers,
    load_tokenizer,
)
from baton.engine.grammars import Grammars
from baton.engine.mask_processes import MaskJob, MaskProcesses
from baton.engine.processors import Drafted, SeenTables, process
from baton.engine.runner import Runner
from baton.runtime.model_source import builtin_directory
from coordinator.structured_output import Constraint, to_grammar
from decode.speculation.drafts import ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation
from tests.support.decode_drive import decode_all
from tests.support.engine_driver import tiny_runner

VOCAB = 4096
END = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = to_grammar(Constraint("json_schema", json.dumps(SCHEMA), "", whitespace=""))
LETTERS = to_grammar(Constraint("regex", "[ab]{2,5}", ""))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(builtin_directory("target"), VOCAB)


@pytest.fixture(scope="module")
def processes() -> Iterator[MaskProcesses]:
    processes = MaskProcesses(builtin_directory("target"), VOCAB)
    yield processes
    processes.close()


def automaton_of(tokenizer: LLTokenizer, grammar: str) -> Automaton:
    return Automaton(Lexers(tokenizer), grammar)


def ids_of(bits: bytes | None) -> set[int]:
    assert bits is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


def plain(tokenizer: LLTokenizer, grammar: str, output: tuple[int, ...], ends: tuple[int, ...]) -> set[int]:
    """Returns what may follow an output, from a new matcher."""
    matcher = LLMatcher(tokenizer, grammar)
    assert matcher.consume_tokens(list(output))
    allowed = ids_of(matcher.compute_bitmask()) - set(tokenizer.eos_tokens)
    return allowed | (set(ends) if matcher.is_accepting() else set())


def random_prefix(tokenizer: LLTokenizer, grammar: str, seed: int, length: int) -> tuple[int, ...]:
    """Returns a random beginning of a matching output."""
    chosen, output = random.Random(seed), ()
    while len(output) < length:
        allowed = plain(tokenizer, grammar, output, ())
        if not allowed:
            break
        output += (chosen.choice(sorted(allowed)),)
    return output


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 50),
    steps=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=6),
)
def test_masks_equal_those_of_a_new_matcher_after_any_earlier_calls(
    tokenizer: LLTokenizer, seed: int, steps: list[tuple[int, int, int]]
) -> None:
    """Outputs that continue, roll back and diverge, as after a resumption or rejected draft tokens."""
    automaton = automaton_of(tokenizer, GRAMMAR)
    for other, length, drafted in steps:
        known = random_prefix(tokenizer, GRAMMAR, seed + other % 3, length + drafted)
        output, drafts = known[:length], known[length:]
        found = automaton.masks(output, drafts, (END, 7))
        assert len(found) == 1 + len(drafts)
        for count, bits in enumerate(found):
            assert ids_of(bits) == plain(tokenizer, GRAMMAR, output + drafts[:count], (END, 7))


def test_positions_after_a_wrong_draft_token_are_not_masked(tokenizer: LLTokenizer) -> None:
    a, b, z = (tokenizer.tokenize_str(text)[0] for text in "abz")
    automaton = automaton_of(tokenizer, LETTERS)
    masks = automaton.masks((a,), (b, z, a), (END,))
    assert [bits is None for bits in masks] == [False, False, True, True]
    assert ids_of(masks[1]) >= {a, b, END} and z not in ids_of(masks[1])
    assert ids_of(automaton.masks((a,), (), (END,))[0]) == ids_of(masks[0])  # the draft tokens left no state behind


def test_end_tokens_are_allowed_only_where_the_grammar_accepts(tokenizer: LLTokenizer) -> None:
    a = tokenizer.tokenize_str("a")[0]
    automaton = automaton_of(tokenizer, LETTERS)
    assert not {END, 9} & ids_of(automaton.masks((a,), (), (END, 9))[0])
    assert {END, 9} <= ids_of(automaton.masks((a, a), (), (END, 9))[0])
    assert ids_of(automaton.masks((a,) * 5, (), (END, 9))[0]) == {END, 9}
    with pytest.raises(GrammarError, match="allows no next token"):
        automaton.masks((a,) * 5, (), ())


def test_invalid_output_and_invalid_grammar_raise_an_error(tokenizer: LLTokenizer) -> None:
    z = tokenizer.tokenize_str("z")[0]
    with pytest.raises(GrammarError, match=r".{5}"):
        automaton_of(tokenizer, LETTERS).masks((z,), (), (END,))
    with pytest.raises(GrammarError, match="unknown name"):
        automaton_of(tokenizer, "start: b")


def hostile(rules: int, begin: str) -> str:
    """A grammar whose masks are cheap within `begin`; the next one takes longer than anyone would wait."""
    lines = [f'r{i}: /[a-z ]/ s s | "q" r{(i + 1) % rules} s' for i in range(rules)]
    return "\n".join([f'start: "{begin}" "|" s', "s: " + " | ".join(f"r{i}" for i in range(rules)) + ' | ""', *lines])


def draw_of(
    grammar: str = LETTERS, output: tuple[int, ...] = (), name: str = "r", ends: tuple[int, ...] = (END,), **params: Any
) -> Draw:
    sampling = SamplingParams(temperature=0.0, grammar=grammar, **params)
    return Draw(sampling, 0, len(output), History((5,), output, ends), (), SequenceId(name))


def seen_tables(processes: MaskProcesses) -> SeenTables:
    return SeenTables(grammars=Grammars(processes, wait_s=30.0))


def test_other_masks_also_apply_unless_they_would_leave_no_token(
    tokenizer: LLTokenizer, processes: MaskProcesses
) -> None:
    a, b, ab = (tokenizer.tokenize_str(text)[0] for text in ("a", "b", "ab"))
    logits, tables = torch.zeros(1, VOCAB), seen_tables(processes)

    def kept(draw: Draw) -> set[int]:
        return set(torch.isfinite(process(logits, [draw], tables)[0]).nonzero().flatten().tolist())

    assert kept(draw_of(name="1")) >= {a, b, ab}
    assert kept(draw_of(name="2", bad_words=((ab,),))) == kept(draw_of(name="1")) - {ab}
    assert kept(draw_of(name="3", allowed_token_ids=(a, END, 99))) == {a}
    assert kept(draw_of(name="4", allowed_token_ids=(99,))) == kept(draw_of(name="1"))
    assert kept(draw_of(name="5", output=(a,) * 5, min_tokens=9)) == {END}
    assert kept(draw_of(name="6", output=(a,) * 2, min_tokens=9)) == kept(draw_of(name="7", output=(a,) * 2)) - {END}
    assert not tables.grammars.unsampled


class Gate:
    """Submits the masks of one grammar only once it is open."""

    def __init__(self, processes: MaskProcesses, grammar: str) -> None:
        self._processes = processes
        self._grammar = grammar
        self._held: list[MaskJob] = []
        self.is_open = False

    def submit(self, job: MaskJob) -> None:
        if job.automaton.grammar == self._grammar and not self.is_open:
            self._held.append(job)
        else:
            self._processes.submit(job)

    def open(self) -> None:
        self.is_open = True
        for job in self._held:
            self._processes.submit(job)

    def forget(self, automaton: Any) -> None:
        self._processes.forget(automaton)


def test_late_mask_delays_only_its_own_row(processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    gate: Any = Gate(processes, GRAMMAR)
    tables, logits = seen_tables(gate), torch.zeros(3, VOCAB)
    draws = [draw_of(name="quick"), draw_of(GRAMMAR, name="late"), Draw(SamplingParams(), 0, 0)]
    tables.grammars.mask(draws[0], tables.grammars.deadline())
    tables.grammars._wait_s = 0.05
    processed = process(logits, draws, tables)
    assert torch.isinf(processed[0]).any() and not torch.isinf(processed[1:]).any()
    assert tables.grammars.take_unsampled() == {SequenceId("late"): None} and not tables.grammars.unsampled
    # Still late: the same mask is requested, no other is begun, and in a step with other rows it is not waited for.
    waited: list[float] = []
    result = Future.result
    monkeypatch.setattr(Future, "result", lambda self, wait_s: waited.append(wait_s) or result(self, wait_s))
    tables.grammars.begin(draws)
    again = process(logits, draws, tables)
    assert waited[-1] == 0.0
    assert not torch.isinf(again[1]).any() and tables.grammars.take_unsampled() == {SequenceId("late"): None}
    gate.open()
    tables.grammars.begin(draws[1:2])  # in a step of its own, it is waited for
    tables.grammars._wait_s = 30.0
    assert torch.isinf(process(logits, draws, tables)[1]).any() and not tables.grammars.unsampled


def test_missing_tokenizer_and_failed_grammar_report_the_reason(
    tokenizer: LLTokenizer, processes: MaskProcesses
) -> None:
    tables = SeenTables(grammars=Grammars.load(Path("/nowhere"), VOCAB))
    process(torch.zeros(1, VOCAB), [draw_of()], tables)
    assert "tokenizer.json" in tables.grammars.take_unsampled()[SequenceId("r")].reason
    tables = seen_tables(processes)
    process(torch.zeros(2, VOCAB), [draw_of("start: b", name="bad"), draw_of()], tables)
    (failed,) = tables.grammars.take_unsampled().items()
    assert failed == (SequenceId("bad"), GrammarFailure(failed[1].reason)) and "unknown name" in failed[1].reason


def test_automaton_is_freed_with_its_sequence(processes: MaskProcesses) -> None:
    tables, draw = seen_tables(processes), draw_of()
    process(torch.zeros(1, VOCAB), [draw], tables)
    assert list(tables.grammars._followed) == [SequenceId("r")]
    del draw
    gc.collect()
    assert not tables.grammars._followed


def test_device_draft_tokens_are_refused_with_a_grammar_or_bad_words(processes: MaskProcesses) -> None:
    drafted, bad = Drafted(torch.zeros((1, 1), dtype=torch.int64), [1]), SamplingParams(bad_words=((1, 2),))
    for draw in (draw_of(), Draw(bad, 0, 0, History((5,), ()))):
        with pytest.raises(InvariantError, match="draft tokens on the host"):
            process(torch.zeros(1, VOCAB), [draw], seen_tables(processes), drafted)


@pytest.fixture(scope="module")
def target() -> Runner:
    return tiny_runner(builtin_directory("target"), exact=True, kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def draft() -> Runner:
    return tiny_runner(builtin_directory("draft"), exact=True, kv_memory_bytes=32 << 20)


def requests(count: int) -> list[GenerateRequest]:
    """Requests with a schema, greedy or sampled, some with a penalty, and requests without a grammar."""
    made = []
    for index in range(count):
        sampling = SamplingParams(temperature=0.0 if index % 3 == 0 else 0.9, seed=index, grammar=GRAMMAR)
        if index % 4 == 1:
            sampling = replace(sampling, presence_penalty=0.6, logprobs=1)
        if index % 5 == 4:
            sampling = replace(sampling, grammar="")
        prompt = tuple(random.Random(index).choices(range(6, VOCAB), k=5 + index))
        made.append(GenerateRequest(f"r{index}", prompt, 60, sampling, eos_token_ids=(END,)))
    return made


def valid(tokenizer: LLTokenizer, tokens: list[int]) -> bool:
    assert tokens[-1] == END
    jsonschema.validate(json.loads(tokenizer.decode_str(tokens[:-1])), SCHEMA)
    return True


@pytest.fixture(scope="module")
def undrafted(target: Runner) -> Iterator[dict[str, list[int]]]:
    yield decode_all(target, requests(15), batch=6).outputs


def test_outputs_match_their_schema(undrafted: dict[str, list[int]], tokenizer: LLTokenizer) -> None:
    assert all(valid(tokenizer, undrafted[f"r{i}"]) for i in range(15) if i % 5 != 4)
    assert any(len(undrafted[f"r{i}"]) == 60 for i in range(15) if i % 5 == 4)


@pytest.mark.parametrize(
    ("length", "source"),
    [(5, "ngram"), (2, "model")]
    + [pytest.param(*case, marks=pytest.mark.long) for case in ((2, "ngram"), (5, "model"))],
)
def test_draft_tokens_do_not_change_the_output(
    target: Runner, draft: Runner, undrafted: dict[str, list[int]], source: str, length: int
) -> None:
    drafts = NgramDrafts() if source == "ngram" else ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
    run = decode_all(target, requests(15), speculation=Speculation(drafts, fixed_length=length), draft=draft, batch=6)
    assert run.outputs == undrafted
    assert run.counters.accepted_tokens > (60 if source == "model" else 10)


def test_draft_model_proposes_tokens_that_the_grammar_allows(
    target: Runner, draft: Runner, tokenizer: LLTokenizer
) -> None:
    """So few of its draft tokens are rejected where the grammar leaves one choice."""
    choice = to_grammar(Constraint("choice", json.dumps(["unconditionally agreed", "nonetheless refused"]), ""))
    sampling, history = SamplingParams(temperature=0.0, grammar=choice), History((9, 10), (), (END,))
    row = Row(SequenceId("r"), 1, (10,), (0,), sampling, 1, 0, history)
    plan = StepPlan(1, (row,), (DraftRow(SequenceId("r"), 0, (9, 10), (0,), 3, 0),))
    target.step(StepPlan(0, (Row(SequenceId("r"), 0, (9,), (0,), SamplingParams()),)))
    outcome = SpeculativeEngine(target, draft).step(plan)
    while outcome.unsampled or 0 in outcome.draft_tokens[0]:  # a mask was late
        outcome = SpeculativeEngine(target, draft).step(plan)
    (drafted,) = outcome.draft_tokens
    text = tokenizer.decode_str(list(drafted))
    assert len(drafted) == 3 and ("unconditionally agreed".startswith(text) or "nonetheless refused".startswith(text))


def test_resumed_attempt_continues_in_its_grammar(
    target: Runner, undrafted: dict[str, list[int]], tokenizer: LLTokenizer
) -> None:
    request = requests(1)[0]
    whole = undrafted["r0"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        history = History(request.prompt, tuple(whole[:cut]), (END,))
        tokens = (*request.prompt, *whole[:cut])
        sampling = replace(request.sampling)  # a new object, as at a worker without this sequence
        row = Row(SequenceId("r0", 0, 2), 0, tokens, tuple(range(8)), sampling, 1, cut, history)
        outcome = target.step(StepPlan(0, (row,)))
        while outcome.unsampled:
            outcome = target.step(StepPlan(0, (row,)))
        assert outcome.sampled == ((whole[cut],),)


def test_launched_step_applies_its_masks(target: Runner, undrafted: dict[str, list[int]]) -> None:
    """As on a GPU: launched, then collected."""
    request, whole = requests(1)[0], undrafted["r0"]
    tokens: list[int] = []
    while len(tokens) < 5:
        history = History(request.prompt, tuple(tokens), (END,))
        known = (*request.prompt, *tokens)
        row = Row(request.sequence_id, 0, known, tuple(range(8)), request.sampling, 1, len(tokens), history)
        target.launch(StepPlan(len(tokens) + 1, (row,)))
        outcome = target.collect()
        tokens += outcome.sampled[0]
        assert outcome.sampled[0] or outcome.unsampled == {0: None}, "or a mask was late"
    assert tokens == whole[:5]


def test_draft_tokens_of_rows_with_a_grammar_or_bad_words_are_copied_to_the_host(
    target: Runner, draft: Runner, undrafted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when draft tokens could stay on a device, those of such rows are copied to the host."""
    monkeypatch.setattr(Runner, "can_queue_draft_tokens", property(lambda self: True))
    monkeypatch.setattr(target, "launches_ahead", True)
    monkeypatch.setattr(SpeculativeEngine, "_with_one_wait", lambda *_: pytest.fail("drafted on the device"))
    drafts = ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
    some = [request for request in requests(6) if request.sampling.grammar]
    run = decode_all(target, some, speculation=Speculation(drafts, fixed_length=3), draft=draft, batch=1)
    assert all(run.outputs[r.request_id] == undrafted[r.request_id] for r in some)
    assert run.counters.accepted_tokens > 10
    banned = SamplingParams(temperature=0.0, bad_words=((20,), (7, 11)))
    some = [replace(r, sampling=banned) for r in requests(3)]
    run = decode_all(target, some, speculation=Speculation(drafts, fixed_length=3), draft=draft, batch=1)
    assert run.outputs == decode_all(target, some).outputs and run.counters.accepted_tokens > 10


def test_end_token_of_a_grammar_ends_a_request_before_min_tokens() -> None:
    request = GenerateRequest("r", (5,), 60, SamplingParams(min_tokens=50, grammar=LETTERS), eos_token_ids=(END,))
    assert finish_reason(request, 6, END) == "stop"
    assert finish_reason(replace(request, sampling=SamplingParams(min_tokens=50)), 6, END) is None


def test_failed_automaton_is_rebuilt(tokenizer: LLTokenizer, processes: MaskProcesses) -> None:
    """A draft model may propose tokens that the grammar never allows."""
    tables, a, z = seen_tables(processes), tokenizer.tokenize_str("a")[0], tokenizer.tokenize_str("z")[0]
    draw, died = draw_of(), processes.died
    for output, fails in (((a,), False), ((z,), True), ((a,), False), ((a, a), False)):
        moved = Draw(draw.sampling, 0, len(output), History((5,), output, (END,)), (), SequenceId("r"))
        process(torch.zeros(1, VOCAB), [moved], tables)
        assert bool(tables.grammars.take_unsampled()) is fails
    assert processes.died == died


def test_tokenizers_without_a_known_end_of_sequence_are_usable(tmp_path: Path) -> None:
    parts = json.loads((builtin_directory("target") / "tokenizer.json").read_text())
    for token in parts["added_tokens"]:
        token["content"] = f"<|x{token['id']}|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    assert load_tokenizer(tmp_path, VOCAB + 10).vocab_size == VOCAB + 10
    parts["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(GrammarError, match="this tokenizer"):
        load_tokenizer(tmp_path, VOCAB)


def test_a_grammar_is_compiled_once_for_all_choices(tokenizer: LLTokenizer) -> None:
    lexers = Lexers(tokenizer)
    for _ in range(24):
        Automaton(lexers, LETTERS)
    assert lexers.compilations == 1
    for number in range(COMPILED):
        Automaton(lexers, to_grammar(Constraint("regex", f"a{number}", "")))
    Automaton(lexers, LETTERS)
    assert lexers.compilations == COMPILED + 2, "not all are kept for ever"


def test_sequence_ends_when_its_masks_exceed_the_cpu_budget(
    tokenizer: LLTokenizer, processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that exceeds the CPU time for its masks ends its sequence."""
    monkeypatch.setattr(grammars, "BUDGET_S", (0.0, 1.0))
    tables, a = seen_tables(processes), tokenizer.tokenize_str("a")[0]
    process(torch.zeros(1, VOCAB), [draw_of(name="first")], tables)
    assert tables.grammars.take_unsampled()[SequenceId("first")].exceeds_limit
    process(torch.zeros(1, VOCAB), [draw_of(name="later", output=(a,))], tables)
    assert not tables.grammars.unsampled


PROSE = random.Random(3).choices(
    [
        "the",
        "a",
        "of",
        "worker",
        "sends",
        "every",
        "block",
        "to",
        "its",
        "peer",
        "and",
        "waits",
        "until",
        "then",
        "it",
        "counts",
    ],
    k=800,
)


def long_answer(tokenizer: LLTokenizer, number: int) -> tuple[int, ...]:
    words = PROSE[number:] + PROSE[:number]
    return tuple(tokenizer.tokenize_str('{"note":"' + " ".join(words)[:1900]))


def follow(automaton: Automaton, tokens: tuple[int, ...]) -> None:
    for end in range(len(tokens)):
        automaton.masks(tokens[:end], (), (END,))


def long_note(length: int) -> str:
    schema = {"type": "object", "properties": {"note": {"type": "string", "maxLength": length}}, "required": ["note"]}
    return to_grammar(Constraint("json_schema", json.dumps(schema | {"additionalProperties": False}), ""))


def test_outputs_that_fill_a_shared_lexer_continue_with_a_new_one(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string of bounded length takes a dozen states for each token; the third such output once failed for good."""
    monkeypatch.setattr(grammar_automaton, "MAX_LEXER_STATES", 10_000)
    lexers, grammar = Lexers(tokenizer), long_note(2000)
    automata = [Automaton(lexers, grammar) for _ in range(6)]
    for number, automaton in enumerate(automata):
        follow(automaton, long_answer(tokenizer, number))
    assert 1 < lexers.compilations < 6, "lexers are shared until they are full"
    tokens = long_answer(tokenizer, 0)
    monkeypatch.setattr(grammar_automaton, "MAX_LEXER_STATES", 250_000)
    for automaton in automata:
        (bits,) = automaton.masks(tokens, (), (END,))
        assert ids_of(bits) == ids_of(Automaton(Lexers(tokenizer), grammar).masks(tokens, (), (END,))[0])


def test_output_that_alone_exceeds_the_states_of_a_lexer_is_our_limit(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_automaton, "MAX_LEXER_STATES", 1_000)
    lexers = Lexers(tokenizer)
    with pytest.raises(GrammarTooComplex, match="too many states"):
        follow(Automaton(lexers, long_note(2000)), long_answer(tokenizer, 0))
    assert 1 < lexers.compilations < 20
    follow(Automaton(lexers, long_note(2000)), long_answer(tokenizer, 0)[:20])  # others are not affected


@pytest.mark.parametrize(
    ("limits", "grammar", "message"),
    [
        ({"step_max_items": 1000}, hostile(300, "xx"), "Too many items"),
        ({"max_items_in_row": 100}, hostile(300, "xx"), "items; max is"),
        ({"step_lexer_fuel": 1000}, "start: /(.*a.{20}b)+.{30}/", "too many expressions"),
    ],
)
def test_limits_of_llguidance_are_our_limits(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], grammar: str, message: str
) -> None:
    real = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **given: real(**given, **limits))
    with pytest.raises(GrammarTooComplex, match=message):
        follow(Automaton(Lexers(tokenizer), grammar), tuple(tokenizer.tokenize_str("xx|ab cd babababa")))
