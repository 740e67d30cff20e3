"""What a broker process does before it serves, and when it is asked to stop."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from sava.config import Config
from sava.server import Broker, process
from tests.patience import FAR_S, PATIENCE_S
from tests.ports import free_ports


def test_it_takes_as_many_open_files_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell starts it with a limit of 1024 files, and a thousand clients connect. Then the journal is to go
    on in its next file, which cannot be opened: the broker stops."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def run(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    monkeypatch.setattr("uvloop.run", run)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        may_have = process.run(Config())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert may_have == (process.OPEN_FILES if hard < 0 else min(process.OPEN_FILES, hard))


class Leaving:
    """A broker whose topics do not go to others."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.was_cancelled = False

    async def leave(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_a_second_signal_ends_the_hand_over_that_the_first_one_began() -> None:
    broker, hurry = Leaving(), asyncio.Event()
    leaving = asyncio.create_task(process._leave(cast(Broker, broker), hurry, FAR_S))
    async with asyncio.timeout(PATIENCE_S):
        await broker.began.wait()
        hurry.set()
        await leaving
    assert broker.was_cancelled


async def test_a_hand_over_that_hangs_does_not_keep_the_broker_from_stopping() -> None:
    broker = Leaving()
    async with asyncio.timeout(PATIENCE_S):
        await process._leave(cast(Broker, broker), asyncio.Event(), 0.05)
    assert broker.was_cancelled


async def test_a_hand_over_that_fails_does_not_keep_the_broker_from_stopping() -> None:
    class Failing:
        async def leave(self) -> None:
            raise RuntimeError("a bug")

    async with asyncio.timeout(PATIENCE_S):
        await process._leave(cast(Broker, Failing()), asyncio.Event(), FAR_S)


FIRST_SEGMENT = """
import asyncio, sys
from pathlib import Path
from sava import config
from sava.records import RecordBatch
from sava.server import Broker
from sava.storage import segment_file
from sava.storage.types import TopicKey

async def main(folder):
    tree = {
        "broker": {"ports": dict(zip(("client", "admin", "raft", "prometheus"), map(int, sys.argv[2:])))},
        "meta_store": {"data_dir": str(folder / "meta")},
        "storage": {"url": (folder / "segments").as_uri(), "journal_dir": str(folder / "journal")},
    }
    broker = Broker(config.check(tree, source="a test"))
    await broker.start()
    before = set(sys.modules)
    batch = RecordBatch.encode([b"a", b"b"], publish_time=[1, 2], attributes=[{"k": "v"}, {}])
    batch = batch.assigned(topic_id=7, epoch=1, base_offset=0)
    segment_file.encode(TopicKey("default", "orders", 7), 1, [RecordBatch.parse(batch.to_bytes())])
    print("imported", len(set(sys.modules) - before))
    await broker.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_the_first_segment_of_a_broker_needs_no_import(tmp_path: Path) -> None:
    """pyarrow imports pandas when it first turns Python values into an array. The first segment that a broker
    made could be the tail of a dead broker's topic: the import held the interpreter, and the event loop with
    it, in the middle of a failover (0.3 s of processor time; 2 s were measured on a busy machine). A broker
    pays this before it takes part in anything."""
    command = [sys.executable, "-c", FIRST_SEGMENT, str(tmp_path), *map(str, free_ports(4))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "imported 0" in done.stdout.splitlines()
