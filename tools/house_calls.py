"""How many Python functions of Sava one append and one metadata put call, counted in real brokers.

``python -m tools.house_calls broker FILE COMMAND …`` runs the broker of COMMAND with a counter in every
thread; the counters stand in FILE, which is mapped into memory, so that another process reads them at any
moment. ``count`` starts such brokers and sends messages and puts one at a time. It reads the counters before
each and once the brokers are quiet after it, and takes the median: what timers, heartbeats and other tasks
add falls into few of the rounds and leaves the median alone. These brokers send their heartbeats rarely, so
that this holds on a busy machine too.

A call is the entry of a function whose source is in ``src/sava``. The return of a coroutine from its await is
none, nor is a comprehension (Python 3.12 has no frame for it); generated code and libraries do not count.

``python -m tools.house_calls`` prints which functions they are, with the calls of each per round.
"""

from __future__ import annotations

import asyncio
import ctypes
import dis
import itertools
import json
import mmap
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import yaml

SOURCE: Final = str(Path(__file__).resolve().parent.parent / "src" / "sava")
ROUNDS: Final = 200
WARM_UP: Final = 20
THREADS: Final = 512
"""Counters in the file, one for each thread that a broker ever starts."""
QUIET_S: Final = 0.004
"""A broker that called nothing for as long is done with the round: the ack comes before its last steps."""
LONGEST_S: Final = 0.1
RARELY: Final = {"heartbeat_interval_ms": 1_000, "election_timeout_ms": 5_000}
"""On a busy machine an append may last longer than the pause between two heartbeats: they are not its own."""
DUMP_S: Final = 0.5


# -- in the broker -------------------------------------------------------------------------------------------


def run(file: Path, command: list[str]) -> None:
    size = THREADS * ctypes.sizeof(ctypes.c_uint64)
    file.write_bytes(bytes(size))
    with file.open("r+b") as opened:
        cells = (ctypes.c_uint64 * THREADS).from_buffer(mmap.mmap(opened.fileno(), size))
    numbers = itertools.count()
    functions: list[Counter[CodeType]] = []
    starts: dict[CodeType, int] = {}

    def begin(frame: FrameType, event: str, argument: object) -> None:
        """The first event of a thread: from now on the thread counts in a cell of its own."""
        number = next(numbers)
        own: Counter[CodeType] = Counter()
        functions.append(own)

        def counted(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                code = frame.f_code
                start = starts.get(code)
                if start is None:
                    start = starts[code] = _start(code)
                if frame.f_lasti < start:
                    own[code] += 1
                    cells[number] += 1

        sys.setprofile(counted)

    def write() -> None:
        while True:
            time.sleep(DUMP_S)
            total: Counter[CodeType] = sum([each.copy() for each in functions], Counter())
            table: Counter[str] = Counter()
            for code, calls in total.items():
                table[f"{code.co_filename.removeprefix(SOURCE)[1:]:<30} {code.co_qualname}"] += calls
            part = file.with_suffix(".part")
            part.write_text(json.dumps(table))
            part.replace(file.with_suffix(".functions"))

    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(begin)
    sys.setprofile(begin)
    from sava.cli.main import main

    sys.argv = ["sava", *command[command.index("broker") :]]
    main()


def _start(code: CodeType) -> int:
    """A frame of the code that stands before this instruction is entered and not resumed; 0: not counted."""
    name = code.co_filename
    if not name.startswith(SOURCE) or "_pb2" in name or code.co_name.endswith(("comp>", "genexpr>")):
        return 0
    entry = next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
    return entry + 1


# -- outside -------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """What one append or put calls: the median of many, and the mean of each function."""

    calls: float
    functions: dict[str, float] = field(default_factory=dict)


async def walks() -> dict[str, Walk]:
    with tempfile.TemporaryDirectory(prefix="sava-house-") as name:
        return {
            "an append without mirrors": await _appends(Path(name) / "one", brokers=1),
            "an append with two mirrors": await _appends(Path(name) / "three", brokers=3),
            "a put from a follower": await _puts(Path(name) / "puts"),
        }


async def count() -> dict[str, tuple[float, float | None]]:
    goals = {
        "an append without mirrors": 65,
        "an append with two mirrors": 170,
        "a put from a follower": 800,
    }
    return {f"Python calls for {name}": (walk.calls, goals[name]) for name, walk in (await walks()).items()}


def _cluster(folder: Path, brokers: int) -> Any:
    from bench.broker_process import Broker
    from bench.trio import Trio

    trio = Trio(folder, nodes=brokers)
    trio.brokers = []
    for number in range(brokers):
        within = [sys.executable, "-m", "tools.house_calls", "broker", str(folder / f"calls-{number}")]
        trio.brokers.append(Broker(f"broker-{number}", folder, within=within))
        config = folder / f"broker-{number}.yaml"
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        tree["meta_store"] |= RARELY
        config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return trio


async def _appends(folder: Path, brokers: int) -> Walk:
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
            return await _walk(lambda: producer.send(b"x" * 100), [folder / f"calls-{owner}"])


async def _puts(folder: Path) -> Walk:
    """Calls in all three brokers."""
    async with _cluster(folder, 3) as trio:
        follower = (await trio.followers())[0]
        numbers = itertools.count()
        return await _walk(
            lambda: follower.put(f"/house/{next(numbers) % 16}", b"x" * 100),
            [folder / f"calls-{number}" for number in range(3)],
        )


async def _walk(act: Callable[[], Awaitable[object]], files: list[Path]) -> Walk:
    for _ in range(WARM_UP):
        await act()
    before = await _functions(files)
    rounds = []
    for _ in range(ROUNDS):
        began = await _quiet(files)
        await act()
        rounds.append(await _quiet(files) - began)
    after = await _functions(files)
    means = {name: (calls - before.get(name, 0)) / ROUNDS for name, calls in after.items()}
    return Walk(statistics.median(rounds), means)


async def _quiet(files: list[Path]) -> int:
    """The sum of all counters, once it stays the same."""
    deadline = time.monotonic() + LONGEST_S
    last = _total(files)
    while True:
        await asyncio.sleep(QUIET_S)
        now = _total(files)
        if now == last or time.monotonic() > deadline:
            return now
        last = now


def _total(files: list[Path]) -> int:
    return sum(sum(memoryview(file.read_bytes()).cast("Q")) for file in files)


async def _functions(files: list[Path]) -> Counter[str]:
    await asyncio.sleep(2 * DUMP_S)
    return sum((Counter(json.loads(file.with_suffix(".functions").read_text())) for file in files), Counter())


def main() -> None:
    for name, walk in asyncio.run(walks()).items():
        print(f"\n{name}: {walk.calls:g} calls (median of {ROUNDS})")
        for function, calls in sorted(walk.functions.items(), key=lambda each: -each[1]):
            if calls >= 0.05:
                print(f"{calls:8.2f}  {function}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["broker"]:
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
