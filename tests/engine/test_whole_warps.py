"""What counts as reached by a part of a warp only."""

from __future__ import annotations

import pytest

from tests.support.whole_warps import partly_reached

ENTRY = """define ptx_kernel void @kernel(ptr addrspace(1) %0, i32 %1) local_unnamed_addr #0 !dbg !4 {
  %3 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x(), !dbg !7
  %4 = and i32 %3, 31
"""
BARRIER = "  tail call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0), !dbg !8\n"
SHUFFLE = "  %9 = tail call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 %4, i32 16, i32 31)\n"


def kernel(condition: str, first: str = "", second: str = "", joined: str = "", skip: str = "8") -> str:
    """Two ways: %6, then `skip`, and %7; they meet in %8."""
    return (
        f"{ENTRY}  %5 = {condition}\n  br i1 %5, label %6, label %7, !dbg !9\n"
        f"\n6:                     ; preds = %2\n{first}  br label %{skip}\n"
        f"\n7:                     ; preds = %2\n{second}  br label %8\n"
        f"\n8:                     ; preds = %7, %6\n{joined}  ret void\n}}\n"
    )


BY_THREAD = "icmp eq i32 %4, 0"
BY_SCALAR = "icmp eq i32 %1, 0"


@pytest.mark.parametrize("instruction", [BARRIER, SHUFFLE, '  call void asm sideeffect "bar.sync 0;", ""()\n'])
def test_instruction_of_one_way_of_a_divided_warp_is_found(instruction: str) -> None:
    assert partly_reached(kernel(BY_THREAD, first=instruction)) == [instruction.split(", !dbg")[0].strip()]
    assert partly_reached(kernel(BY_THREAD, second=instruction))


def test_whole_warp_reaches_what_a_scalar_decides_and_what_follows_where_ways_meet() -> None:
    assert not partly_reached(kernel(BY_SCALAR, first=BARRIER, second=SHUFFLE, joined=BARRIER))
    assert not partly_reached(kernel(BY_THREAD, joined=BARRIER + SHUFFLE))


def test_jump_past_the_place_where_threads_join_is_found() -> None:
    """As LLVM redirects it: the barrier has a new way in, and the other way of the branch no longer meets it there."""
    threaded = kernel(BY_THREAD, joined=BARRIER, skip="10").replace(
        "  ret void\n}", "  ret void\n\n10:                   ; preds = %6\n  ret void\n}"
    )
    assert len(partly_reached(threaded)) == 1


def test_results_of_shuffles_are_scalars_and_what_threads_load_is_not() -> None:
    reduced = kernel("icmp sgt i32 %9, 0", first=BARRIER).replace("  %5 = ", SHUFFLE + "  %5 = ")
    assert not partly_reached(reduced)
    loads = "  %10 = getelementptr i32, ptr addrspace(1) %0, i32 %4\n  %11 = load i32, ptr addrspace(1) %10\n"
    loaded = kernel("icmp sgt i32 %11, 0", first=BARRIER).replace("  %5 = ", loads + "  %5 = ")
    assert len(partly_reached(loaded)) == 1
    assert not partly_reached(loaded.replace("i32 %4\n", "i32 %1\n"))


def test_every_target_of_a_switch_is_followed() -> None:
    switched = kernel(BY_THREAD, second=BARRIER).replace(
        "  br i1 %5, label %6, label %7, !dbg !9\n",
        "  switch i32 %4, label %6 [\n    i32 0, label %8\n    i32 1, label %7\n  ]\n",
    )
    assert len(partly_reached(switched)) == 1
