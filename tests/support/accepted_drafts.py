"""Recorded acceptance of the built-in draft's tokens, position by position.

The built-in pair generated 192 tokens after each of 16 prompts of up to 200 tokens of text in its domain. At every
position the draft, given the target's tokens before it and the target's noise, either would have drafted the target's
token or not. Since output does not depend on the drafts, this gives the tokens won by any draft length at any position.
"""

from __future__ import annotations

LENGTH = 191  # positions in each line, the first in the highest bit; the last bit of a line is unused

GREEDY = (
    "18a3b6061efebebebebebebebebebebebebebebebebebebe",
    "b42d7fdcaafdeaefd76eff77fbbfdda3d7af5ebd7af5ebd6",
    "0a552aaaddd4d84c84c8488c88c88c88c88c88c88c88c88c",
    "137ffdfbf7efd7af5ebd7af5ebd7af5ebd7af5ebd7af5ebc",
    "eaa7895cca45cca45cca45cca45cca45cca45cca45cca45c",
    "0d4322bfa8f9dbef47eedf7a3ff6fbd1fbb79e8fddbcf4fe",
    "21d8027c00b433e20a5ba7ae6b9ae6b9ae6b9ae6bdaf6bda",
    "fcf8adc88e2b7cf7df7df7df7df7df7db6df6db6db6db6da",
    "07583ee1770fb87dc3ee1f70fb87dc3ee1f70fb8fdc7ee1e",
    "da4ff79def7bdef7bde72def79eec3ae0febfafebfafebfa",
    "99ddff2306e0bff1322290233f57ebfffffffffffffffffe",
    "e739f9fff431ce77bdef7bdef7bddef7bffffffffffffffe",
    "efa9e7b7ded7911059cc7ccc7f8bd7ff7f3dfef6bc8882ca",
    "8a748accf19e33c678cf1be37c6f8df1be37c6f8df1be37c",
    "d222160462408c49108922112442248844912892251244a2",
    "013a06e81ba0eec3bb0eec3bb0eec3bb0eec3bb0eec3bb0e",
)
"""One line per stream at temperature 0, in hexadecimal."""

WARM = (
    "32ccff0307c4515cbc7cb918b6ec4c59cc8eaac01e7fb7ba",
    "183d5a9dc4343d488e715889855070ee56038b6cd35db878",
    "851b6b8c822c18c0e6bc43a443d7bfc8784e96f3f83d6e7c",
    "76e8ab872d348f216861b20413c01c597b20639d1f0589be",
    "5b475c92541fb9ecc57df137ecbd372c9ca7ee6cfd8af090",
    "a4b19dbfc7ab9423cbaa58e0d504604be5e28fd7e42c9592",
    "898c55543508e600839c7df41fdd3fe4248ddad8d0d89382",
    "ba004048fa690e25ccd502cdf3e27e5db67e1ea911771f5e",
    "0ff9dff0034dfba767d04ffafffdff81ae3feeeffd068126",
    "f26ece58ed1cbe7b5c496fbcee00f33fb9c5be84eb19b546",
    "d213f3cb78506884dc3434f3a34da6da28ea99fc5851323a",
    "389357f67ad236dbd67674e77dc1ed4a14d65062208e0bc0",
    "72d9a8f644e6765783fbb9ce3b4a2d596715eefdde3af3be",
    "298ade6d4b191d5300101e88465a4e43c74f5e4e4a0b9c96",
    "b82432266515ab19540038408d2d08b4a192c7480ead0306",
    "bc393652954e10f97e6df006ceb08758f7c20294df5f94fe",
)
"""The same at temperature 0.8."""


def bits(lines: tuple[str, ...]) -> list[list[bool]]:
    """Returns, for each stream and each position from its second token on, whether a draft token there is right."""
    return [[bool(int(line, 16) >> (4 * len(line) - 1 - place) & 1) for place in range(LENGTH)] for line in lines]
