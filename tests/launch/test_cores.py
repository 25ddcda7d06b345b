import pytest

from launch.cores import Placement, assign_gpus, place


def test_two_cores_one_prefill_one_decode() -> None:
    assert place([1, 1], [0, 1]) == (Placement((0,), 1), Placement((1,), 1))


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "expected"),
    [
        ([1, 1], [0, 1, 2, 3, 4], 0, [((0, 1, 2), 3), ((3, 4), 2)]),  # what is left over goes to the first
        ([1, 1, 1], [4, 7], 0, [((4,), 1), ((7,), 1), ((4,), 1)]),  # fewer cores than workers: in turn
        ([1, 1], [0, 1, 2, 3], 1, [((0,), 1), ((1,), 1)]),
        ([1, 1], [0, 1, 2, 3], 2, [((0, 1), 2), ((2, 3), 2)]),
        ([1, 1], [0, 1, 2], 2, [((0, 1), 2), ((0, 2), 2)]),  # explicit threads are kept, cores shared
        ([1], [0, 1], 8, [((0, 1), 8)]),
        ([], [0], 0, []),
        ([2, 1], [0, 1, 2, 3, 4, 5], 0, [((0, 1, 2, 3), 4), ((4, 5), 2)]),
        ([2, 1], [0, 1, 2, 3], 0, [((0, 1, 2), 3), ((3,), 1)]),
        ([2, 1], [0, 1], 0, [((0, 1), 2), ((0,), 1)]),  # one thread for each rank
        ([4, 1, 2], [0, 1], 0, [((0, 1), 4), ((0,), 1), ((0, 1), 2)]),
    ],
)
def test_placement(
    ranks: list[int], cores: list[int], threads: int, expected: list[tuple[tuple[int, ...], int]]
) -> None:
    assert [(p.cores, p.threads) for p in place(ranks, cores, threads)] == expected


def test_no_core_is_given_twice_while_there_are_enough() -> None:
    for cores in range(1, 20):
        for workers in range(1, cores + 1):
            given = [core for p in place([1] * workers, range(cores)) for core in p.cores]
            assert sorted(given) == list(range(cores))


def test_in_words() -> None:
    assert str(Placement((0,), 1)) == "core 0, 1 thread"
    assert str(Placement((0, 1, 2, 5), 4)) == "cores 0-2,5, 4 threads"


def test_gpus_in_turn() -> None:
    assert assign_gpus([1, 1, 1], ["0", "1"]) == ("0", "1", "0")
    assert assign_gpus([2, 1, 2], ["0", "1", "2"]) == ("0,1", "2", "0,1")
    assert assign_gpus([1, 1], []) == ("", "")
