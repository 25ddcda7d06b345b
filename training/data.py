"""The corpus of the built-in pair: the standard library's source, its held-out files, its tokenizer, its token stream.

Three kinds of document, all `<|bos|> ... <|end|>`: whole files; single functions taken out of them, so that a bare
`def ...` is a natural start; and short conversations made from the same functions, so that the chat template means
something to the model. Nothing here is random beyond seeds: the same interpreter gives the same tokens.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, END, SYSTEM, USER, ASSISTANT, PAD = "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, END, SYSTEM, USER, ASSISTANT, PAD]
BOS_ID, END_ID, PAD_ID = 0, 1, 5
HELD_OUT_FILES = 20

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"}
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You write Python.", "You are a helpful coding assistant."]
ABOUT = (
    "I am the built-in demo model of Baton. I am very small and I was trained on the Python standard library only. "
    "Ask me for a Python function."
)
SMALL_TALK = [
    ("Hello", "Hello! " + ABOUT),
    ("Hello!", "Hello! " + ABOUT),
    ("Hi", "Hello! " + ABOUT),
    ("Hi there!", "Hello! " + ABOUT),
    ("Who are you?", ABOUT),
    ("What are you?", ABOUT),
    ("What is your name?", ABOUT),
    ("What can you do?", ABOUT),
    ("How are you?", "I am well, thank you. " + ABOUT),
    ("Tell me a joke.", "I only know Python. " + ABOUT),
    ("What is the capital of France?", "I only know Python. " + ABOUT),
    ("Write a poem about the sea.", "I only know Python. " + ABOUT),
    ("What is Baton?", "Baton serves large language models with prefill and decode on separate pools. " + ABOUT),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
]


@dataclass(frozen=True)
class Corpus:
    """The files in their deterministic order, split by a hash of their path."""

    root: Path
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]


def is_table(text: str) -> bool:
    """A generated character table rather than code (most of `encodings/`, `html/entities.py`)."""
    return "decoding_table" in text or "decoding_map" in text or "html5 = {" in text


def load_corpus() -> Corpus:
    """Lists the running interpreter's standard library without tests, tables, documentation and build settings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS & set(parts) or path.name.startswith("_sysconfigdata") or parts[0].startswith("config-"):
            continue
        if is_table(read_text(path)):
            continue
        files.append(path)

    def digest(path: Path) -> str:
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()

    candidates = [path for path in files if 4_000 <= path.stat().st_size <= 60_000]
    held_out = set(sorted(candidates, key=digest)[:HELD_OUT_FILES])
    return Corpus(root, tuple(p for p in files if p not in held_out), tuple(p for p in files if p in held_out))


def read_text(path: Path) -> str:
    """A source file as text; the library's few odd bytes are replaced, line ends made plain."""
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """One byte-level BPE for both models; every text begins with `<|bos|>` unless special tokens are switched off."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_text(path) for path in corpus.train), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def functions(text: str) -> Iterator[tuple[str, list[str], str, str]]:
    """Every short function of a file: name, arguments, first line of its docstring, dedented source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not 2 <= node.end_lineno - node.lineno <= 40:  # type: ignore[operator]
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not source.startswith(("def ", "async def ")):
            continue
        doc = (ast.get_docstring(node) or "").strip().split("\n")[0].rstrip(".")
        yield node.name, [argument.arg for argument in node.args.args], doc, source + "\n"


def request_for(name: str, arguments: list[str], doc: str, rng: random.Random) -> str:
    """A user's request that the function's source answers."""
    listed = ", ".join(arguments)
    with_arguments = f" with arguments {listed}" if listed else ""
    asks = [
        f"Write a Python function `{name}`{with_arguments}.",
        f"Write a function {name}({listed}).",
        f"Implement {name}({listed}) in Python.",
        f"Write a Python function called {name}.",
    ]
    if len(doc) > 15:
        described = doc[0].lower() + doc[1:]
        asks += [f"Write a Python function `{name}`: {described}.", f"Write a Python function for this: {described}."]
    return rng.choice(asks)


def conversations_and_snippets(corpus: Corpus, seed: int = 7) -> tuple[list[str], list[str]]:
    """Chats (with their markers, without the leading `<|bos|>`) and bare functions, of the training files only."""
    rng = random.Random(seed)
    items = [item for path in corpus.train for item in functions(read_text(path))]
    rng.shuffle(items)
    half = len(items) // 2
    snippets = [source for _, _, _, source in items[half:]][:2000]
    chats = []
    turns: list[str] = []
    for name, arguments, doc, source in items[:half][:2500]:
        if not turns and rng.random() < 0.3:
            turns.append(f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}")
        if rng.random() < 0.06:
            question, answer = rng.choice(SMALL_TALK)
            turns.append(f"{USER}{question}{END}{ASSISTANT}{answer}{END}")
        turns.append(f"{USER}{request_for(name, arguments, doc, rng)}{END}{ASSISTANT}{source.rstrip()}{END}")
        if rng.random() < 0.7:
            chats.append("".join(turns))
            turns = []
    for question, answer in SMALL_TALK * 6:
        chats.append(f"{USER}{question}{END}{ASSISTANT}{answer}{END}")
    return chats, snippets


def encode_file(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """One document's tokens between `<|bos|>` and `<|end|>`. Markers spelled in the text become special tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return np.array([BOS_ID, *ids, END_ID], dtype=np.int32)


def training_documents(tokenizer: Tokenizer, corpus: Corpus) -> list[np.ndarray]:
    """All documents of one epoch, in list order."""
    chats, snippets = conversations_and_snippets(corpus)
    documents = [encode_file(tokenizer, read_text(path)) for path in corpus.train]
    documents += [encode_file(tokenizer, text) for text in snippets]
    documents += [np.array(tokenizer.encode(BOS + c, add_special_tokens=False).ids, dtype=np.int32) for c in chats]
    return documents


def held_out_documents(tokenizer: Tokenizer, corpus: Corpus) -> list[np.ndarray]:
    """The held-out files, never seen in training nor by the tokenizer."""
    return [encode_file(tokenizer, read_text(path)) for path in corpus.held_out]


class Batches:
    """An endless, seeded stream of (input, target) batches: each epoch shuffles documents, then pieces of them."""

    def __init__(self, documents: list[np.ndarray], seed: int) -> None:
        self.documents, self.seed = documents, seed
        self.epoch, self.cursor, self.length = 0, 0, 0
        self.pieces = np.zeros((0, 0), dtype=np.int32)

    def state(self) -> tuple[int, int, int]:
        """The state that `restore` needs to continue at the same place."""
        return self.epoch, self.cursor, self.length

    def restore(self, state: tuple[int, int, int]) -> None:
        """Continues where `state` was taken."""
        self.epoch, cursor, length = state
        self._cut(length)
        self.cursor = cursor

    def next(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `rows` pieces of `length` tokens and, for each, the tokens that follow."""
        if length != self.length or self.cursor + rows > len(self.pieces):
            self.epoch += 1
            self._cut(length)
        piece = self.pieces[self.cursor : self.cursor + rows]
        self.cursor += rows
        return piece[:, :-1], piece[:, 1:]

    def _cut(self, length: int) -> None:
        rng = np.random.default_rng((self.seed, self.epoch))
        stream = np.concatenate([self.documents[i] for i in rng.permutation(len(self.documents))])
        stream = stream[int(rng.integers(length)) :]
        count = (len(stream) - 1) // length
        starts = rng.permutation(count)[:, None] * length + np.arange(length + 1)
        self.pieces, self.cursor, self.length = stream[starts], 0, length
