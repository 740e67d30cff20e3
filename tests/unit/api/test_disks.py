"""How much room there is, and disks that do not say."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.api.http import written
from sava.api.metrics import broker
from sava.api.metrics.broker import Disks
from sava.config import Config, check
from tests.support.waiting import until


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("meta", "journal", "segments"):
        (tmp_path / name).mkdir()
    return check(
        {
            "meta_store": {"data_dir": str(tmp_path / "meta")},
            "storage": {
                "journal_dir": str(tmp_path / "journal"),
                "url": (tmp_path / "segments").as_uri(),
            },
        },
        source="of the test",
    )


class Hanging:
    """The file system of the segments, which answers when it is let."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ask = shutil.disk_usage
        self.is_back = threading.Event()
        self.asked = 0

    def disk_usage(self, path: Path) -> Any:
        if path == self._path:
            self.asked += 1
            self.is_back.wait()
        return self._ask(path)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(tmp_path / "segments")
    monkeypatch.setattr(shutil, "disk_usage", hanging.disk_usage)
    monkeypatch.setattr(broker, "LOOK_S", 0.05)
    yield hanging
    hanging.is_back.set()


def uses(page: bytes) -> list[str]:
    return [line for line in page.decode().splitlines() if line.startswith("sava_disk_free_bytes{")]


async def test_a_hanging_disk_stops_no_broker_and_is_not_reported_as_full(
    config: Config, hanging: Hanging
) -> None:
    """Prometheus asks for /metrics; the NFS server of the segments is gone: the event loop waited for it,
    without heartbeats, keep-alives and deliveries, for as long as it was gone."""
    disks = Disks(config)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    working = asyncio.create_task(others())
    await disks.look()
    page = await written(disks)
    working.cancel()
    assert turns > 5
    told = uses(page)
    assert len(told) == 2
    assert not any("segments" in line for line in told)
    [unknown] = [room for room in await disks.look() if room.error]
    assert (unknown.use, unknown.error) == ("segments", "no answer within 0.05 s")


async def test_one_thread_waits_for_it_however_often_it_is_asked_for(
    config: Config, hanging: Hanging
) -> None:
    disks = Disks(config)
    await asyncio.gather(*(disks.look() for _ in range(20)))
    began = time.monotonic()
    for _ in range(20):
        await disks.look()
    assert time.monotonic() - began < 20 * broker.LOOK_S, "what is known to hang is not waited for again"
    assert hanging.asked == 1
    hanging.is_back.set()

    async def is_known() -> bool:
        return not any(room.error for room in await disks.look())

    await until(is_known, "it has answered")


async def test_a_directory_that_is_not_there_is_left_out(config: Config, tmp_path: Path) -> None:
    (tmp_path / "journal").rmdir()
    disks = Disks(config)
    await disks.look()
    assert not any("journal" in line for line in uses(await written(disks)))
