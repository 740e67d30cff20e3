"""What no broker can be faster than: bare gRPC calls to ``bench.echo``, and bare syncs of the disk."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from bench import echo_client
from bench.disk import sync_many
from bench.samples import Sample
from bench.workers import serve


class Jobs:
    def __init__(self, address: str) -> None:
        self._address = address

    async def unary(self, size: int, in_flight: int, seconds: float) -> dict[str, Any]:
        value = os.urandom(size)
        return _fields(await echo_client.unary(self._address, value, in_flight=in_flight, seconds=seconds))

    async def stream(self, size: int, seconds: float) -> dict[str, Any]:
        """One message in flight."""
        return _fields(
            await echo_client.stream(self._address, os.urandom(size), in_flight=1, seconds=seconds)
        )

    async def syncs(self, folder: str, size: int) -> dict[str, Any]:
        """At the end of a file that grows: a log without room ahead (Sava's journal has some)."""
        path = Path(folder) / "syncs"
        return _fields(await asyncio.to_thread(sync_many, path, os.urandom(size), allocated=0))


def _fields(sample: Sample) -> dict[str, Any]:
    return {"count": sample.count, "seconds": sample.seconds, "latencies": sample.latencies}


if __name__ == "__main__":
    uvloop.run(serve(Jobs(sys.argv[1])))
