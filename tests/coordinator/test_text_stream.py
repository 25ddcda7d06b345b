"""Incremental text: equal to decoding everything at once, never half a code point, stop strings across any split."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coordinator.text.parser import Arguments, Reasoning, Text
from coordinator.text.stream import TextStream, Vocabulary
from coordinator.text.tool_calls import make_parser
from tests.support import tokenizers_kit as kit

KINDS = {"byte_level": kit.byte_level, "byte_fallback": kit.byte_fallback, "metaspace": kit.metaspace}
VOCABULARIES = {name: Vocabulary(make()) for name, make in KINDS.items()}


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(
    vocabulary: Vocabulary, parts: list[list[int]], stop: tuple[str, ...] = (), prompt: Sequence[int] = ()
) -> list[str]:
    text = TextStream(vocabulary, stop, prompt=prompt)
    return [*(text.push(part).text for part in parts), text.finish().text]


def ids_for(name: str) -> st.SearchStrategy[list[int]]:
    size = VOCABULARIES[name].size
    bytes_only = st.integers(3, 258) if name == "byte_fallback" else st.integers(4, 259)
    return st.lists(st.one_of(st.integers(0, size + 20), bytes_only), max_size=60)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_text_equals_decoding_all_ids_together(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    ids = data.draw(ids_for(name))
    parts = split(ids, data.draw(st.lists(st.integers(0, 60), max_size=8)))
    whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(stream(vocabulary, parts)) == whole
    assert "".join(stream(vocabulary, [[i] for i in ids])) == whole


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_output_together_are_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    """Unless a code point is split between them."""
    vocabulary = VOCABULARIES[name]
    prompt, ids = data.draw(ids_for(name)), data.draw(ids_for(name))
    prompt.append(vocabulary.tokens["a"])
    prompt += [vocabulary.size + 1] * data.draw(st.integers(0, 3))  # no text
    whole = vocabulary.tokenizer.decode(prompt + ids, skip_special_tokens=True)
    before = vocabulary.tokenizer.decode(prompt, skip_special_tokens=True)
    parts = split(ids, data.draw(st.lists(st.integers(0, 60), max_size=8)))
    assert before + "".join(stream(vocabulary, parts, prompt=prompt)) == whole


def test_a_completion_keeps_its_leading_space() -> None:
    """A stop string may begin with it."""
    vocabulary = VOCABULARIES["byte_fallback"]
    hello, world = vocabulary.tokens["▁Hello"], vocabulary.tokens["▁world"]
    assert stream(vocabulary, [[hello], [world]]) == ["Hello", " world", ""]
    assert stream(vocabulary, [[hello], [world]], prompt=[1, world]) == [" Hello", " world", ""]
    assert stream(vocabulary, [[world], [hello]], (" Hello",), [hello, 2]) == [" world", "", ""]
    assert stream(vocabulary, [[hello]], prompt=[hello, *vocabulary.tokenizer.encode("é").ids[-2:]]) == [" Hello", ""]


def test_a_completion_keeps_its_space_behind_many_bytes() -> None:
    vocabulary = VOCABULARIES["byte_fallback"]
    hello, world = vocabulary.tokens["▁Hello"], vocabulary.tokens["▁world"]
    for count in (15, 16, 100):
        prompt = [hello, *vocabulary.tokenizer.encode("🦜" * count, add_special_tokens=False).ids[1:]]
        assert len(prompt) > 4 * count
        assert stream(vocabulary, [[world]], prompt=prompt) == [" world", ""]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_valid_text_never_shows_a_replacement_character(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    if "\ufffd" in text:
        return
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(vocabulary, [[i] for i in ids])
    assert "".join(pieces) == vocabulary.tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_emoji_is_emitted_as_soon_as_its_bytes_are_complete() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    table = {vocabulary.token_bytes(i): i for i in range(vocabulary.size)}
    ids = [table[bytes([b])] for b in "😀".encode()]
    text = TextStream(vocabulary)
    assert [text.push([i]).text for i in ids] == ["", "", "", "😀"]
    assert text.finish().text == ""


def test_incomplete_code_point_is_emitted_only_at_the_end() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    table = {vocabulary.token_bytes(i): i for i in range(vocabulary.size)}
    text = TextStream(vocabulary)
    assert text.push([table[b"\xf0"], table[b"\x9f"]]).text == ""
    assert text.finish().text == "\ufffd"


def test_special_and_out_of_vocabulary_ids_decode_to_nothing() -> None:
    for vocabulary in VOCABULARIES.values():
        assert "".join(stream(vocabulary, [[vocabulary.size, vocabulary.size + 5, 2**31 - 1, 2**31 + 1]])) == ""
    assert "".join(stream(VOCABULARIES["byte_level"], [[0, 1, 2, 3]])) == ""


def byte_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_is_found_across_tokens_and_calls(size: int) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = byte_ids(vocabulary, "Hello world\n\nUser: more")
    text = TextStream(vocabulary, ("User:", "\n\nUser"))
    shown = ""
    consumed = 0
    for at in range(0, len(ids), size):
        piece = text.push(ids[at : at + size])
        shown += piece.text
        consumed += piece.consumed
        assert "Hello world".startswith(shown)
        if piece.stopped:
            break
    assert (shown, text.stopped) == ("Hello world", "\n\nUser")
    assert "\n\nUser" in vocabulary.tokenizer.decode(ids[:consumed])
    assert "\n\nUser" not in vocabulary.tokenizer.decode(ids[: consumed - 1])
    assert text.push(ids).text == "" and text.finish().text == ""


def test_partial_stop_string_is_emitted_at_the_end() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    text = TextStream(vocabulary, ("STOP",))
    assert text.push(byte_ids(vocabulary, "a ST")).text == "a "
    assert text.finish().text == "ST"
    assert text.stopped is None


def test_the_earliest_stop_string_wins_then_the_longest() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    for stops in (("cd", "bc", "bcd"), ("bcd", "bc", "cd")):
        text = TextStream(vocabulary, stops)
        for i in byte_ids(vocabulary, "abcde"):
            text.push([i])
        assert text.stopped == "bc"
    fallback = VOCABULARIES["byte_fallback"]
    text = TextStream(fallback, ("é", "éü"))  # one run of byte tokens, emitted as a whole
    text.push(byte_ids(fallback, "oéü!"))
    assert text.stopped == "éü"


def test_a_stop_string_in_the_last_run_of_bytes_is_found_by_finish() -> None:
    vocabulary = VOCABULARIES["byte_fallback"]
    text = TextStream(vocabulary, ("é",))
    assert text.push(byte_ids(vocabulary, "oé")).stopped is None
    assert (text.finish().text, text.stopped) == ("", "é")


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab\n中é", max_size=40),
    stops=st.lists(st.text("ab\n中é", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int]) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = byte_ids(vocabulary, text)
    one_by_one, in_parts = (TextStream(vocabulary, stops) for _ in range(2))
    first = "".join(one_by_one.push([i]).text for i in ids) + one_by_one.finish().text
    second = "".join(in_parts.push(part).text for part in split(ids, cuts)) + in_parts.finish().text
    assert (first, one_by_one.stopped) == (second, in_parts.stopped)
    if not any(stop in text for stop in stops):
        assert first == text
    else:
        assert text.startswith(first) and text.startswith(first + (one_by_one.stopped or "?"))
        assert not any(stop in first for stop in stops)


@pytest.mark.parametrize("name", KINDS)
def test_four_thousand_tokens_cost_linear_time(name: str) -> None:
    vocabulary = VOCABULARIES[name]

    def run(count: int, token_id: int) -> float:
        text = TextStream(vocabulary, ("never seen",))
        start = time.thread_time()
        for _ in range(count):
            text.push([token_id])
        text.finish()
        return time.thread_time() - start

    for token_id in (5, 200, vocabulary.size - 1):  # one of them is a byte that never becomes valid
        run(64, token_id)
        assert run(4096, token_id) < 0.5


def test_vocabulary_reads_the_decoder_kind() -> None:
    assert VOCABULARIES["byte_level"].byte_level
    assert VOCABULARIES["byte_fallback"].byte_fallback and not VOCABULARIES["byte_fallback"].byte_level
    wrapped = kit.renamed(
        kit.byte_level(),
        decoder={
            "type": "Sequence",
            "decoders": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}],
        },
    )
    assert Vocabulary(wrapped).byte_level
    assert isinstance(wrapped, Tokenizer)


def test_stop_strings_are_ignored_within_min_tokens() -> None:
    vocabulary = Vocabulary(kit.byte_level())
    ids = list(kit.byte_level().encode("Hello Hello Hello").ids)
    cut = len(kit.byte_level().encode("Hello Hello").ids)
    stream = TextStream(vocabulary, ("Hello",), min_tokens=cut)
    piece = stream.push(ids)
    assert (piece.text, piece.stopped) == ("Hello Hello ", "Hello")
    assert TextStream(vocabulary, ("Hello",)).push(ids).text == ""


@pytest.mark.parametrize("name", KINDS)
def test_joined_token_spellings_equal_the_text(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    text = "Hello world" if name == "metaspace" else "Hé, 中文 wörld"
    spelled = [vocabulary.spelling(i) for i in vocabulary.tokenizer.encode(text, add_special_tokens=False).ids]
    assert b"".join(raw for _, raw in spelled).decode().lstrip() == text
    assert vocabulary.spelling(10**9) == ("", b"")


def test_special_token_has_a_spelling_but_no_text() -> None:
    tokenizer, vocabulary = kit.byte_level(), VOCABULARIES["byte_level"]
    special = next(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    assert vocabulary.spelling(special)[0] == tokenizer.id_to_token(special)
    assert vocabulary.token(special) is None


END = VOCABULARIES["byte_level"].tokens["<|im_end|>"]


@pytest.mark.parametrize(("stop", "text"), [("<|im_end|>", "one two"), ("two<|im_end|>t", "one "), ("e two<|im", "on")])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_contain_special_tokens(stop: str, text: str, include: bool) -> None:
    """As a token, which the text does not show, or spelled."""
    vocabulary = VOCABULARIES["byte_level"]
    before, after = byte_ids(vocabulary, "one two"), byte_ids(vocabulary, "three")
    spelled = byte_ids(vocabulary, "<|im_end|>")
    for middle in ([END], spelled):
        if middle == [END] and stop.endswith("<|im"):
            continue
        reader = TextStream(vocabulary, [stop], include_stop=include)
        pieces = [reader.push([i]) for i in [*before, *middle, *after]]
        assert "".join(piece.text for piece in pieces) + reader.finish().text == text + stop * include
        assert reader.stopped == stop


def test_special_tokens_of_a_stop_string_that_does_not_match_are_not_shown() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = [*byte_ids(vocabulary, "one"), END, *byte_ids(vocabulary, "two")]
    assert "".join(stream(vocabulary, [[i] for i in ids], ("<|im_end|>x",))) == "onetwo"
    assert "".join(stream(vocabulary, [[i] for i in ids], ("eight<|im_end|>",))) == "onetwo"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP"}}\n</tool_call>'


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_stop_strings_apply_to_the_content_only(cuts: list[int]) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = byte_ids(vocabulary, f"<think>STOP it</think>\nYes. {CALL} then STOP here")
    for parts in ([ids], [[i] for i in ids], split(ids, cuts)):
        parser = make_parser("hermes", {"f": {}}, thinks=True)
        reader = TextStream(vocabulary, ["STOP"], parser=parser)
        events = [event for part in parts for event in reader.push(part).events] + [*reader.finish().events]
        texts = {
            kind: "".join(event.text for event in events if isinstance(event, kind))  # type: ignore[attr-defined]
            for kind in (Text, Reasoning, Arguments)
        }
        assert texts == {Text: "Yes. then ", Reasoning: "STOP it", Arguments: '{"a": "STOP"}'}
        assert reader.stopped == "STOP"


@pytest.mark.parametrize("thinking", [False, True])
def test_tokens_of_reasoning_are_counted(thinking: bool) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    begin, end = "<think>" * (not thinking), "</think>"
    ids = byte_ids(vocabulary, f"{begin}hmm{end}yes")
    ends = list(accumulate(len(vocabulary.spelling(i)[0]) for i in ids))
    expected = sum(len(begin) <= at < len(f"{begin}hmm{end}") for at in ends)
    readers = []
    for parts in ([ids], [[i] for i in ids]):
        reader = TextStream(vocabulary, parser=make_parser(None, {}, thinks=True, thinking=thinking))
        for part in parts:
            reader.push(part)
        readers.append(reader.reasoning_tokens)
    assert readers == [expected, expected]
