"""What a real broker tells Prometheus of its disk and its journal."""

from __future__ import annotations

from pathlib import Path

from sava.client import Client
from sava.doctor.observation import parsed
from sava.doctor.reach import fetch
from tests.standalone import Standalone


async def test_disks_and_the_journal_are_told_of(tmp_path: Path) -> None:
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client, client.producer("/default/orders") as producer:
            await producer.send_many([b"x" * 1000] * 100)
        told = parsed(await fetch(f"127.0.0.1:{broker.http_port}", "/metrics"))
    free = {labels["use"]: value for labels, value in told["sava_disk_free_bytes"]}
    size = {labels["use"]: value for labels, value in told["sava_disk_size_bytes"]}
    assert free.keys() == size.keys() == {"metadata", "journal", "segments"}
    assert all(0 < free[use] < size[use] for use in free)
    [(_, syncs)] = told["sava_journal_sync_seconds_count"]
    [(_, written)] = told["sava_journal_sync_bytes_sum"]
    assert syncs >= 1
    assert written >= 100_000
