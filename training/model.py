"""A plain Llama for training, whose state dict carries Hugging Face's names, and its export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.data import BOS_ID, END_ID, PAD_ID, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """The sizes of one model; fields carry the meaning of Hugging Face's config of the same name."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    vocab_size: int = VOCAB_SIZE


TARGET = Shape(320, 896, 5, 4, 2, 64)
DRAFT = Shape(128, 320, 2, 4, 2, 32)


class Norm(nn.Module):
    """RMSNorm, computed in float32, returned in the compute type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def product_type() -> torch.dtype:
    """The type of products that this CPU is fast in: bfloat16 where it has instructions for it, else float32."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in the compute type of float32 master weights."""
    return F.linear(x.to(dtype), weight.to(dtype))


class Past:
    """One layer's keys and values while sampling: first a whole prompt, then one token at a time.

    There is room for `capacity` positions. Keys and values are [rows * KV heads, positions, head size].
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys = self.values = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over all positions so far, those of `k` and `v` included. Shapes as in `Attention`."""
        rows, heads, new, size = q.shape
        kv_heads = k.shape[1]
        if self.length == 0:
            self.keys, self.values = (k.new_empty(rows * kv_heads, self.capacity, size) for _ in range(2))
        here = slice(self.length, self.length + new)
        self.keys[:, here], self.values[:, here] = k.reshape(-1, new, size), v.reshape(-1, new, size)
        self.length += new
        if new == self.length:
            groups = heads // kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert new == 1, "after the prompt, one token at a time"
        # A group of heads shares keys and values; repeating them for each would cost more than the products.
        scores = torch.bmm(q.reshape(rows * kv_heads, -1, size), self.keys[:, : self.length].transpose(1, 2))
        weights = torch.softmax(scores.float() * size**-0.5, -1).to(v.dtype)
        return torch.bmm(weights, self.values[:, : self.length]).view(rows, heads, 1, size)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, past: Past | None = None) -> Tensor:
        rows, length, _ = x.shape
        shape = self.shape
        groups = shape.num_attention_heads // shape.num_key_value_heads
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = linear(x, weight, dtype).view(rows, length, -1, shape.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [shape.num_attention_heads] + [shape.num_key_value_heads] * 2, dim=1)
        q, k = rotate(q, cos, sin, dtype), rotate(k, cos, sin, dtype)
        if past is not None:
            y = past.attend(q, k, v)
        else:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            spelled_out = length <= 512 and dtype == torch.bfloat16
            y = short_attention(q, k, v) if spelled_out else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).reshape(rows, length, -1), self.o_proj.weight, dtype)


def short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention spelled out: compiled, in bf16, it beats the fused kernel on short pieces, backward most."""
    length = q.shape[-2]
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~visible, -1e9), -1).to(v.dtype) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary positions in the half-split form."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        gate, up = linear(x, self.gate_proj.weight, dtype), linear(x, self.up_proj.weight, dtype)
        return linear(F.silu(gate.float()) * up.float(), self.down_proj.weight, dtype)


class Layer(nn.Module):
    """One block: attention, then MLP, each on its normed input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, past: Past | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, dtype, past).float()
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), dtype).float()
        return out


class Llama(nn.Module):
    """The whole model with tied embeddings; `dtype` is the type of its products, weights stay float32."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        half = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        for name, child in module.named_children():
            if name in ("o_proj", "down_proj") and isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=0.02 / (2 * self.shape.num_hidden_layers) ** 0.5)

    def hidden(self, ids: Tensor, past: list[Past] | None = None, start: int = 0) -> Tensor:
        """The input of the head at every position, in float32. With `past`, `ids` begin at position `start`."""
        x = self.embed_tokens(ids)
        here = slice(start, start + ids.shape[1])
        cos, sin = self.get_buffer("cos")[here], self.get_buffer("sin")[here]
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, self.dtype, None if past is None else past[number])
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, ids: Tensor, past: list[Past] | None = None, start: int = 0) -> Tensor:
        """Logits of every position, in float32. With `past`, `ids` begin at position `start`."""
        return linear(self.hidden(ids, past, start), self.embed_tokens.weight, self.dtype).float()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())

    def parameter_count(self) -> int:
        """Parameters, the tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())


def shrunk(embedding: Tensor, size: int) -> Tensor:
    """An embedding in fewer dimensions: its principal components, scaled down: tokens keep their neighbours."""
    embedding = embedding - embedding.mean(0)
    directions: Tensor = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -size:]
    smaller = embedding.matmul(directions)
    return smaller * (0.03 / smaller.square().mean().sqrt())


def config_of(shape: Shape) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, value: object) -> None:
    """Plain indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: Llama, folder: Path) -> None:
    """Writes config, generation config and bf16 weights; the tied head is not stored twice."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_of(model.shape))
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }
    write_json(folder / "generation_config.json", generation)
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_exported(folder: Path, shape: Shape, dtype: torch.dtype = torch.float32) -> Llama:
    """The shipped weights again, for measuring what users get."""
    model = Llama(shape, dtype)
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})
    return model.eval()
