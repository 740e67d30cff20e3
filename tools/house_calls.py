"""How many Python functions of Sava one append and one metadata put call, counted in real brokers.

``python -m tools.house_calls FILE COMMAND …`` runs the broker of COMMAND with a counter in every thread, and
writes the number into FILE ten times a second. ``count`` starts such brokers, sends messages and puts one
at a time, and takes off what the brokers do at rest in the same time. A function counts when its source is in
``src/sava``; generated code and libraries do not.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

SOURCE: Final = str(Path(__file__).resolve().parent.parent / "src" / "sava")
ROUNDS: Final = 300
WRITE_S: Final = 0.1
SETTLE_S: Final = 3.0


# -- in the broker -------------------------------------------------------------------------------------------


def run(file: Path, command: list[str]) -> None:
    counters: list[list[int]] = []
    is_ours: dict[object, bool] = {}

    def begin(frame: FrameType, event: str, argument: object) -> None:
        """The first event of a thread: from now on the thread counts in a cell of its own."""
        cell = [0]
        counters.append(cell)

        def counted(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                code = frame.f_code
                ours = is_ours.get(code)
                if ours is None:
                    name = code.co_filename
                    ours = is_ours[code] = name.startswith(SOURCE) and "_pb2" not in name
                cell[0] += ours

        sys.setprofile(counted)

    def write() -> None:
        while True:
            time.sleep(WRITE_S)
            part = file.with_suffix(".part")
            part.write_text(str(sum(cell[0] for cell in counters)))
            part.replace(file)

    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(begin)
    sys.setprofile(begin)
    from sava.cli.main import main

    sys.argv = ["sava", *command[command.index("broker") :]]
    main()


# -- outside -------------------------------------------------------------------------------------------------


async def count() -> dict[str, tuple[float, float | None]]:
    with tempfile.TemporaryDirectory(prefix="sava-house-") as name:
        alone = await _appends(Path(name) / "one", brokers=1)
        mirrored = await _appends(Path(name) / "three", brokers=3)
        put = await _puts(Path(name) / "puts")
    return {
        "Python calls for an append without mirrors": (round(alone), 65),
        "Python calls for an append with two mirrors": (round(mirrored), 170),
        "Python calls for a put from a follower": (round(put), 800),
    }


def _cluster(folder: Path, brokers: int) -> Any:
    from bench.broker_process import Broker
    from bench.trio import Trio

    trio = Trio(folder, nodes=brokers)
    trio.brokers = [
        Broker(
            f"broker-{number}",
            folder,
            within=[sys.executable, "-m", "tools.house_calls", str(folder / f"calls-{number}")],
        )
        for number in range(brokers)
    ]
    return trio


async def _appends(folder: Path, brokers: int) -> float:
    """Calls in the broker that owns the topic."""
    from sava.client import Client

    async with _cluster(folder, brokers) as trio:
        await trio.create("/default/house", reliable=True)
        (topic,) = await trio.summaries(trio.brokers[0])
        owner = next(
            number for number, each in enumerate(trio.brokers) if trio.id_of(each) == topic.broker_id
        )
        async with (
            Client(trio.addresses) as client,
            client.producer("/default/house", linger_ms=0) as producer,
        ):
            return await _per_round(lambda: producer.send(b"x" * 100), [folder / f"calls-{owner}"])


async def _puts(folder: Path) -> float:
    """Calls in all three brokers."""
    async with _cluster(folder, 3) as trio:
        follower = (await trio.followers())[0]
        numbers = itertools.count()
        return await _per_round(
            lambda: follower.put(f"/house/{next(numbers) % 16}", b"x" * 100),
            [folder / f"calls-{number}" for number in range(3)],
        )


async def _per_round(act: Callable[[], Awaitable[object]], files: list[Path]) -> float:
    for _ in range(20):
        await act()
    await asyncio.sleep(SETTLE_S)
    began, before = time.monotonic(), await _total(files)
    for _ in range(ROUNDS):
        await act()
    after, took = await _total(files), time.monotonic() - began
    await asyncio.sleep(SETTLE_S)
    began, before_rest = time.monotonic(), await _total(files)
    await asyncio.sleep(SETTLE_S)
    rest = (await _total(files) - before_rest) / (time.monotonic() - began)
    return (after - before - rest * took) / ROUNDS


async def _total(files: list[Path]) -> int:
    await asyncio.sleep(3 * WRITE_S)
    return sum(int(file.read_text()) for file in files)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
