"""A disk that is really full: a small filesystem in memory, mounted for the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sava.storage.broker_storage import StorageOptions
from sava.storage.journal import JournalOptions
from sava.storage.topic_log import TopicLog
from sava.storage.uploader import UploadOptions
from sava.wal import DiskFull
from tests.support.storage import TOPIC, Cluster, batch

OPTIONS = StorageOptions(
    cache_bytes=0,
    journal=JournalOptions(file_bytes=256 << 10),
    upload=UploadOptions(segment_age_s=3600),
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small filesystem takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def append_until_full(log: TopicLog, payloads: list[str], size: int) -> None:
    """Several at a time, so that some are in flight behind the one that is refused."""
    while True:
        wanted = [f"{len(payloads) + n}:" + "x" * size for n in range(8)]
        outcomes = await asyncio.gather(*(log.append(batch(each)) for each in wanted), return_exceptions=True)
        for payload, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, DiskFull):
                return
            assert outcome == len(payloads)
            payloads.append(payload)


async def read_all(log: TopicLog) -> list[str]:
    return [payload.decode() async for each in log.read(0) for payload in each.payloads()]


async def test_a_full_disk_refuses_serves_reads_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    cluster, payloads = Cluster(small_disk), list[str]()
    async with cluster.broker(options=OPTIONS) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_until_full(log, payloads, 10_000)
        assert len(payloads) > 100
        assert log.next_offset == log.assigned_offset == len(payloads)
        assert await read_all(log) == payloads
        await append_until_full(log, payloads, 100)
        assert await read_all(log) == payloads

        await log._parts.uploader.flush(log._backlog, len(payloads))  # into the object store, elsewhere
        while True:  # the trim is under way
            try:
                assert await log.append(batch("room again")) == len(payloads)
                break
            except DiskFull:
                await asyncio.sleep(0.001)
        payloads.append("room again")
        assert await read_all(log) == payloads
        assert not cluster.failures
    async with cluster.broker(options=OPTIONS) as storage:
        assert await read_all(await storage.open_topic(TOPIC, epoch=2)) == payloads
