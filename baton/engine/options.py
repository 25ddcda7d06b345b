"""How to bring up a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to bring up a model. None means: decide from the machine and the checkpoint.

    `model_impl` is what computes the model: `baton`, `transformers`, or `auto` (the first where it supports the model).
    With `expert_parallel` ranks divide a layer's experts, else each expert.
    `exact` makes the bits of a row's logits independent of its batch (in float32; in bfloat16 on CUDA and with compiled
    kernels), and proves it at start. `kv_dtype` is how KV is stored: `auto` (in `dtype`) or `fp8`, also `fp8_e4m3`.
    `threads` is the number of compute threads of this process, which computes on `borrow_cores` too while nothing else
    runs there. `kv_memory_bytes` is for the worker, all ranks together.
    `max_num_tokens` bounds the tokens of one step. `host` is this machine's address for the worker's other ranks,
    `edge_kind` how KV is sent to other workers, `staging_bytes` the most KV in transit at once, all ranks together.
    `kernels` is `auto` (the best compiled ones that this processor has, else torch's), `torch`, or the level of
    compiled ones. `activations` is `auto` (int8 where kernels multiply them by matrices in Q8_0 of a GGUF file, except
    with `exact`) or `bfloat16`. `attention` is what computes long rows on a GPU: `flashinfer`, `triton` (with torch's
    FlashAttention), or `auto` (the first where it is installed and serves the model). `quantize` is `none`, `int8` or
    `int4` (weights of linear layers and head; only with compiled kernels). `version` is the code's. `draft_dir` is
    the draft model that this rank loads afterwards, for `max_running` sequences. `decode_rows` is the most sequences
    of a decode step, for which steps are captured on a GPU; 0 captures none. `decode_lengths` are the possible
    numbers of tokens of a row in such steps, rising (rows of fewer are padded). `gpu_share` is the share of its GPU's
    memory that a rank may use, 0: all, or an even part where ranks of this worker share a GPU. Options that must be
    equal on all ranks: `rank_options`.
    """

    model_dir: Path
    model_impl: str = "auto"
    expert_parallel: bool = False
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    exact: bool = False
    threads: int = 1
    borrow_cores: tuple[int, ...] = ()
    block_size: int = 16
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_tokens: int = 8192
    host: str = "127.0.0.1"
    kernels: str = "auto"
    activations: str = "auto"
    attention: str = "auto"
    edge_kind: str = "auto"
    staging_bytes: int = 0
    quantize: str = "none"
    version: str = ""
    draft_dir: Path | None = None
    max_running: int = 0
    decode_rows: int = 0
    decode_lengths: tuple[int, ...] = (1,)
    gpu_share: float = 0.0


def decode_lengths(drafts: bool, draft_tokens: int) -> tuple[int, ...]:
    """`EngineOptions.decode_lengths` of a worker that `drafts`: one token, and the `draft_tokens` to verify after it;
    0: up to 8, as many as pay off."""
    if not drafts:
        return (1,)
    return (1, 1 + draft_tokens) if draft_tokens else (1, 3, 9)
