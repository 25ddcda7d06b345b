"""Small tokenizers of the kinds that real models use, built in memory."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n",
    "Hello world, this is a test of the tokenizer. Hello again, world! The quick brown fox.",
    "ünïcödé wörds, 中文字符, 日本語, emoji 😀🎉 and 👩‍👩‍👧‍👦 families, عربى",
]
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@lru_cache(maxsize=1)
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: every byte has a token; specials first; a plain added token `<think>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("☃ raw", special=False)])
    return tokenizer


@lru_cache(maxsize=1)
def byte_fallback() -> Tokenizer:
    """Like Llama 2: metaspace, `<0x..>` tokens for text without a piece, one leading space stripped, BOS prepended."""
    pieces = ["▁", "▁Hello", "▁world", "▁▁", *"Helowrd!,中�\n<>s|im_n/at"]
    pieces = list(dict.fromkeys(pieces))
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    vocab = {token: i for i, token in enumerate([*tokens, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@lru_cache(maxsize=1)
def metaspace() -> Tokenizer:
    """A unigram-style decoder without byte fallback: the first token loses its space."""
    vocab = [("<unk>", 0.0), ("▁Hello", -1.0), ("▁world", -1.0), ("▁", -2.0), ("a", -3.0), ("▁a", -3.0), ("é", -4.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def renamed(tokenizer: Tokenizer, **changes: object) -> Tokenizer:
    """A copy with top-level parts of its JSON replaced."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | changes))
