"""Attention of long rows on CUDA by FlashInfer (Ye et al. 2025, arXiv 2501.01005), an optional package: one kernel
reads the pages that torch's FlashAttention needs gathered first. `use_flashinfer` decides before anything is loaded
and logs why; without FlashInfer `FlashRows` (attention_triton.py) computes the same rows.

`plan` runs on the host, once per step and window. Its arrays are in pinned memory, so it does not wait for the device;
but FlashInfer lets the device read the schedule from a pinned buffer of the wrapper's, which must not be overwritten
before that. So wrappers take turns, and a wrapper is planned again only once the device has reached its last copy: with
one step computing and one launched behind it, that has happened.

Steps of decode workers are captured and stay with the Triton kernel: FlashInfer would need a plan on the host, and the
pages of all contexts, before each replay (decision 0015).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.batch import RowSpan, packed_tokens
from baton.engine.device import LEAST_CAPABILITY
from baton.engine.device_stream import Mark, NewMark, marks_of, pinned
from baton.engine.options import EngineOptions
from baton.models.model_config import AnyConfig, GeneralConfig, ModelConfig

log = logging.getLogger("baton.engine")
HEAD_DIMS = (64, 128, 256)
"""For which both of FlashInfer's kernels are instantiated, fa2 and, on Hopper, fa3."""
WORKSPACE_BYTES = 128 << 20
"""For results of split rows; what FlashInfer recommends. 256 of D = 128 take 34 MB on an H100."""
_TURNS = 2


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of a step, planned by `wrapper`. `where` are their packed tokens, as `packed_tokens` returns them."""

    where: slice | Tensor
    wrapper: Any

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, window: int, out: Tensor) -> None:
        """As `FlashRows.attend`; the window is already in the plan."""
        if isinstance(self.where, slice):
            self.wrapper.run(queries[self.where], (keys, values), out=out[self.where])
        else:
            out[self.where] = self.wrapper.run(queries[self.where], (keys, values))


class FlashInferRows:
    """Plans long rows. `config` is this rank's own; used on one stream. Constructing it for a model of a new shape
    compiles FlashInfer's kernels, unless they are in its cache or come with flashinfer-jit-cache."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        new_mark: NewMark | None = None,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._config, self._block_size, self._dtype, self._device = config, block_size, dtype, device
        new_mark = new_mark or marks_of(device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns: dict[int, deque[tuple[Any, Mark]]] = {
            window: deque((BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"), new_mark()) for _ in range(_TURNS))
            for window in dict.fromkeys(config.windows)
        }
        for window in self._turns:
            self.plan([RowSpan(0, 0, 1, (0,))], window)

    def plan(self, spans: Sequence[RowSpan], window: int) -> PagedRows:
        size, config = self._block_size, self._config
        firsts = [max(span.start - window + 1, 0) // size if window else 0 for span in spans]  # what a window covers
        pages = [span.block_ids[first : -(-span.end // size)] for span, first in zip(spans, firsts, strict=True)]
        keys = [span.end - first * size for span, first in zip(spans, firsts, strict=True)]
        parts = (
            [0, *accumulate(span.length for span in spans)],
            [0, *accumulate(map(len, pages))],
            [page for row in pages for page in row],
            [(count - 1) % size + 1 for count in keys],
            keys,
        )
        host = pinned(torch.tensor([number for part in parts for number in part], dtype=torch.int32), self._device)
        *arrays, lengths = torch.split(host, [len(part) for part in parts])
        turns = self._turns[window]
        wrapper, copied = turns[0]
        turns.rotate(-1)
        copied.synchronize()
        wrapper.plan(
            *arrays,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            size,
            causal=True,
            sm_scale=config.head_dim**-0.5,
            window_left=window - 1 if window else -1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=lengths,
        )
        copied.record()
        return PagedRows(packed_tokens(spans, self._device), wrapper)


def use_flashinfer(options: EngineOptions, config: AnyConfig, dtype: str, kv_dtype: str, device: torch.device) -> bool:
    """Whether FlashInfer computes this model's long rows on this device; logs which attention does, and why.

    Raises StartupError if `options.attention` names one that cannot.
    """
    option = options.attention
    if device.type != "cuda" or isinstance(config, GeneralConfig):
        if option != "auto":
            where = f"on {device.type}" if device.type != "cuda" else "of a model that transformers computes"
            raise StartupError(f"attention {option}: attention {where} is torch's; set attention to auto")
        return False
    against = "as --attention says" if option == "triton" else _against(options, config, dtype, kv_dtype, device)
    if against and option == "flashinfer":
        raise StartupError(f"attention flashinfer: {against}; set attention to auto")
    name = "Triton's kernel and torch's FlashAttention" if against else "FlashInfer"
    log.info("%s: attention of long rows by %s: %s", options.model_dir.name, name, against or "it serves this model")
    return not against


def _against(options: EngineOptions, config: ModelConfig, dtype: str, kv_dtype: str, device: torch.device) -> str:
    """Why FlashInfer is not used; empty if it is."""
    if options.exact:
        return "it chooses its order of summation by the batch, which --exact excludes"
    if dtype == "float32" or kv_dtype != dtype:
        return f"it is used for bfloat16 and KV of the same type, not for {dtype} with KV in {kv_dtype}"
    if config.head_dim not in HEAD_DIMS:
        return f"it has heads of {', '.join(map(str, HEAD_DIMS))}, not of {config.head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability {LEAST_CAPABILITY[0]}.0, this GPU has {capability[0]}.{capability[1]}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install 'baton-serve[gpu]')"
    try:
        FlashInferRows(config, options.block_size, getattr(torch, dtype), device)
    except Exception as error:  # its compiler, a library of its own, another version: whatever it is, ours computes
        reason = (str(error).strip().splitlines() or [""])[0]
        return f"it cannot be used here: {type(error).__name__}: {reason:.300}"
    return ""
