"""What a worker's ranks compare before they load, and the message about a difference."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from baton.core.compatibility import values_by_name
from baton.core.errors import RankLost, StartupError
from baton.core.ranks import Ranks
from baton.engine.options import EngineOptions
from baton.engine.rank_options import RankOptions, check_ranks
from tests.support.builders import make_facts, make_layout
from tests.support.dict_store import DictStore


def options_of(
    device: str = "cpu",
    kernels: str = "avx2",
    lengths: tuple[int, ...] = (1,),
    experts: bool = False,
    int8: bool = False,
    **facts: Any,
) -> RankOptions:
    options = EngineOptions(model_dir=Path("m"), decode_lengths=lengths, expert_parallel=experts)
    return RankOptions.of(options, make_facts(**facts), device, kernels, int8_activations=int8)


def refused(*by_rank: RankOptions) -> str:
    """Returns the error with which all ranks end; empty if they end with none."""
    store, received = DictStore(), dict[int, str]()

    def rank(number: int) -> None:
        try:
            check_ranks(store, Ranks(number, len(by_rank), number, len(by_rank)), by_rank[number], 5.0)
            received[number] = ""
        except StartupError as error:
            received[number] = error.message

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(by_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    (message,) = set(received.values())
    assert len(received) == len(by_rank)
    return message


def test_every_rank_reports_the_first_difference_with_option_values_and_ranks() -> None:
    assert refused(options_of(), options_of(), options_of(quantize="int8")) == (
        "quantize: 'none' at rank 0 and 'int8' at rank 2"
    )
    assert refused(options_of(dtype="bfloat16"), options_of()).endswith("; auto depends on the machine: set --dtype")
    assert refused(options_of(), options_of(lengths=(1, 3))).startswith("decode_lengths: '(1,)' at rank 0 and '(1, 3)'")
    assert refused(options_of(), options_of(experts=True)).startswith("expert_parallel: False at rank 0 and True at")
    assert refused(options_of(), options_of(int8=True)) == (
        "int8_activations: False at rank 0 and True at rank 1; auto depends on the machine: set --activations"
    )
    assert refused(options_of(), options_of(model_digest="w")).startswith(
        "model_digest: 'm' at rank 0 and 'w' at rank 1"
    )


def test_ranks_must_have_one_block_size() -> None:
    """Of two workers, one block size may be a multiple of the other's."""
    message = refused(options_of(), options_of(layout=make_layout(8)))
    assert message.startswith("block_size: 4 at rank 0 and 8 at rank 1;")


def test_bfloat16_ranks_must_all_use_torch_or_all_use_compiled_kernels() -> None:
    """Ranks with torch's kernels exchange bfloat16, those with compiled kernels float32."""
    amx, avx2, torchs = (options_of(dtype="bfloat16", kernels=kernels) for kernels in ("amx", "avx2", "torch"))
    assert refused(amx, avx2) == "" and refused(options_of(kernels="torch"), options_of()) == ""
    assert refused(amx, torchs).startswith("kernels: 'compiled' at rank 0 and 'torch' at rank 1;")
    exact = [options_of(exact=True, kernels=kernels) for kernels in ("amx", "avx2")]
    assert refused(*exact).startswith("kernels: 'amx' at rank 0 and 'avx2' at rank 1;")


def test_difference_that_explains_the_others_is_reported_first() -> None:
    message = refused(options_of(exact=True), options_of(dtype="bfloat16"))
    assert message.startswith("exact: True at rank 0 and False at rank 1")
    assert refused(options_of(), options_of(model_digest="x", max_model_len=512)).startswith("model_digest")
    on_gpu = options_of("cuda", dtype="bfloat16", edge_kind="nccl")
    assert refused(options_of(), on_gpu).startswith("device: 'cpu' at rank 0 and 'cuda' at rank 1;")


def test_option_missing_in_another_version_is_a_difference() -> None:
    ours = dict(values_by_name(options_of()))
    for first, second, line in (
        (ours, {**ours, "more": 1}, "more: None at rank 0 and 1 at rank 1"),
        ({**ours, "more": 1}, ours, "more: 1 at rank 0 and None at rank 1"),
    ):
        assert refused(first, second) == line  # type: ignore[arg-type]


def test_silent_rank_is_named() -> None:
    with pytest.raises(StartupError, match=r"rank 1 has not published its options within 0\.1 s"):
        check_ranks(DictStore(), Ranks(0, 2, 0, 2), options_of(), 0.1)


def test_closed_store_raises_rank_lost() -> None:
    class ClosedStore(DictStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand a stack")

    with pytest.raises(RankLost, match=r"lost the connection to the ranks' store: Connection reset by peer$"):
        check_ranks(ClosedStore(), Ranks(0, 2, 0, 2), options_of(), 1.0)


def test_a_single_rank_needs_no_store() -> None:
    check_ranks(None, Ranks(), options_of(), 1.0)  # type: ignore[arg-type]
