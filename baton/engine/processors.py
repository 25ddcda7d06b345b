"""Logits processors, applied in this order before a token is chosen (docs/numerics.md):

1. logit_bias is added.
2. Masks: tokens outside allowed_token_ids; end tokens while the output has fewer than min_tokens; the last token of a
   bad word if the output ends with its other tokens; tokens that break the grammar. If 2 would leave no token at all,
   only the grammar's mask applies, and without a grammar only that of allowed_token_ids.
3. For tokens in prompt or output, repetition_penalty divides positive logits and multiplies the others.
4. Subtract frequency_penalty times the number of times a token is in the output; then presence_penalty if it is there.

All operations are elementwise in float32: a row's result does not depend on the other rows. Biases, bans and penalties
take one scatter each over all rows of a step; token counts of a sequence are kept from step to step (`SeenTables`).
Draft tokens that are only on the device are counted there (`Drafted`), with the same result and without a wait.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Draw, History, Row
from baton.engine.device_stream import to_device
from baton.engine.grammar_automaton import Bits
from baton.engine.grammars import Grammars

Floats32 = NDArray[np.float32]
Ids = NDArray[np.int64]
ApplyMasks = Callable[[Tensor, Sequence[tuple[int, Bits]]], None]
"""(logits [S, vocab], contiguous, masks by row): sets the logits of tokens whose bit is 0 to -inf."""

_MAX_TABLES = 1024
# Byte of a mask -> what it adds to the logits of its eight tokens: takes a quarter of the time of a boolean mask.
_BIASES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_BIASES = _BIASES.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """Draft tokens between the history of each draw and the draw: `tokens[s, :counts[s]]` for draw s, of int64 [S, J]
    on the logits' device. Entries beyond the count are undefined. The draws' own `drafts` are then empty."""

    tokens: Tensor
    counts: Sequence[int]


class Seen:
    """The distinct tokens of one sequence: `ids`, and `counts`, the number of times each is in the output (0: only in
    the prompt). State: both arrays with spare capacity, the slot of each token, and the history that they represent."""

    def __init__(self, history: History) -> None:
        self.prompt = history.prompt
        self.output: tuple[int, ...] = ()
        ids = np.unique(np.asarray(history.prompt, dtype=np.int64))
        self._slots: dict[int, int] = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids = ids
        self._counts = np.zeros(len(ids), dtype=np.float32)
        self.advance(history.output)

    def is_before(self, history: History) -> bool:
        """Whether `history` extends the counted prompt and output, so that `advance` can reach it."""
        same_prompt = history.prompt is self.prompt or history.prompt == self.prompt
        return same_prompt and history.output[: len(self.output)] == self.output

    def advance(self, output: tuple[int, ...]) -> None:
        """Counts the tokens that `output` adds to the output counted so far."""
        for token in output[len(self.output) :]:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot >= len(self._ids):
                room = max(64, len(self._ids))
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[slot] = token
            self._counts[slot] += 1
        self.output = output

    def after(self, drafts: tuple[int, ...]) -> tuple[Ids, Floats32]:
        """Returns ids and counts as if the drafts were output."""
        size = len(self._slots)
        if not drafts:
            return self._ids[:size], self._counts[:size]
        new = [token for token in dict.fromkeys(drafts) if token not in self._slots]
        slots = self._slots | {token: size + index for index, token in enumerate(new)}
        ids = np.concatenate([self._ids[:size], np.asarray(new, dtype=np.int64)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(new), dtype=np.float32)])
        for token in drafts:
            counts[slots[token]] += 1
        return ids, counts


def apply_masks(logits: Tensor, masks: Sequence[tuple[int, Bits]]) -> None:
    """Implements ApplyMasks in plain torch."""
    vocab = logits.shape[1]
    for row, bits in masks:
        logits[row] += to_device(torch.from_numpy(np.take(_BIASES, bits, axis=0).reshape(-1)[:vocab]), logits.device)


class SeenTables:
    """Caches: tables by sequence, least recently used first, and masks by sampling parameters. A table is rebuilt if it
    differs from the requested history; a mask is built once and kept as long as its parameters, that is, its sequence.

    `grammars` are the automata of sequences with a grammar. The draws of a sequence in `grammars.unsampled` are not
    masked, and their samples must be discarded. `apply_masks` masks rows on the logits' device."""

    def __init__(
        self, limit: int = _MAX_TABLES, grammars: Grammars | None = None, apply_masks: ApplyMasks = apply_masks
    ) -> None:
        self._limit = limit
        self.grammars = grammars or Grammars(None)
        self.apply_masks = apply_masks
        self._tables: OrderedDict[SequenceId, Seen] = OrderedDict()
        # Keyed by identity: hashing 150,000 ids in each step would cost more than the mask.
        self._masks: dict[int, tuple[weakref.ref[SamplingParams], Tensor]] = {}

    def outside_allowed(self, params: SamplingParams, vocab: int, device: torch.device) -> Tensor:
        """[vocab] bool on the device: true for all but the `allowed_token_ids` of these parameters."""
        key = id(params)
        _, known = self._masks.get(key, (None, None))
        if known is None or known.shape != (vocab,) or known.device != device:
            mask = torch.ones(vocab, dtype=torch.bool)
            mask[torch.tensor(params.allowed_token_ids)] = False
            known = to_device(mask, device)
            self._masks[key] = weakref.ref(params, lambda _: self._masks.pop(key, None)), known
        return known

    def of(self, draw: Draw, history: History) -> Seen:
        if draw.sequence_id is None:
            return Seen(history)
        table = self._tables.pop(draw.sequence_id, None)
        if table is None or not table.is_before(history):
            table = Seen(history)
            while len(self._tables) >= self._limit:
                self._tables.popitem(last=False)
        table.advance(history.output)
        self._tables[draw.sequence_id] = table
        return table


def process(
    logits: Tensor,
    draws: Sequence[Draw],
    tables: SeenTables | None = None,
    drafted: Drafted | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Returns the processed logits [S, vocab] (float32); `logits` itself if no draw requests a change. `in_place`
    modifies `logits` if they are contiguous: copying 50 rows of 150,000 takes 6 ms."""
    rows = [row for row, draw in enumerate(draws) if _asks(draw)]
    if not rows:
        return logits
    if not (in_place and logits.is_contiguous()):
        logits = logits.clone(memory_format=torch.contiguous_format)
    vocab, tables = logits.shape[1], tables or SeenTables()
    _add_biases(logits, draws, rows, vocab)
    _mask(logits, draws, rows, vocab, tables, drafted)
    _penalise(logits, draws, rows, vocab, tables, drafted)
    return logits


def changes_logits(row: Row) -> bool:
    """Whether the first draw of a row requests a change of its logits; if not, no later draw does."""
    return _asks(Draw(row.sampling, row.sequence_id.choice, row.output_index, row.history))


def masks_by_draft_tokens(params: SamplingParams) -> bool:
    """Whether masks depend on the draft tokens before a draw: then the host must have them."""
    return bool(params.grammar or params.bad_words)


def _asks(draw: Draw) -> bool:
    s = draw.sampling
    ending = s.min_tokens > draw.output_index and draw.history is not None
    return bool(ending or s.penalises or s.logit_bias or s.allowed_token_ids or s.bad_words or s.grammar)


def _add_biases(logits: Tensor, draws: Sequence[Draw], rows: list[int], vocab: int) -> None:
    where = [row * vocab + token for row in rows for token, _ in draws[row].sampling.logit_bias]
    if where:
        biases = [bias for row in rows for _, bias in draws[row].sampling.logit_bias]
        flat, index = logits.view(-1), to_device(torch.tensor(where), logits.device)
        flat[index] += to_device(torch.tensor(biases, dtype=torch.float32), logits.device)


def _mask(
    logits: Tensor, draws: Sequence[Draw], rows: list[int], vocab: int, tables: SeenTables, drafted: Drafted | None
) -> None:
    where: list[int] = []
    masks: list[tuple[int, Bits]] = []
    deadline = tables.grammars.deadline()
    for row in rows:
        params = draws[row].sampling
        allowed = params.allowed_token_ids
        if drafted is not None and drafted.counts[row] and masks_by_draft_tokens(params):
            raise InvariantError("grammars and bad words need draft tokens on the host")
        if params.grammar:
            bits = tables.grammars.mask(draws[row], deadline)
            if bits is not None:
                masks.append((row, _with_other_masks(bits, draws[row], vocab)))
            continue
        if allowed:
            logits[row].masked_fill_(tables.outside_allowed(params, vocab, logits.device), -torch.inf)
        banned = banned_tokens(draws[row])
        choices = allowed or range(vocab)
        if banned and (len(banned) < len(choices) or not banned.issuperset(choices)):
            where.extend(row * vocab + token for token in banned)
    if masks:
        tables.apply_masks(logits, masks)
    if where:
        logits.view(-1)[to_device(torch.tensor(where), logits.device)] = -torch.inf


def _with_other_masks(bits: Bits, draw: Draw, vocab: int) -> Bits:
    """The tokens that the grammar and the other masks of a draw allow; only the grammar's if there are none."""
    banned = banned_tokens(draw)
    if not banned and not draw.sampling.allowed_token_ids:
        return bits
    left = np.unpackbits(bits, count=vocab, bitorder="little")
    if allowed := list(draw.sampling.allowed_token_ids):
        kept = np.zeros_like(left)
        kept[allowed] = left[allowed]
        left = kept
    left[list(banned)] = 0
    return np.packbits(left, bitorder="little") if left.any() else bits


def banned_tokens(draw: Draw) -> set[int]:
    """Tokens that min_tokens and bad_words mask at this draw."""
    params, history = draw.sampling, draw.history
    if history is None:
        return set()
    banned = set(history.end_token_ids) if draw.output_index < params.min_tokens else set()
    if params.bad_words:
        longest = max(map(len, params.bad_words)) - 1
        tail = (history.output + draw.drafts)[-longest:] if longest else ()
        banned.update(w[-1] for w in params.bad_words if len(w) == 1 or tail[1 - len(w) :] == w[:-1])
    return banned


def _penalise(
    logits: Tensor, draws: Sequence[Draw], rows: list[int], vocab: int, tables: SeenTables, drafted: Drafted | None
) -> None:
    index, count, penalties, lengths, asking = [], [], [], [], []
    for row in rows:
        draw, params = draws[row], draws[row].sampling
        if draw.history is None or not params.penalises:
            continue
        ids, counts = tables.of(draw, draw.history).after(draw.drafts)
        index.append(ids + row * vocab)
        count.append(counts)
        lengths.append(len(ids))
        penalties.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
        asking.append(row)
    if not index:
        return
    factors = np.asarray(penalties, dtype=np.float32)
    each = np.repeat(factors, lengths, axis=0)
    counted = to_device(torch.from_numpy(np.concatenate(count)), logits.device)
    flat, where = logits.view(-1), to_device(torch.from_numpy(np.concatenate(index)), logits.device)
    more = [0 if drafted is None else drafted.counts[row] for row in asking]
    if drafted is not None and any(more):
        each = np.concatenate([each, np.repeat(factors, more, axis=0)])
        where, counted = _count_draft_tokens(flat, where, counted, asking, vocab, drafted)
    repetition, frequency, presence = to_device(torch.from_numpy(each.T.copy()), logits.device)
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counted
    values -= presence * (counted > 0)
    flat[where] = values


def _count_draft_tokens(
    flat: Tensor, where: Tensor, counted: Tensor, rows: list[int], vocab: int, drafted: Drafted
) -> tuple[Tensor, Tensor]:
    """Returns the places (flat indexes) and counts with those of the draft tokens of `rows` appended. A place may occur
    twice, with the same count: then the same value is written there twice."""
    width = drafted.tokens.shape[1]
    ours = [(row, column) for row in rows for column in range(drafted.counts[row])]
    source = to_device(torch.tensor([row * width + column for row, column in ours]), flat.device)
    begins = to_device(torch.tensor([row * vocab for row, _ in ours]), flat.device)
    places = drafted.tokens.flatten().index_select(0, source) + begins
    sums = torch.zeros_like(flat)
    sums[where] = counted
    sums.index_add_(0, places, torch.ones_like(places, dtype=flat.dtype))
    where = torch.cat([where, places])
    return where, sums[where]
