"""Disks: how much room there is where a broker writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.config import Config


class DiskRoom(NamedTuple):
    """Of the file system that a directory is on."""

    use: str
    path: Path
    size: int
    free: int
    """What an ordinary user may still write."""
    error: str


def rooms(config: Config) -> list[DiskRoom]:
    """Of the metadata store, the journal, and the segments if they are files."""
    places = {"metadata": config.meta_store.data_dir, "journal": config.storage.journal_dir}
    url = urlsplit(config.storage.url)
    if url.scheme == "file":
        places["segments"] = Path(unquote(url.path))
    return [_room(use, path) for use, path in places.items()]


def _room(use: str, path: Path) -> DiskRoom:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return DiskRoom(use, path, 0, 0, error.strerror or str(error))
    return DiskRoom(use, path, usage.total, usage.free, "")


class DisksCollector(Collector):
    """A disk that cannot be looked at is left out: it is not one without room."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def collect(self) -> Iterable[Metric]:
        size = GaugeMetricFamily(
            "sava_disk_size_bytes", "Size of the file system that a directory is on.", labels=("use",)
        )
        free = GaugeMetricFamily("sava_disk_free_bytes", "What may still be written there.", labels=("use",))
        for room in rooms(self._config):
            if not room.error:
                size.add_metric((room.use,), room.size)
                free.add_metric((room.use,), room.free)
        yield size
        yield free
