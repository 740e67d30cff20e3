"""A broker in a process of its own, for large topics: ``python -m tests.cluster.large_child broker …``.

It is the ``sava`` command, with two differences. Each message becomes a segment of its own, so that a
thousand segments take seconds and not hours. And it watches its event loop: a turn that takes long, in CPU
time of the thread and with the garbage collector, is a line in the file that ``SAVA_TURNS`` names (the time,
the milliseconds).
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sava.cli.main import main
from sava.server.broker import Broker
from sava.storage.uploader import Uploader

TICK_S: Final = 0.005
LONG_S: Final = 0.02


def _make_small_segments() -> None:
    original = Uploader.__init__

    def init(self: Uploader, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        self.options = replace(self.options, segment_bytes=1)

    Uploader.__init__ = init  # type: ignore[method-assign]


def _watch_turns(path: Path) -> None:
    original = Broker.start

    async def start(self: Broker) -> None:
        loop, last = asyncio.get_running_loop(), time.thread_time()

        def tick() -> None:
            nonlocal last
            now = time.thread_time()
            if now - last > LONG_S:
                with path.open("a") as file:
                    file.write(f"{time.time()} {1000 * (now - last)}\n")
            last = time.thread_time()
            loop.call_later(TICK_S, tick)

        tick()
        await original(self)

    Broker.start = start  # type: ignore[method-assign]


def run() -> None:
    _make_small_segments()
    _watch_turns(Path(os.environ["SAVA_TURNS"]))
    main()


if __name__ == "__main__":
    run()
