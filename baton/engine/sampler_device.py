"""The tokens of draws on the device that the logits are on: what sampler.py would say, for a GPU.

All rows of a step go through a few batched operations in float64, and only their tokens come to the host, in one copy.
Sums and logarithms of a device may differ from numpy's in the last bits, so whatever lies closer to a decision than
that is undecided and left to sampler.py: a cut of top_p or min_p, or the two best tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.device import to_device
from baton.engine.philox import MULTIPLIERS, ROUNDS, WEYL
from baton.engine.processors import Draw

_LOW = 0xFFFFFFFF
_CUT = 1e-10  # of the sum of all weights: 2**17 of them are summed to within 2e-11
_PART = 1e-9  # of a noised logit, or of 1: the logarithms of two libraries differ by 1e-15
_AT_ONCE = 1 << 22  # elements of a float64 temporary, of which there are some ten: 32 MiB each


def choose_on_device(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """See sampler.Choose: from processed logits [S, vocab] in float32 the token of each draw, None where undecided."""
    return [token if token >= 0 else None for token in decide(logits, draws).tolist()]


@torch.no_grad()
def decide(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The same as int64 [S] on the device, -1 where undecided; nothing waits for it. On CUDA one kernel does it; the
    operations of torch below are its plain twin."""
    if logits.device.type == "cuda":
        return decide_by_kernel(logits, draws)
    vocab, device = logits.shape[1], logits.device
    ids = torch.arange(vocab, device=device)
    peaks = logits.amax(1, keepdim=True)
    first = torch.where(logits == peaks, ids, vocab).amin(1)
    tokens = torch.where(peaks[:, 0].isfinite(), first, -1)
    noisy = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    step = max(1, _AT_ONCE // vocab)
    for start in range(0, len(noisy), step):
        some = noisy[start : start + step]
        table = _table([draws[row] for row in some], some, device)
        rows = table[:, -1].long()
        ranked = any(draws[row].sampling.top_k > 0 or draws[row].sampling.top_p < 1.0 for row in some)
        values = logits[rows].double() + 0.0  # no -0.0: a sort may tell them apart
        drawn = _drawn(values, table, ids, ranked)
        tokens[rows] = torch.where(tokens[rows] < 0, -1, drawn)
    return tokens


def decide_by_kernel(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What `decide` says, from kernels/sampling.py: on CUDA, or in Triton's interpreter."""
    from baton.engine.kernels.sampling import choose  # Triton comes with torch's CUDA builds alone

    table = _table(draws, range(len(draws)), logits.device)[:, :-1].contiguous()
    return choose(logits, table, _CUT, _PART)


def _table(draws: Sequence[Draw], rows: Sequence[int], device: torch.device) -> Tensor:
    """float64 [N, 9], which holds every one of these numbers exactly: one copy to the device."""
    lines = []
    for draw, row in zip(draws, rows, strict=True):
        s = draw.sampling
        key = (s.seed & _LOW, s.seed >> 32 & _LOW)
        lines.append([s.temperature, s.top_p, s.min_p, s.top_k, *key, draw.output_index, draw.choice, row])
    return to_device(torch.tensor(lines, dtype=torch.float64), device)


def _drawn(values: Tensor, table: Tensor, ids: Tensor, ranked: bool) -> Tensor:
    """int64 [N]: the token of each row of logits [N, vocab] (float64), -1 where it is undecided. `ranked`: some row has
    top_k or top_p."""
    temperature, top_p, min_p = (table[:, column, None] for column in range(3))
    weights = torch.exp((values - values.amax(1, keepdim=True)) / temperature)
    survive, near = values > -torch.inf, torch.zeros_like(temperature, dtype=torch.bool)
    if ranked:
        prefix, near = _prefix(values, weights, top_p, table[:, 3, None].long())
        survive &= prefix
    edge = survive & (weights < 1.0) & (min_p > 0.0) & ((weights - min_p).abs() <= _CUT)
    near |= edge.any(1, keepdim=True)
    survive &= weights >= min_p
    noised = torch.where(survive, values + temperature * gumbel(table[:, 4:8].long(), ids), -torch.inf)
    best = torch.topk(noised, min(2, len(ids)), dim=1)
    parted = best.values[:, 0] - best.values[:, -1] > _PART * (1.0 + best.values[:, 0].abs())
    if len(ids) == 1:
        parted = torch.ones_like(parted)
    return torch.where(parted & ~near[:, 0], best.indices[:, 0], -1)


def _prefix(values: Tensor, weights: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """bool [N, vocab]: what top_k and top_p leave; bool [N, 1]: a token lies too near the cut of top_p to tell."""
    ranked = torch.sort(values, dim=1, descending=True, stable=True).indices  # equal logits: lowest id first
    place = torch.arange(values.shape[1], device=values.device)
    kept = (place < top_k) | (top_k <= 0)
    ordered = torch.where(kept, weights.gather(1, ranked), 0.0)
    sums = ordered.cumsum(1)
    total, before = sums[:, -1:], sums - ordered
    cuts = top_p < 1.0
    near = (cuts & kept & ((before - top_p * total).abs() <= _CUT * total)).any(1, keepdim=True)
    kept &= (before < top_p * total) | ~cuts
    return torch.zeros_like(kept).scatter(1, ranked, kept), near


def gumbel(words: Tensor, ids: Tensor) -> Tensor:
    """float64 [N, vocab]: the noise of each token id; `words` int64 [N, 4] are seed (low, high), output index and
    choice of each row. Four neighbouring ids share one counter of Philox (see philox.py)."""
    blocks = ids[: (len(ids) + 3) // 4]
    c0, zero = blocks.expand(len(words), -1), torch.zeros_like(blocks)
    c1, c2, c3 = words[:, 2, None] + zero, words[:, 3, None] + zero, zero
    key = [words[:, 0, None], words[:, 1, None]]
    for _ in range(ROUNDS):
        one, two = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # modulo 2**64, with a sign: masked below
        c0, c2 = (two >> 32 & _LOW) ^ c1 ^ key[0], (one >> 32 & _LOW) ^ c3 ^ key[1]
        c1, c3 = two & _LOW, one & _LOW
        key = [(part + step) & _LOW for part, step in zip(key, WEYL, strict=True)]
    drawn = torch.stack([c0, c1, c2, c3], dim=2).flatten(1)[:, : len(ids)]
    return -torch.log(-torch.log1p(-(drawn.double() + 0.5) * 2.0**-32))
