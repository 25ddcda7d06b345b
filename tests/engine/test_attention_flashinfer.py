"""Long rows by FlashInfer: its interface, our kernels as its twin, and when ours are used instead. No GPU: the fake of
tests/support computes what FlashInfer documents."""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine import attention_flashinfer
from baton.engine.attention import FastAttention
from baton.engine.attention_flashinfer import FlashInferRows, use_flashinfer
from baton.engine.batch import RowSpan
from baton.engine.options import EngineOptions
from tests.support import fake_flashinfer
from tests.support.attention import shape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_fake_has_parameters_that_flashinfer_has() -> None:
    for name, method in inspect.getmembers(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, inspect.isfunction):
        own = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        theirs = fake_flashinfer.PARAMETERS[name]
        positional = [p for p, kind in zip(own, _kinds(method), strict=True) if kind != inspect.Parameter.KEYWORD_ONLY]
        assert positional == theirs[: len(positional)] and set(own) <= set(theirs)


def _kinds(method: Any) -> list[Any]:
    return [each.kind for name, each in inspect.signature(method).parameters.items() if name != "self"]


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="the extra gpu is not installed")
def test_installed_flashinfer_has_the_parameters_that_the_fake_is_made_of() -> None:
    spec = find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    assert fake_flashinfer.parameters_of(Path(spec.origin).with_name("prefill.py")) == fake_flashinfer.PARAMETERS


def triton_attention(config: Any, dtype: torch.dtype, block_size: int = 16) -> Any:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a GPU the kernel is compiled: see tests/gpu")
    from baton.engine.attention_triton import TritonAttention

    paged = FlashInferRows(config, block_size, dtype, CPU)
    return TritonAttention(config, block_size, dtype, CPU, paged=paged)


def scattered(
    lengths: list[tuple[int, int]], size: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[RowSpan]]:
    """Queries, keys, values and rows (start, length) in scattered blocks; values after a row's end are NaN."""
    generator = torch.Generator().manual_seed(5)
    counts = [-(-(start + length) // size) for start, length in lengths]
    pool = (sum(counts) + 1, size, heads[1], heads[2])
    keys, values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
    free, spans, packed = torch.randperm(sum(counts), generator=generator).tolist(), [], 0
    for (start, length), count in zip(lengths, counts, strict=True):
        blocks = tuple(free.pop() for _ in range(count))
        values[blocks[-1], (start + length - 1) % size + 1 :] = float("nan")
        spans.append(RowSpan(packed, start, start + length, blocks))
        packed += length
    keys[-1] = values[-1] = 0.0
    return torch.randn((packed, heads[0], heads[2]), generator=generator).to(dtype), keys, values, spans


ROWS = [(0, 70), (5, 1), (33, 64), (200, 100), (7, 20), (300, 2)]


@pytest.mark.parametrize("window", [0, 1, 19, 150])
@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((4, 2, 64), torch.float32),
        ((7, 1, 64), torch.float32),
        ((3, 3, 128), torch.bfloat16),
        ((8, 2, 256), torch.float16),
    ],
)
def test_long_rows_equal_those_of_the_plain_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one call, in their places: contiguous rows, and rows with others between them."""
    counted = fake_flashinfer.install(monkeypatch)
    config = replace(shape(*heads), windows=(window,))
    queries, keys, values, spans = scattered(ROWS, size, heads, dtype)
    for span in spans if window else ():  # blocks before the window may have been freed
        for block in span.block_ids[: max(span.start - window + 1, 0) // size]:
            values[block] = float("nan")
    paged, plain = FlashInferRows(config, size, dtype, CPU), FastAttention(size, len(keys) - 1, dtype, CPU)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window)).view_as(queries)
    for some in ((0,), (2, 3), (3, 0, 2)):
        rows = [spans[number] for number in some]
        out, before = torch.full_like(queries, 9.0), counted.counts["runs"]
        paged.plan(rows, window).attend(queries, keys, values, window, out)
        assert counted.counts["runs"] == before + 1
        for number, span in enumerate(spans):
            whole = slice(span.first, span.first + span.length)
            if number in some:
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                assert torch.allclose(out[whole].float(), expected[whole].float(), rtol=0, atol=tolerance)
            else:
                assert bool((out[whole] == 9.0).all()), "rows of other kernels are not touched"


def test_each_step_plans_once_and_each_layer_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1, 20 and 2 tokens stay with the Triton kernel, whose results are those of a step without FlashInfer."""
    counted = fake_flashinfer.install(monkeypatch)
    heads = (4, 2, 64)
    queries, keys, values, spans = scattered(ROWS, 16, heads, torch.float32)
    values.nan_to_num_()
    kernel = triton_attention(shape(*heads), torch.float32)
    plain = FastAttention(16, len(keys) - 1, torch.float32, CPU)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, 0))
    counted.counts |= {"plans": 0, "runs": 0}
    prepared = kernel.prepare(spans, 0)
    assert len(prepared.tiles) == 2 and len(prepared.flash) == 1
    for _ in range(3):  # layers
        assert torch.allclose(kernel.attend(queries, keys, values, prepared), expected, rtol=0, atol=1e-5)
    assert counted.counts["plans"] == 1 and counted.counts["runs"] == 3
    assert not kernel.prepare([spans[1]], 0).flash and counted.counts["plans"] == 1, "a step without long rows"
    assert kernel.row_lengths == (1, 9, 64), "of the warm-up"


def test_schedule_is_not_overwritten_before_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window has two wrappers in turn, and waits for the last copy of the one that it plans."""
    counted, events = fake_flashinfer.install(monkeypatch), list[tuple[str, int]]()

    class Mark:
        made = 0

        def __init__(self) -> None:
            Mark.made += 1
            self.number = Mark.made

        def record(self) -> None:
            events.append(("copied", self.number))

        def synchronize(self) -> None:
            events.append(("waited", self.number))

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    config = replace(shape(4, 2, 64), windows=(0, 5, 0))
    paged = FlashInferRows(config, 16, torch.float32, CPU, Mark)
    assert counted.counts["wrappers"] == 4 and counted.counts["plans"] == 2, "two windows, both probed"
    events.clear()
    counted.order.clear()
    for _ in range(3):
        for window in (0, 5):
            paged.plan([RowSpan(0, 0, 70, tuple(range(5)))], window)
    assert counted.order == [2, 4, 1, 3, 2, 4]
    assert events == [(what, number) for number in counted.order for what in ("waited", "copied")]


class Facts:
    """A model, options and a GPU that FlashInfer serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = fake_flashinfer.install(monkeypatch)
        self.options = EngineOptions(model_dir=Path("m"))
        self.config, self.dtype, self.kv_dtype = shape(32, 8, 128), "bfloat16", "bfloat16"
        monkeypatch.setattr(attention_flashinfer, "find_spec", lambda name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(
            attention_flashinfer,
            "FlashInferRows",
            lambda config, size, dtype, _: FlashInferRows(config, size, dtype, CPU),
        )

    def use(self, device: torch.device = CUDA) -> bool:
        return use_flashinfer(self.options, self.config, self.dtype, self.kv_dtype, device)


def fail(*_: object) -> None:
    raise RuntimeError("Ninja build failed.\nnvcc: not there")


AGAINST: dict[str, tuple[dict[str, Any], str]] = {
    "exact": ({"exact": True}, "--exact excludes"),
    "float32": ({"dtype": "float32", "kv_dtype": "float32"}, "not for float32"),
    "fp8": ({"kv_dtype": "float8_e4m3fn"}, "KV in float8_e4m3fn"),
    "heads": ({"config": shape(4, 2, 80)}, "not of 80"),
    "old GPU": ({"capability": (7, 5)}, "this GPU has 7.5"),
    "not installed": ({"spec": None}, "pip install 'baton-serve[gpu]'"),
    "cannot compile": ({"build": fail}, "RuntimeError: Ninja build failed."),
    "another interface": ({"build": lambda *_: {}["plan"]}, "KeyError"),
}


@pytest.mark.parametrize("case", AGAINST)
def test_ours_is_used_where_flashinfer_does_not_serve_and_the_log_says_why(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts, (changes, why) = Facts(monkeypatch), AGAINST[case]
    for name, value in changes.items():
        if name == "exact":
            facts.options = replace(facts.options, exact=value)
        elif name == "capability":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, value=value: value)
        elif name == "spec":
            monkeypatch.setattr(attention_flashinfer, "find_spec", lambda _, value=value: value)
        elif name == "build":
            monkeypatch.setattr(attention_flashinfer, "FlashInferRows", value)
        else:
            setattr(facts, name, value)
    with caplog.at_level(logging.INFO, "baton.engine"):
        assert not facts.use()
    (line,) = caplog.messages
    assert line.startswith("m: attention of long rows by Triton's kernel and torch's FlashAttention: ") and why in line
    facts.options = replace(facts.options, attention="flashinfer")
    with pytest.raises(StartupError, match=r"attention flashinfer: .*; set attention to auto") as raised:
        facts.use()
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_flashinfer_is_used_where_it_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = Facts(monkeypatch)
    with caplog.at_level(logging.INFO, "baton.engine"):
        assert facts.use() and facts.counted.counts["plans"] == 1, "its kernels are built before weights are read"
        facts.options = replace(facts.options, attention="triton")
        assert not facts.use() and facts.counted.counts["plans"] == 1
    assert [line.partition("rows ")[2] for line in caplog.messages] == [
        "by FlashInfer: it serves this model",
        "by Triton's kernel and torch's FlashAttention: as --attention says",
    ]


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_attention_of_a_gpu_is_refused_on_cpu(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(monkeypatch)
    assert not facts.use(CPU)
    facts.options = replace(facts.options, attention=attention)
    with pytest.raises(StartupError, match=f"attention {attention}: attention on cpu is torch's"):
        facts.use(CPU)
