"""The disk by itself: a write and its sync, again and again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from bench.samples import Sample

SYNCS: Final = 300


def sync_many(path: Path, value: bytes, *, allocated: int) -> Sample:
    """At the growing end of a file, where the file's new size must become durable too; or inside so many
    bytes allocated before, where only the data must."""
    latencies = []
    started = time.perf_counter()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if allocated:
            os.pwrite(file, bytes(allocated), 0)
            os.fsync(file)
        for number in range(SYNCS):
            before = time.perf_counter()
            os.pwrite(file, value, number * len(value))
            os.fdatasync(file)
            latencies.append(time.perf_counter() - before)
    finally:
        os.close(file)
        path.unlink()
    return Sample(SYNCS, time.perf_counter() - started, latencies)
