"""A broker's storage that starts the process of its segments, says which one it is, and waits for its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sava.storage import segment_process
from sava.storage.broker_storage import StorageOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.uploader import UploadOptions
from tests.support.storage import TOPIC, Cluster, append_each


async def main(path: Path) -> None:
    (path / "objects").mkdir()
    cluster = Cluster(path, store=ObjectStore.open((path / "objects").as_uri()))
    segment_process.WORTH_BYTES = 0  # type: ignore[misc]
    storage = await cluster.start(options=StorageOptions(upload=UploadOptions(has_process=True)))
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 1)
    await storage.uploader.flush(log._backlog, 1)
    process = storage.uploader._process
    assert process is not None
    print(process.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
