"""FlashInfer without a GPU: the parameters of the methods that Baton calls, their checks, and plain torch for the rest.

The lists of parameters are those of flashinfer-python 0.7.2.post1; a test compares them with an installed package. What
`plan` and `run` check is what that version's Python checks (flashinfer/prefill.py), and further: that `plan` reads only
host memory, since from the device it would wait for it."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_INIT = """float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf
    paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask"""
_PLAN = """qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk
    page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale
    window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking
    prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q
    block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len"""
_RUN = """q paged_kv_cache q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left sinks
    kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress"""
PARAMETERS = {name: text.split() for name, text in (("__init__", _INIT), ("plan", _PLAN), ("run", _RUN))}


def parameters_of(source: Path) -> dict[str, list[str]]:
    """The parameters of these methods in flashinfer/prefill.py, without importing it: that needs CUDA's libraries."""
    (wrapper,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "BatchPrefillWithPagedKVCacheWrapper"
    )
    methods = {node.name: node.args for node in wrapper.body if isinstance(node, ast.FunctionDef)}  # the last overload
    return {
        name: [arg.arg for arg in (*methods[name].args, *methods[name].kwonlyargs) if arg.arg != "self"]
        for name in PARAMETERS
    }


class BatchPrefillWithPagedKVCacheWrapper:
    """Counts `plans` and `runs` of all wrappers in `counts`; `order` lists the number of the wrapper of each
    plan."""

    counts: dict[str, int]
    order: list[int]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self._plan: dict[str, Any] | None = None
        self.number = self.counts["wrappers"] = self.counts["wrappers"] + 1

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        assert all(each.dtype == torch.int32 and each.device.type == "cpu" and each.dim() == 1 for each in arrays)
        ends, pages, indices, last, keys = (each.tolist() for each in arrays)
        assert ends[0] == pages[0] == 0 and len(ends) == len(pages) == len(last) + 1 == len(keys) + 1
        assert pages[-1] == len(indices) and num_qo_heads % num_kv_heads == 0
        counts = [end - first for first, end in itertools.pairwise(pages)]
        assert keys == [(count - 1) * page_size + rest for count, rest in zip(counts, last, strict=True)]
        assert all(1 <= rest <= page_size for rest in last) and causal
        assert all(0 < end - first <= count for (first, end), count in zip(itertools.pairwise(ends), keys, strict=True))
        self.counts["plans"] += 1
        self.order.append(self.number)
        self._plan = {
            "ends": ends,
            "pages": pages,
            "indices": indices,
            "keys": keys,
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "size": page_size,
            "scale": sm_scale,
            "window": window_left,
            "types": (q_data_type, kv_data_type),
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        """As the kernels do it: rows are aligned at their last key, values beyond it are zeros."""
        assert self._plan is not None, "plan comes first"
        plan, (keys, values) = self._plan, paged_kv_cache
        heads, kv_heads, size = plan["heads"]
        assert q.shape == (plan["ends"][-1], heads, size) and q.stride(-1) == 1
        assert keys.shape[1:] == values.shape[1:] == (plan["size"], kv_heads, size) and keys.stride() == values.stride()
        assert plan["types"] == (q.dtype, keys.dtype) == (values.dtype, q.dtype)
        out = torch.zeros_like(q) if out is None else out
        assert out.shape == q.shape and out.dtype == q.dtype
        self.counts["runs"] += 1
        rows = zip(itertools.pairwise(plan["ends"]), itertools.pairwise(plan["pages"]), plan["keys"], strict=True)
        for (first, end), (low, high), count in rows:
            pages = plan["indices"][low:high]
            k, v = (cache[pages].flatten(0, 1)[:count].transpose(0, 1).float() for cache in (keys, values))
            position = torch.arange(count - (end - first), count)[:, None]
            seen = torch.arange(count)[None] <= position
            if plan["window"] >= 0:
                seen &= torch.arange(count)[None] >= position - plan["window"]
            row = torch.nn.functional.scaled_dot_product_attention(
                q[first:end].transpose(0, 1).float(), k, v, attn_mask=seen, scale=plan["scale"], enable_gqa=True
            )
            out[first:end] = row.transpose(0, 1).to(q.dtype)
        return out


def install(monkeypatch: Any) -> type[BatchPrefillWithPagedKVCacheWrapper]:
    """Makes `import flashinfer` return this one, with new counts."""
    counts, order = dict.fromkeys(("wrappers", "plans", "runs"), 0), list[int]()
    wrapper = type("Counted", (BatchPrefillWithPagedKVCacheWrapper,), {"counts": counts, "order": order})
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return wrapper
