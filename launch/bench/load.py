"""What is sent: lengths and prompts, the same for the same seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = """
    the of and to in is that for it was on are as with they be at one have this from by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about
    many then them would write like so these her long make thing see him two has look more day could go come did
    my
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Lengths:
    """One length, or uniform between two, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt as token ids or as text, and how much to generate."""

    prompt: list[int] | str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """All jobs of a run. With `text`, a length counts words; what the server counted is in the report."""

    seed: int
    input_len: Lengths
    output_len: Lengths
    text: bool
    token_ids: Lengths

    def job(self, index: int) -> Job:
        """Prompts differ from their first token on, so that no prefix cache helps."""
        source = random.Random(f"{self.seed}/{index}")
        length, max_tokens = self.input_len.draw(source), self.output_len.draw(source)
        if self.text:
            return Job(" ".join(source.choices(_WORDS, k=length)), max_tokens)
        return Job([self.token_ids.draw(source) for _ in range(length)], max_tokens)


def parse_lengths(text: str) -> Lengths:
    """`512`, or `128-1024`.

    Raises:
        ValueError: neither.
    """
    low, dash, high = text.partition("-")
    lengths = Lengths(int(low), int(high) if dash else int(low))
    if lengths.low < 0 or lengths.high < lengths.low:
        raise ValueError(f"{text!r} is no length and no range")
    return lengths
