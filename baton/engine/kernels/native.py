"""ctypes bindings of the C++ kernels: the structs, field by field, and the functions of cpu/.

A call releases the GIL while it computes. Tensors are passed as addresses; the caller that fills a struct keeps them
alive.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.core.errors import InvariantError, StartupError
from baton.engine.blocks import BLOCK, Blocks
from baton.engine.kernels.build import LEVELS, CannotBuild, fastest_level, library, processor_levels

GROUP = 32  # outputs of a linear layer that are packed together
_FLOAT32, _BFLOAT16, _INT8, _BLOCKS4, _BLOCKS4_WIDE, _BLOCKS8, _MXFP4 = range(7)
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


class Linear(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int32),
        ("int8_activations", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", Linear),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_out", Linear),
        ("mlp_norm", c_void_p),
        ("gate_up", Linear),
        ("down", Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "block_size", "num_layers")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("head", Linear),
        ("eps", c_float),
        ("is_bf16", c_int32),
        ("threads", c_int32),
        ("is_fp8", c_int32),
    )


class AdapterPart(ctypes.Structure):
    _fields_ = (("b", c_void_p), *((name, c_int64) for name in ("rank", "first", "outputs", "step")))


class AdapterLinear(ctypes.Structure):
    _fields_ = (("a", c_void_p), ("parts", POINTER(AdapterPart)), ("ranks", c_int64), ("num_parts", c_int64))


class AdapterLayer(ctypes.Structure):
    _fields_ = tuple((name, AdapterLinear) for name in ("qkv", "attention_out", "gate_up", "down"))


class AdapterRows(ctypes.Structure):
    _fields_ = (("layers", POINTER(AdapterLayer)), ("tokens", c_void_p), ("num_tokens", c_int64))


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_sampled")),
        ("tokens", c_void_p),
        ("sampled", c_void_p),
        ("rows", c_void_p),
        ("x", c_void_p),
        ("logits", c_void_p),
        ("adapters", POINTER(AdapterRows)),
        ("num_adapters", c_int64),
        ("keeps_x", c_int64),
    )


class HeadsStruct(ctypes.Structure):
    _fields_ = (("first", c_void_p), *((name, c_int64) for name in ("token", "head", "count")))


def heads_struct(x: Tensor) -> HeadsStruct:
    """Describes x [1, heads, tokens, size], in which the elements of a head are contiguous."""
    return HeadsStruct(x.data_ptr(), x.stride(2), x.stride(1), x.shape[1])


class Routing(ctypes.Structure):
    _fields_ = (("chosen", c_int64), ("over_all", c_int32), ("rounded", c_int32))


class AttentionLayers(ctypes.Structure):
    _fields_ = (
        *((name, Linear) for name in ("q", "k", "v", "out")),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_eps", c_float),
        ("k_eps", c_float),
    )


class AttentionShape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")),
        ("scale", c_float),
    )


_FUNCTIONS = {
    "baton_pack": (c_int, c_int, c_void_p, c_int64, c_int64, c_void_p),
    "baton_pack_blocks": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "baton_int8_linears": (),
    "baton_pack_mxfp4": (c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "baton_forward": (POINTER(ModelStruct), POINTER(Step), c_int64, c_int64),
    "baton_attention": (POINTER(ModelStruct), c_int64, POINTER(Step), c_void_p),
    "baton_mlp": (POINTER(ModelStruct), c_int64, POINTER(Step), c_void_p),
    "baton_head": (POINTER(ModelStruct), POINTER(Step)),
    "baton_choose": (c_void_p, c_int64, c_int64, c_char_p, c_int64, c_int, c_void_p),
    "baton_mask": (c_void_p, c_void_p, c_int64),
    "baton_linear": (c_int, POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, c_int),
    "baton_linears": (*(c_int, POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int),),
    "baton_gated": (*(c_int, *[POINTER(Linear)] * 3, c_void_p, c_int64, c_int64, c_void_p, c_int),),
    "baton_experts": (
        *(c_int, POINTER(Linear), POINTER(Linear), c_int64, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_int64, c_int64, c_void_p, c_int),
    ),
    "baton_route": (
        *(c_int, POINTER(Linear), POINTER(Routing), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "baton_mixture": (
        *(c_int, POINTER(Linear), POINTER(Routing), POINTER(Linear), POINTER(Linear)),
        *(c_void_p, c_int64, c_int64, c_void_p, c_int),
    ),
    "baton_rotate": (
        *(c_int, POINTER(HeadsStruct), POINTER(HeadsStruct), c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    ),
    "baton_store": (
        *(c_int, c_int, POINTER(HeadsStruct), POINTER(HeadsStruct), c_void_p),
        *(c_int64, c_int64, c_int64, c_void_p, c_void_p),
    ),
    "baton_rms_norm": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int),
    "baton_attend": (
        *(c_int, c_int, POINTER(AttentionShape), c_void_p, c_int64, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int),
    ),
    "baton_attention_layer": (
        *(c_int, c_int, POINTER(AttentionLayers), POINTER(AttentionShape), c_void_p, c_int64, c_void_p, c_int64),
        *(c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "baton_propose": (POINTER(ModelStruct), POINTER(Step), c_void_p, c_int64, c_int64, c_void_p),
}
_COUNTS = ("baton_experts", "baton_forward", "baton_int8_linears", "baton_mixture")  # the others return nothing


class Kernels:
    """A loaded library. Its methods are the functions of the C interface, named without `baton_`."""

    def __init__(self, level: str) -> None:
        self.level = level
        try:
            self._library = ctypes.CDLL(str(library(level)))
        except OSError as error:
            raise CannotBuild(f"the compiled kernels cannot be loaded: {str(error)[:200]}") from None
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int64 if name in _COUNTS else None
            setattr(self, name.removeprefix("baton_"), function)
        if self._library.baton_level() != LEVELS.index(level):
            raise CannotBuild(f"the compiled kernels are not for {level}")
        if self._library.baton_init() != 0:
            raise CannotBuild("the operating system denies this process AMX tiles")
        self._library.baton_block_bytes.argtypes = c_int, c_int64, c_int64
        self._library.baton_block_bytes.restype = c_int64
        self._library.baton_borrow.argtypes = POINTER(c_int32), c_int64, c_int
        self._library.baton_borrowed.argtypes = (POINTER(c_int64),)
        self.few_rows_match = self._library.baton_few_rows_match() != 0
        """Whether attention of few queries has the same bits by vectors as by tiles; if not, tiles are used (0043)."""

    @property
    def computes_blocks(self) -> bool:
        """Whether linear layers compute from weights in blocks; other levels would decode them more slowly than they
        read them in bf16."""
        return self.block_bytes(_BLOCKS8, GROUP, BLOCK) > 0

    @property
    def computes_int8_activations(self) -> bool:
        """Whether weights in blocks of 8 bits can be multiplied by activations in 8 bits."""
        return bool(self.int8_linears() >= 0)

    def block_bytes(self, kind: int, n: int, k: int) -> int:
        return int(self._library.baton_block_bytes(kind, n, k))

    def borrow(self, cores: Sequence[int], *, idle: bool = True) -> None:
        """Ends the helper threads of steps, and starts one on each of `cores`; with `idle` it runs only while nothing
        else is runnable there. Models whose steps they help with must outlive them. Raises StartupError if the system
        denies a core."""
        failed = self._library.baton_borrow((c_int32 * len(cores))(*cores), len(cores), idle)
        if failed:
            raise StartupError(f"--borrow-cores {','.join(map(str, cores))}: {os.strerror(failed)}")

    def borrowed(self) -> tuple[int, int]:
        """The numbers of units of linear layers that helper threads have computed, and that the step computed again
        because the helper had lost its core."""
        counts = (c_int64 * 2)()
        self._library.baton_borrowed(counts)
        return counts[0], counts[1]

    def elements(self, dtype: torch.dtype) -> int:
        """The elements of a row that one instruction multiplies."""
        return 32 if dtype == torch.bfloat16 and LEVELS.index(self.level) >= LEVELS.index("avx512_bf16") else 16

    @property
    def name(self) -> str:
        """The level, and how the kernels differ from the usual ones on this processor."""
        if self.few_rows_match:
            return self.level
        return f"{self.level} (tiles also for few queries: vectors sum in another order on this processor)"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> ctypes._FuncPointer: ...


@cache
def load(level: str) -> Kernels:
    """Loads the kernels of a level. Raises CannotBuild if there is no compiler or the processor lacks the level."""
    if level not in processor_levels():
        raise CannotBuild(f"this processor has no {level}")
    return Kernels(level)


def choose_kernels(requested: str, device: torch.device) -> tuple[Kernels | None, str]:
    """Returns the kernels for `requested` (None: torch's), and their name with the reason. `auto` selects the fastest
    level, and falls back to torch's. Raises StartupError if a level selected by name is unavailable."""
    if requested not in ("auto", "torch", *LEVELS):
        raise StartupError(f"kernels must be auto, torch, {', '.join(LEVELS)}, not {requested!r:.60}")
    if requested == "torch" or device.type != "cpu":
        return None, "torch"
    try:
        level = fastest_level() if requested == "auto" else requested
        if level is None:
            raise CannotBuild("this processor has no AVX2")
        kernels = load(level)
    except CannotBuild as error:
        if requested == "auto":
            return None, f"torch ({error})"
        raise StartupError(f"kernels {requested}: {error}") from None
    return kernels, kernels.name


def padded(elements: int, dtype: torch.dtype) -> int:
    """The number of elements of a row, rounded up to whole tiles."""
    step = 64 // dtype.itemsize
    return -(-elements // step) * step


class Arena:
    """Memory for packed weights, allocated consecutively in large pieces. It requests pages of 2 MiB, which reduce
    the wait for address translation when weights are streamed (measured); the system may ignore the request. Before
    each piece the C library gives back the memory of weights that were packed and freed since the last one."""

    _PIECE = 64 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Allocates `size` bytes, rounded up to cache lines and aligned to one."""
        size = -(-size // 64) * 64
        if size > self._free.numel():
            _give_back()
            piece = torch.empty(max(size, self._PIECE) + _HUGE_PAGE, dtype=torch.uint8)
            self._free = piece[-piece.data_ptr() % _HUGE_PAGE :]
            length = ctypes.c_size_t(self._free.numel())
            ctypes.CDLL(None).madvise(c_void_p(self._free.data_ptr()), length, _MADV_HUGEPAGE)
        taken, self._free = self._free[:size], self._free[size:]
        return taken


def _give_back() -> None:
    """Makes the C library return free memory to the system, which it keeps where the last block of its heap is in
    use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def pack_weight(
    kernels: Kernels,
    arena: Arena,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[Linear, list[Tensor]]:
    """Packs weight [n, k] and bias [n], with outputs in the order of their computation, for rows in `dtype`; the weight
    has that dtype too, or consists of int8 steps of `scale` [n] (quantize.py). Returns the packed weight, and the
    tensors that it points to."""
    n, k = weight.shape
    weight = weight.contiguous()
    int8, is_bf16 = weight.dtype == torch.int8, dtype == torch.bfloat16
    if int8 != (scale is not None) or (not int8 and weight.dtype != dtype):
        raise InvariantError(
            f"a weight in {weight.dtype}, {'with' if int8 else 'without'} scales, cannot be packed for {dtype}"
        )
    elements = -(-n // GROUP) * GROUP * padded(k, dtype)
    packed = arena.take(elements * weight.element_size())
    scale = None if scale is None else scale.contiguous()
    floats = None if bias is None else bias.float().contiguous()
    kernels.pack(is_bf16, int8, weight.data_ptr(), n, k, packed.data_ptr())
    kind = _INT8 if int8 else _BFLOAT16 if is_bf16 else _FLOAT32
    tensors = (packed, floats, scale)
    struct = Linear(*(None if tensor is None else tensor.data_ptr() for tensor in tensors), n, k, kind)
    return struct, [tensor for tensor in tensors if tensor is not None]


def unpack_weight(kernels: Kernels, packed: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Returns the weight [n, k] that `pack_weight` packed, not quantised."""
    of_outputs, _ = _by_output(kernels, packed, n, dtype)
    return of_outputs.reshape(-(-n // GROUP) * GROUP, -1).view(dtype)[:n, :k].contiguous()


def unpack_rows(kernels: Kernels, packed: Tensor, rows: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Returns rows [T], each below n, of the weight [n, k] that `pack_weight` packed, not quantised: [T, k]."""
    of_outputs, dims = _by_output(kernels, packed, n, dtype)
    unpacked = of_outputs[torch.unravel_index(rows, of_outputs.shape[:dims])]
    return unpacked.reshape(len(rows), -1).view(dtype)[:, :k]


def _by_output(kernels: Kernels, packed: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Returns packed weights as a view of which the first dimensions, whose number is the second result, are the output
    and the others k."""
    groups = -(-n // GROUP)
    if LEVELS.index(kernels.level) >= LEVELS.index("avx512_bf16"):  # gemm.cpp: group, tile, half, dword of k, output
        return packed.view(torch.int32).view(groups, -1, 2, 16, 16).permute(0, 2, 4, 1, 3), 3
    if dtype == torch.float32:  # gemm_wide.cpp: group, k, output
        return packed.view(dtype).view(groups, -1, GROUP).permute(0, 2, 1), 2
    lanes = 8 if kernels.level == "avx2" else 16  # outputs of two registers by turns
    return packed.view(dtype).view(groups, -1, GROUP // (2 * lanes), lanes, 2).permute(0, 2, 4, 3, 1), 4


def pack_blocks(
    kernels: Kernels, arena: Arena, blocks: Blocks, bias: Tensor | None, *, int8_activations: bool = False
) -> tuple[Linear, list[Tensor]]:
    """Packs weights in blocks and bias [n] for rows in bf16; with `int8_activations` 8-bit blocks are multiplied by
    rows in 8 bits. Returns the packed weight, and the tensors that it points to."""
    n, k = blocks.codes.shape
    if blocks.minima is None:
        kind, minima = _BLOCKS8, blocks.scales
    else:
        minima = blocks.minima
        kind = _BLOCKS4 if blocks.in_half else _BLOCKS4_WIDE
    packed = arena.take(kernels.block_bytes(kind, n, k))
    floats = None if bias is None else bias.float().contiguous()
    given = [tensor.contiguous() for tensor in (blocks.codes, blocks.scales, minima)]
    kernels.pack_blocks(kind, *(tensor.data_ptr() for tensor in given), n, k, packed.data_ptr())
    tensors = [packed] if floats is None else [packed, floats]
    quantised = int8_activations and kind == _BLOCKS8
    address = None if floats is None else floats.data_ptr()
    return Linear(packed.data_ptr(), address, None, n, k, kind, quantised), tensors


def pack_mxfp4(
    kernels: Kernels, arena: Arena, blocks: Tensor, scales: Tensor, bias: Tensor | None
) -> tuple[Linear, list[Tensor]]:
    """Packs weights in MXFP4, blocks [n, k / 32, 16] and scales [n, k / 32] (mxfp4.py), and bias [n], for levels below
    avx512_bf16. Returns the packed weight, and the tensors that it points to."""
    n, k = len(scales), scales.shape[1] * BLOCK
    packed = arena.take(kernels.block_bytes(_MXFP4, n, k))
    floats = None if bias is None else bias.float().contiguous()
    blocks, scales = blocks.contiguous(), scales.contiguous()
    kernels.pack_mxfp4(blocks.data_ptr(), scales.data_ptr(), n, k, packed.data_ptr())
    tensors = [packed] if floats is None else [packed, floats]
    return Linear(packed.data_ptr(), None if floats is None else floats.data_ptr(), None, n, k, _MXFP4), tensors
