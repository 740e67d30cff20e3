"""Gigabytes through one broker's storage, in a process of its own so that nothing else counts as its memory:
``python -m bench.through FOLDER BYTES`` prints the figures as JSON.

Append, follow and upload go on at the same time, with the default settings; a thread watches the memory. The
code of the libraries is not counted: it is mapped from files, shared, and given back when memory is short."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
from pathlib import Path

import uvloop

from bench.storage_place import append_many, place, received, thousand, thousands
from sava.storage.broker_storage import StorageOptions


async def through(folder: Path, total: int) -> dict[str, float]:
    count = total // thousand().header.length
    before, stop, peaks = _held(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            peaks[0] = max(peaks[0], _held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        async with place(folder) as here, here.broker(StorageOptions()) as storage:
            log = await here.topic(storage)

            async def follow() -> None:
                async for each in log.tail(0):
                    if each.next_offset == count * 1000:
                        return

            follower = asyncio.create_task(follow())
            seconds = await append_many(log, received(thousands()), count, 32)
            await follower
    finally:
        stop.set()
        watcher.join()
    return {"before": before, "peak": peaks[0], "seconds": seconds}


def _held() -> int:
    resident, mapped = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - mapped) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(uvloop.run(through(Path(sys.argv[1]), int(sys.argv[2])))))
