"""Expressions over names match as with `re`, and end within their steps where `re` would not end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.models.name_patterns import MAX_DEPTH, MAX_LENGTH, MAX_STEPS, NamePattern, PatternError, Steps

NAME = "model.layers.11.self_attn.q_proj"
CHARACTERS = st.sampled_from(
    ["a", "b", ".", "0", "{", r"\.", "[ab]", "[^a]", r"[\d.]", "[]a-b]", r"\w", r"\D", r"\b", "^", "$"]
)
SIGNS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{0,3}?", "{2,2}", "{,}"])


def grouped(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("{}{})".format, st.sampled_from(["(", "(?:", "(?=", "(?!"]), parts)
    return st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("{}|{}".format, parts, parts),
        group,
        st.builds("{}{}".format, group, SIGNS),
        st.builds("{}{}".format, st.sampled_from(["a", ".", "[ab]", r"\w"]), SIGNS),
    )


PATTERNS = st.recursive(CHARACTERS, grouped, max_leaves=8)
NAMES = st.text("ab.0", max_size=6)


@given(PATTERNS, NAMES)
def test_a_pattern_matches_what_re_matches(text: str, name: str) -> None:
    pattern = NamePattern("target_modules", text, Steps())
    assert pattern.matches(name) == (re.fullmatch(text, name) is not None)
    assert pattern.matches_beginning(name) == (re.match(text, name) is not None)
    assert pattern.matches_end(name) == (re.match(rf"(.*\.)?({text})$", name) is not None)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (r".*\.(q|v)_proj", True),
        (
            r"(?:.*?(?:vision|text).*?(?:mlp|attn).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp|self_attn)\.(?:q_proj))",
            True,
        ),
        (r"^model\.layers\.(?P<layer>1[0-5])\..*_proj$", True),
        (r"model\.layers\.\d\..*", False),
        (r"(?!.*(?:vision|lm_head)).*\.q_proj", True),
        (r"(?!.*self_attn).*", False),
        (r"(\w+\.?)*", True),
    ],
)
def test_patterns_as_training_programs_write_them(text: str, matches: bool) -> None:
    assert NamePattern("target_modules", text, Steps()).matches(NAME) is matches


COSTLY = ["(.+)+!", "(.*)*!", ".*" * 16 + "!", "(.?){40}!"]


@pytest.mark.parametrize("text", [*COSTLY, "(.{1000000})+"])
def test_a_pattern_that_backtracks_without_end_takes_few_steps(text: str) -> None:
    """With `re` all but the last take longer than a test may."""
    steps = Steps()
    assert not NamePattern("target_modules", text, steps).matches(NAME)
    assert steps.taken < MAX_STEPS / 100


def test_the_patterns_of_one_config_share_their_steps() -> None:
    nested = "(" * 5 + ".?" + "){40}" * 5 + "!"
    steps = Steps()
    NamePattern("rank_pattern", "q_proj", steps).matches_end(NAME)
    with pytest.raises(PatternError, match=f"target_modules: '.*' is too costly: .* more than {MAX_STEPS:,} steps"):
        NamePattern("target_modules", nested, steps).matches(NAME)
    with pytest.raises(PatternError, match="rank_pattern: 'q_proj' is too costly"):
        NamePattern("rank_pattern", "q_proj", steps).matches_end(NAME)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(q_proj", "is no regular expression: missing"),
        ("(" * 100_000, f"has more than {MAX_LENGTH:,} characters"),
        ("(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1), f"has more than {MAX_DEPTH} groups within each other"),
        (r"(a)\1", r"has .* at 3, which is not supported here"),
        ("(?<=q)_proj", r"has '\(\?<' at 0, which is not supported here"),
        ("(?i)Q_PROJ", r"has '\(\?i' at 0, which"),
        ("a*+b", r"has '\*\+' at 1, which"),
        (r"\x61+", r"has .* at 0, which"),
    ],
)
def test_a_pattern_that_cannot_be_matched_is_refused_by_its_key(text: str, reason: str) -> None:
    with pytest.raises(PatternError, match=f"^target_modules: .* {reason}"):
        NamePattern("target_modules", text, Steps())
