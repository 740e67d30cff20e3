"""Disks: how much room there is where a broker writes.

A file system that hangs (NFS whose server is gone) answers no question about itself, and whoever has asked
waits for as long as it hangs. So it is asked on a thread, an answer is waited for only so long, and nobody
asks again before the question that is under way was answered: a thread for each directory waits, however
often somebody wants to know. What is not known is left out, and not told as a disk without room.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.config import Config

LOOK_S: Final = 1.0
"""A disk that works answers within a millisecond."""


class DiskRoom(NamedTuple):
    """Of the file system that a directory is on."""

    use: str
    path: Path
    size: int
    free: int
    """What an ordinary user may still write."""
    error: str
    """Why the rest is not known."""


class Disks(Collector):
    """Of the metadata store, the journal, and the segments if they are files. Owned by the event loop."""

    def __init__(self, config: Config) -> None:
        self._places = {"metadata": config.meta_store.data_dir, "journal": config.storage.journal_dir}
        url = urlsplit(config.storage.url)
        if url.scheme == "file":
            self._places["segments"] = Path(unquote(url.path))
        self._asking: dict[str, tuple[asyncio.Future[DiskRoom], float]] = {}
        """What was not answered yet, and until when that is waited for."""
        self._seen: list[DiskRoom] = []

    async def look(self) -> list[DiskRoom]:
        for use in self._places.keys() - self._asking.keys():
            self._ask(use)
        asking, now = dict(self._asking), asyncio.get_running_loop().time()
        waits = {answer: until - now for answer, until in asking.values() if until > now}
        if waits:
            await asyncio.wait(waits, timeout=max(waits.values()))
        self._seen = [self._answered(use, asking[use][0]) for use in self._places]
        return self._seen

    def _ask(self, use: str) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[DiskRoom] = loop.create_future()
        answer.add_done_callback(lambda _: self._asking.pop(use, None))
        self._asking[use] = answer, loop.time() + LOOK_S

        def ask() -> None:
            room = _room(use, self._places[use])
            with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(answer.set_result, room)

        # A daemon, and not one of a pool: a process can end without it, and no other work waits behind it.
        threading.Thread(target=ask, name=f"sava-disk-{use}", daemon=True).start()

    def _answered(self, use: str, answer: asyncio.Future[DiskRoom]) -> DiskRoom:
        if answer.done():
            return answer.result()
        return DiskRoom(use, self._places[use], 0, 0, f"no answer within {LOOK_S:g} s")

    def collect(self) -> Iterable[Metric]:
        """As it was at the last look."""
        size = GaugeMetricFamily(
            "sava_disk_size_bytes", "Size of the file system that a directory is on.", labels=("use",)
        )
        free = GaugeMetricFamily("sava_disk_free_bytes", "What may still be written there.", labels=("use",))
        for room in self._seen:
            if not room.error:
                size.add_metric((room.use,), room.size)
                free.add_metric((room.use,), room.free)
        yield size
        yield free


def _room(use: str, path: Path) -> DiskRoom:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return DiskRoom(use, path, 0, 0, error.strerror or str(error))
    return DiskRoom(use, path, usage.total, usage.free, "")
