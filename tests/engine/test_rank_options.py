"""The options that a worker's ranks compare, and the message about a difference."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import RankLost, StartupError
from baton.core.ranks import Ranks
from baton.engine.options import EngineOptions
from baton.engine.rank_options import agree, difference, must_agree
from tests.support.dict_store import DictStore


def options_of(**changed: Any) -> dict[str, str]:
    facts = {"dtype": "float32", "kernels": "avx2", "digest": "ab12", "max_model_len": 256}
    facts |= {name: changed.pop(name) for name in facts if name in changed}
    options = EngineOptions(model_dir=Path("m"), **changed)
    return must_agree(options, device=torch.device("cpu"), **facts)  # type: ignore[arg-type]


def test_ranks_with_compatible_options_find_no_difference() -> None:
    assert (
        difference([options_of(), options_of(kernels="amx", threads=7, host="::1", kv_memory_bytes=1, staging_bytes=9)])
        == ""
    )


def test_message_names_option_values_and_ranks() -> None:
    assert difference([options_of(), options_of(), options_of(quantize="int8")]) == (
        "quantize: none on rank 0 and int8 on rank 2; a worker's ranks must agree"
    )
    assert difference([options_of(dtype="bfloat16"), options_of()]).endswith("; auto depends on the machine: set it")
    assert difference([options_of(), options_of(digest="ab13")]) == "checkpoint digest: rank 1's differs from rank 0's"


def test_bfloat16_ranks_must_all_use_torch_or_all_use_compiled_kernels() -> None:
    """Ranks with torch's kernels exchange bfloat16, those with compiled kernels float32."""
    amx, avx2, torchs = (options_of(dtype="bfloat16", kernels=kernels) for kernels in ("amx", "avx2", "torch"))
    assert difference([amx, avx2]) == "" and difference([options_of(kernels="torch"), options_of()]) == ""
    assert difference([amx, torchs]).startswith("kernels: compiled on rank 0 and torch on rank 1;")


def test_difference_that_explains_the_others_is_reported_first() -> None:
    assert difference([options_of(exact=True), options_of(dtype="bfloat16")]).startswith(
        "exact: on on rank 0 and off on rank 1;"
    )
    assert difference([options_of(), options_of(digest="ab13", max_model_len=512)]).startswith("checkpoint digest")


def test_option_missing_in_another_version_is_a_difference() -> None:
    assert difference([options_of(), {**options_of(), "more": "1"}]).startswith("more: none on rank 0 and 1 on rank 1;")
    assert difference([{**options_of(), "more": "1"}, options_of()]).startswith("more: 1 on rank 0 and none on rank 1;")


def test_every_rank_reports_the_same_difference() -> None:
    store, received = DictStore(), {}

    def rank(number: int) -> None:
        try:
            agree(store, Ranks(number, 3, number, 3), options_of(block_size=16 if number < 2 else 32), 5.0)
        except StartupError as error:
            received[number] = error.message

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert received == dict.fromkeys(range(3), "block-size: 16 on rank 0 and 32 on rank 2; a worker's ranks must agree")


def test_silent_rank_is_named() -> None:
    with pytest.raises(StartupError, match=r"rank 1 has not published its options within 0\.1 s"):
        agree(DictStore(), Ranks(0, 2, 0, 2), options_of(), 0.1)


def test_closed_store_raises_rank_lost() -> None:
    class ClosedStore(DictStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand a stack")

    with pytest.raises(RankLost, match=r"lost the connection to the ranks' store: Connection reset by peer$"):
        agree(ClosedStore(), Ranks(0, 2, 0, 2), options_of(), 1.0)


def test_a_single_rank_needs_no_store() -> None:
    agree(None, Ranks(), options_of(), 1.0)  # type: ignore[arg-type]
