"""A cluster of one broker, as ``sava broker --standalone`` starts it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bench.processes import Child, free_ports
from bench.servers import Server, listening


@contextlib.asynccontextmanager
async def standalone_broker(folder: Path, **settings: str) -> AsyncIterator[Server]:
    """Default settings, but for where it listens and keeps its data, below ``folder``, and those that are
    given, as in the environment."""
    ports = free_ports(4)
    options = zip(("--port", "--admin-port", "--raft-port", "--http-port"), map(str, ports), strict=True)
    where = [
        "--data-dir",
        str(folder / f"broker-{ports[0]}"),
        *(part for option in options for part in option),
    ]
    child = Child(
        [sys.executable, *_program(), "broker", "--standalone", *where],
        folder / f"broker-{ports[0]}.log",
        settings,
    )
    try:
        await listening(child, ports[0])
        yield Server(f"127.0.0.1:{ports[0]}", child, admin=f"127.0.0.1:{ports[1]}")
    finally:
        await child.stop()


def _program() -> list[str]:
    """The command ``sava``; for ``SAVA_BENCH_PROFILE`` see ``bench.workers``."""
    if not (target := os.environ.get("SAVA_BENCH_PROFILE")):
        return ["-m", "sava.cli"]
    output = str(Path(target) / f"broker-{os.urandom(2).hex()}.prof")
    return ["-m", "bench.profiled", output]
