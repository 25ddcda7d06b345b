"""Bad clients beside good streams on a real cluster: they leave nothing allocated, and no good stream fails."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import bad_clients
from benchmarks.bad_clients import compare, kinds, report, run
from tests.support.forks import start

AT_ONCE = ("no HTTP", "a head without an end", "a body over its limit", "deep JSON", "a join of a stranger")


@pytest.mark.cluster
@pytest.mark.timeout(2700)  # 600 s are ten rounds of 90 s alone, and of 200 s beside other tests
@pytest.mark.parametrize("seconds", [2.0, pytest.param(600.0, marks=pytest.mark.long)])
def test_bad_clients_leak_nothing_and_fail_no_stream(seconds: float, tmp_path: Path) -> None:
    found = run(seconds, tmp_path / "run", idle=seconds > 60.0, start=start if seconds < 60.0 else subprocess.Popen)
    text = report(found, seconds)
    print(text)
    assert not found.left and not found.failed, text
    assert all(found.calm) and all(found.asked) and all(found.beside)
    assert all(found.ended.get(name) for name in AT_ONCE), text  # each kind that is refused at once has ended
    if seconds > 60.0:
        assert found.ended.keys() == kinds(None).keys(), text  # type: ignore[arg-type]  # a name needs no port
    ends = {how for counts in found.ended.values() for how in counts}
    assert not ends & {"still open", "served", "taken in", "OK", "500"}, text


async def test_a_client_that_could_not_run_sees_that_its_connection_was_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bad_clients, "PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader, writer = await asyncio.open_connection(*server.getsockname()[:2])
        waiting = asyncio.create_task(bad_clients.ending(reader))
        await asyncio.sleep(0.1)
        server.accept()[0].close()
        time.sleep(1.5)  # as on a busy machine, longer than its patience
        assert await waiting == "closed"
        writer.close()
        reader, writer = await asyncio.open_connection(*server.getsockname()[:2])
        assert await bad_clients.ending(reader) == "still open"
        writer.close()


def test_leaked_resources_are_named() -> None:
    before = {"requests": 0.0, "tasks": 20.0, "open files": 30.0, "resident MiB": 100.0}
    assert compare(before, before) == []
    assert compare(before, before | {"open files": 34.0, "resident MiB": 140.0}) == []
    assert compare(before, before | {"tasks": 21.0}) == ["tasks: 20 before, 21 after"]
    assert compare(before, before | {"decode-0 sequences": 2.0}) == ["decode-0 sequences: 0 before, 2 after"]
