"""A pytest plugin for several test processes: each collects a file when it runs it, and no others.

With xdist every process collects all tests first, which takes 23 s of processor time in each. Here collection makes one
item per file, in an order in which files whose tests start clusters are spread among the others: three clusters that
start at the same time on two cores slow each other down. When its turn comes the item collects the tests of its file,
as pytest would have, and runs them one after another. Their reports are those of ordinary tests.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_MANY_MODULES = 200
_CLUSTERS_END, _LONG_END = 0.9, 0.7
"""The shares of all files after which no cluster, and no long file, is left to run: a long file at the end would run
alone."""
_LONG = (  # over 20 s of processor time, or that wait long and would run last, of those outside tests/cluster; the
    # first one compiles kernels for others, too
    "tests/engine/test_kernels_attention.py",
    "tests/engine/test_load_memory.py",
    "tests/sim/test_safety.py",
    "tests/sim/test_liveness.py",
    "tests/engine/test_parallel_transformers.py",
    "tests/benchmarks/test_gpu_script.py",
    "tests/launch/test_up.py",
    "tests/engine/test_transformers.py",
    "tests/benchmarks/test_bad_clients.py",
    "tests/launch/test_torchrun.py",
    "tests/tools/test_by_file.py",
    "tests/tools/test_processor_time.py",
    "tests/transfer/test_cycle.py",
    "tests/transfer/test_stopped_store.py",
)


class OneFile(pytest.File):
    def collect(self) -> Iterator[FileItem]:
        item = FileItem.from_parent(self, name="tests")
        item.add_marker(pytest.mark.timeout(0))  # each of its tests has a limit
        yield item


class FileItem(pytest.Item):
    """All tests of a file. Its id is that of the test that runs, `running`: xdist compares it with that of a report."""

    running = ""

    @property
    def nodeid(self) -> str:
        return self.running or super().nodeid

    def runtest(self) -> None:
        raise NotImplementedError("pytest_runtest_protocol runs the tests")

    def run_tests(self, nextitem: pytest.Item | None) -> None:
        file, session, before = self.parent, self.session, len(sys.modules)
        assert file is not None and file.parent is not None
        module = pytest.Module.from_parent(file.parent, path=self.path)
        tests = list(session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=tests)
        if len(sys.modules) > before + _MANY_MODULES:
            _freeze()
        if not tests:
            session._setupstate.teardown_exact(nextitem)
        for number, test in enumerate(tests, 1):
            self.running = test.nodeid
            following = tests[number] if number < len(tests) else nextitem
            self.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        self.running = ""


def _freeze() -> None:
    """Excludes what was imported from garbage collection, as tests/conftest.py does after collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> OneFile:
    return OneFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Keeps files out of what -m and -k deselect by the names and markers of tests."""
    files = [item for item in items if isinstance(item, FileItem)]
    if not files:
        return (yield)
    items.clear()
    yield
    items += spread(files)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, FileItem):
        return None
    item.run_tests(nextitem)
    return True


def spread(files: list[FileItem]) -> list[FileItem]:
    """Distributes the files of tests/cluster evenly over the first part of the others, and so the long ones."""
    groups: dict[float, list[FileItem]] = {_LONG_END: [], _CLUSTERS_END: [], 1.0: []}
    for file in files:
        name = file.path.relative_to(ROOT).as_posix() if file.path.is_relative_to(ROOT) else ""
        long, cluster = name in _LONG, file.path.parent.name == "cluster"
        groups[_LONG_END if long else _CLUSTERS_END if cluster else 1.0].append(file)
    groups[_LONG_END].sort(key=lambda file: _LONG.index(file.path.relative_to(ROOT).as_posix()))
    places = {file: until * n / len(some) for until, some in groups.items() for n, file in enumerate(some)}
    return sorted(files, key=places.__getitem__)
