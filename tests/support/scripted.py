"""A tiny checkpoint that emits an exact text after a selector, so that tests run any output through the whole path.

    make_scripted(tmp_path / "m", {"call": '<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>'})

writes a model whose answer to a prompt with `[[call]]` in it is that text and the end token, at any temperature up to
1. The last selector of a prompt counts, so a conversation can go through several scripts (in float32: `--dtype
float32`). Markers (`<tool_call>`, `<think>` and the like) are added tokens, special or not, as the caller chooses.

How: a text is cut into pieces of a few characters, each a token of its own that no other place of any script has. One
attention layer looks at the last OFFSETS tokens and at the last selector; each of them votes for the token that follows
in its script, and the output layer adds the votes. Markers and short pieces occur in several places and do not vote,
except at the beginning of a script, where the selector's votes decide. `_Votes.next` is the same arithmetic in Python,
and `make_scripted` refuses a script that it does not reproduce.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

OFFSETS = 4
PIECE_CHARS = 8
CONTEXT = 4096
_THETA = 10000.0
_PHASE = 0.4  # of the selector's head: its score falls by the same amount, within a factor of 3, per token of distance
END, START = "<|im_end|>", "<|im_start|>"
MARKERS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
    "<tool_response>": False,
    "</tool_response>": False,
}
"""As in the tokenizer of Qwen3: added tokens with `special` false."""


def make_scripted(
    path: Path | str,
    scripts: Mapping[str, str],
    *,
    template: str | None = None,
    markers: Mapping[str, bool] = MARKERS,
) -> Path:
    """Writes the checkpoint. `scripts` maps the names of selectors to texts, `markers` texts to their `special` flag.

    Raises:
        ValueError: a script cannot be reproduced.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    made = _tokens(scripts, markers)
    votes = _Votes(made)
    for name, script in made.scripts.items():
        votes.check(name, script)
    tokenizer = _tokenizer(made, markers)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template or CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors, config = _model(made, votes)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [made.ids[END]]}))
    return path


SELECTORS_ONLY = (
    "{# tools <tool_call> #}{% for m in messages %}{% if m.content and '[[' in m.content %}<|im_start|>{{ m.role }}\n"
    "[[{{ m.content.split('[[')[-1].split(']]')[0] }}]]<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with tools that renders nothing of the messages but their last selectors: agents' prompts are long."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class _Tokens:
    """`ids` of all tokens as text (in the byte-level alphabet, except added tokens); `added` in order; `voting` are the
    ids that occur at one place of one script; `scripts` the ids of each script with its end, `selectors` its name's."""

    ids: dict[str, int]
    added: tuple[str, ...]
    voting: frozenset[int]
    scripts: dict[str, tuple[int, ...]]
    selectors: dict[str, int]


def _tokens(scripts: Mapping[str, str], markers: Mapping[str, bool]) -> _Tokens:
    split = re.compile("(" + "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + ")")
    whole = "".join(scripts.values())
    if any(name in whole for name in (START, END)):
        raise ValueError("a script may not contain the tokens of turns")
    cut: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, text in scripts.items():
        cut[name] = []
        for part in split.split(text) if markers else [text]:
            cut[name] += [part] if part in markers else _pieces(part, seen)
    alphabet = _byte_alphabet()
    tokens = sorted(alphabet.values())
    spelled = {piece: "".join(alphabet[b] for b in piece.encode()) for pieces in cut.values() for piece in pieces}
    tokens += sorted({s for piece, s in spelled.items() if piece not in markers and s not in tokens})
    added = (START, END, *markers, *(f"[[{name}]]" for name in scripts))
    ids = {token: number for number, token in enumerate([*tokens, *added])}
    found = {
        name: (*(ids[p if p in markers else spelled[p]] for p in pieces), ids[END]) for name, pieces in cut.items()
    }
    return _Tokens(
        ids=ids,
        added=added,
        voting=frozenset(ids[spelled[piece]] for piece in seen),
        scripts=found,
        selectors={name: ids[f"[[{name}]]"] for name in scripts},
    )


def _pieces(text: str, seen: set[str]) -> list[str]:
    """Cuts a text into pieces that are not in `seen`, and adds them; a piece that cannot be made so is just a piece."""
    found: list[str] = []
    at = 0
    while at < len(text):
        size = PIECE_CHARS
        while (piece := text[at : at + size]) in seen and at + size < len(text):
            size += 1
        at += len(piece)
        if (piece in seen or len(piece.encode()) < 2) and found and found[-1] in seen:
            seen.discard(found[-1])
            piece = found.pop() + piece
        if piece not in seen and len(piece.encode()) > 1:
            seen.add(piece)
        found.append(piece)
    return found


class _Votes:
    """`of[offset][token]` and `selected[token]` have the votes of a token at that distance from the end, and of a
    selector: the next token and its weight."""

    def __init__(self, tokens: _Tokens) -> None:
        self.of: list[dict[int, dict[int, float]]] = [defaultdict(dict) for _ in range(OFFSETS)]
        self.selected: dict[int, dict[int, float]] = {}
        for name, script in tokens.scripts.items():
            lead = next((at for at, token in enumerate(script) if token in tokens.voting), len(script) - 1)
            weights = (0.5 - 0.1 * at for at in range(lead + 1))
            mine = self.selected[tokens.selectors[name]] = {}
            for token, weight in zip(script, weights, strict=False):
                mine[token] = max(weight, mine.get(token, 0.0))
            for at in range(lead):
                self.of[0][script[at]][script[at + 1]] = 0.3
            for at, token in enumerate(script[:-1]):
                if token in tokens.voting:
                    for offset, then in enumerate(script[at + 1 : at + 1 + OFFSETS]):
                        self.of[offset][token][then] = 1.0
        self._selectors = tokens.selectors

    def next(self, selector: int, output: Sequence[int]) -> int:
        total: dict[int, float] = defaultdict(float)
        for token, weight in self.selected[selector].items():
            total[token] += weight
        for offset, token in enumerate(reversed(output[-OFFSETS:])):
            for then, weight in self.of[offset].get(token, {}).items():
                total[then] += weight
        best, second = [*sorted(total.items(), key=lambda entry: -entry[1]), (-1, 0.0)][:2]
        return best[0] if best[1] > second[1] + 0.05 else -1

    def check(self, name: str, script: Sequence[int]) -> None:
        for at, token in enumerate(script):
            if self.next(self._selectors[name], script[:at]) != token:
                raise ValueError(f"script {name!r} is ambiguous at token {at}: put more text between its markers")


def _tokenizer(made: _Tokens, markers: Mapping[str, bool]) -> Tokenizer:
    own = {token: number for token, number in made.ids.items() if token not in made.added}
    tokenizer = Tokenizer(models.BPE(vocab=own, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in made.added:
        special = token in (START, END) or markers.get(token, False)
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=special)])
    if any(tokenizer.token_to_id(token) != number for token, number in made.ids.items()):
        raise ValueError("the tokenizer numbers its tokens differently")
    return tokenizer


def _model(made: _Tokens, votes: _Votes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and config of a Qwen2 model with one layer, whose MLP is zero. Heads 0 to OFFSETS - 1 look at
    one position each, by the rotation of constant queries and keys; head OFFSETS looks at the last selector."""
    readers = sorted({token for votes_of in votes.of for token in votes_of} | set(votes.selected))
    emitted = sorted({token for script in made.scripts.values() for token in script})
    width = -(-(len(readers) + 1) // 32) * 32  # of a head: one dimension per token that votes, the last for others
    hidden = width + -(-len(emitted) // 32) * 32
    read = {token: number for number, token in enumerate(readers)}
    write = {token: width + number for number, token in enumerate(emitted)}
    vocab, heads, kv_heads, norm = len(made.ids), 2 * OFFSETS, 2, math.sqrt(hidden)
    tensors: dict[str, torch.Tensor] = {}

    def zeros(name: str, *size: int) -> torch.Tensor:
        return tensors.setdefault(name, torch.zeros(size))

    embed = zeros("model.embed_tokens.weight", vocab, hidden)
    for token in range(vocab):
        embed[token, read.get(token, width - 1)] = 1.0
    layer = "model.layers.0."
    tensors |= {f"{layer}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, out, into in (("gate", 32, hidden), ("up", 32, hidden), ("down", hidden, 32)):
        zeros(f"{layer}mlp.{name}_proj.weight", out, into)
    zeros(f"{layer}self_attn.q_proj.weight", heads * width, hidden)
    k = zeros(f"{layer}self_attn.k_proj.weight", kv_heads * width, hidden)
    v = zeros(f"{layer}self_attn.v_proj.weight", kv_heads * width, hidden)
    o = zeros(f"{layer}self_attn.o_proj.weight", hidden, heads * width)
    q_bias = zeros(f"{layer}self_attn.q_proj.bias", heads * width).view(heads, width)
    k_bias = zeros(f"{layer}self_attn.k_proj.bias", kv_heads * width).view(kv_heads, width)
    zeros(f"{layer}self_attn.v_proj.bias", kv_heads * width)
    half = width // 2
    frequencies = [_THETA ** (-2 * i / width) for i in range(half)]
    size = math.sqrt(100 * math.sqrt(width))  # a neighbour of the right position scores at least 60 less
    k_bias[0, :half] = size
    for offset in range(OFFSETS):
        q_bias[offset, :half] = torch.tensor([size * math.cos(f * offset) for f in frequencies])
        q_bias[offset, half:] = torch.tensor([-size * math.sin(f * offset) for f in frequencies])
    slow = next(i for i, f in enumerate(frequencies) if f * CONTEXT < math.pi / 2 - _PHASE)
    size = math.sqrt(2e5 * math.sqrt(width))
    q_bias[OFFSETS, slow], q_bias[OFFSETS, slow + half] = size * math.cos(_PHASE), size * math.sin(_PHASE)
    for token in votes.selected:
        k[width + slow, read[token]] = size / norm
    for head in range(kv_heads):
        v[head * width : (head + 1) * width, :width] = torch.eye(width) / norm
    for head, votes_of in enumerate([*votes.of, votes.selected]):
        for token, nexts in votes_of.items():
            for then, weight in nexts.items():
                o[write[then], head * width + read[token]] = 10.0 * weight
    tensors["model.norm.weight"] = torch.cat([torch.zeros(width), torch.ones(hidden - width)])
    unembed = zeros("lm_head.weight", vocab, hidden)
    for token, at in write.items():
        unembed[token, at] = 20.0
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": made.ids[END],
        "use_sliding_window": False,
    }
    return tensors, config


def _byte_alphabet() -> dict[int, str]:
    """The character of each byte in byte-level tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in set(printable))
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
