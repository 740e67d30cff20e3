"""Group commit: order, grouping, the mark, a full disk, a failed disk, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from random import Random

import pytest

from sava.wal import (
    Disk,
    DiskFailed,
    DiskFull,
    Log,
    LogBusy,
    LogClosed,
    LogCorrupt,
    LogOptions,
    RecordTooLarge,
    Writer,
)
from sava.wal.format import FRAME_BYTES, file_name
from tests.sim.disk import CrashPolicy, SimDisk
from tests.support.waiting import PATIENCE_S
from tests.unit.wal.helpers import open_log, recovered_payloads

NEVER = 1000.0


class Gate:
    """Holds the writer's thread at one kind of operation of the simulated disk until opened."""

    def __init__(self, disk: SimDisk, operation: str) -> None:
        self._operation = operation
        self._open = threading.Event()
        self.reached = threading.Event()
        disk.on_operation(self._pass)

    def _pass(self, operation: str) -> None:
        if operation == self._operation:
            self.reached.set()
            self._open.wait()

    def open(self) -> None:
        self._open.set()


class Outcomes:
    """Collects completions in the order in which they come."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()

    def of(self, tag: object) -> Callable[[BaseException | None], None]:
        return lambda outcome: self._queue.put((tag, outcome))

    def next(self) -> tuple[object, BaseException | None]:
        return self._queue.get(timeout=PATIENCE_S)

    def is_empty(self) -> bool:
        return self._queue.empty()


@contextmanager
def writing(disk: Disk, *, max_queued_bytes: int = 64 << 20, idle_mark_s: float = NEVER) -> Iterator[Writer]:
    writer = Writer(
        open_log(disk),
        deliver=lambda complete: complete(),
        max_queued_bytes=max_queued_bytes,
        idle_mark_s=idle_mark_s,
    )
    try:
        yield writer
    finally:
        writer.close()


def one(payload: bytes) -> list[tuple[int, list[bytes]]]:
    return [(1, [payload])]


def test_completions_come_in_order_and_after_the_sync(disk: Disk) -> None:
    outcomes = Outcomes()
    with writing(disk) as writer:
        for n in range(500):
            writer.append(one(b"%d" % n), outcomes.of(n))
        assert [outcomes.next() for _ in range(500)] == [(n, None) for n in range(500)]
    assert recovered_payloads(disk) == [b"%d" % n for n in range(500)]


def test_nobody_is_told_before_the_sync(sim: SimDisk) -> None:
    outcomes = Outcomes()
    with writing(sim) as writer:
        gate = Gate(sim, "sync")
        writer.append(one(b"x"), outcomes.of("x"))
        gate.reached.wait(10)
        assert outcomes.is_empty()
        gate.open()
        assert outcomes.next() == ("x", None)
        assert recovered_payloads(sim.clone().crash(CrashPolicy.LOSE)) == [b"x"]


def test_what_arrives_during_a_sync_shares_the_next_one(sim: SimDisk) -> None:
    outcomes = Outcomes()
    deliveries = []
    log = open_log(sim)

    def deliver(complete: Callable[[], None]) -> None:
        deliveries.append(1)
        complete()

    writer = Writer(log, deliver=deliver, idle_mark_s=NEVER)
    gate = Gate(sim, "sync")
    before = sim.counts.copy()
    writer.append(one(b"first"), outcomes.of(0))
    gate.reached.wait(10)
    for n in range(1, 101):
        writer.append(one(b"%d" % n), outcomes.of(n))
    gate.open()
    assert [outcomes.next() for _ in range(101)] == [(n, None) for n in range(101)]
    assert sim.counts["sync"] - before["sync"] == 2
    assert sim.counts["write"] - before["write"] == 2
    assert len(deliveries) == 2
    writer.close()


def test_positions_are_told_before_completion(sim: SimDisk) -> None:
    outcomes = Outcomes()
    with writing(sim) as writer:
        positions: list[int] = []
        for n in range(3):
            writer.append(one(b"a%d" % n) + one(b"b%d" % n), outcomes.of(n), positions=positions)
        for n in range(3):
            assert outcomes.next() == (n, None)
        found: list[bytes] = []
        writer.run(lambda log: found.extend(log.read(at).payload for at in positions), outcomes.of("read"))
        assert outcomes.next() == ("read", None)
        assert found == [b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]


def test_an_action_runs_after_what_was_queued_before_is_durable(sim: SimDisk) -> None:
    outcomes = Outcomes()
    seen: list[tuple[int, int]] = []
    with writing(sim) as writer:
        gate = Gate(sim, "sync")
        writer.append(one(b"0"), outcomes.of(0))
        gate.reached.wait(10)
        writer.append(one(b"1"), outcomes.of(1))
        writer.run(lambda log: seen.append((log.durable_end, log.end)), outcomes.of("action"))
        writer.append(one(b"2"), outcomes.of(2))
        gate.open()
        assert [outcomes.next()[0] for _ in range(4)] == [0, 1, "action", 2]
    (durable_end, end), *_ = seen
    assert durable_end == end


def test_an_action_that_raises_tells_only_its_caller(sim: SimDisk) -> None:
    outcomes = Outcomes()

    def refuse(_: Log) -> None:
        raise KeyError("mine")

    with writing(sim) as writer:
        writer.run(refuse, outcomes.of("action"))
        writer.append(one(b"x"), outcomes.of("x"))
        tag, error = outcomes.next()
        assert tag == "action"
        assert isinstance(error, KeyError)
        assert outcomes.next() == ("x", None)


def test_what_an_action_appends_is_durable_before_its_completion(sim: SimDisk) -> None:
    def append_one(log: Log) -> None:
        log.append(1, [b"x"])

    outcomes = Outcomes()
    with writing(sim) as writer:
        writer.run(append_one, outcomes.of("action"))
        assert outcomes.next() == ("action", None)
        assert recovered_payloads(sim.clone().crash(CrashPolicy.LOSE)) == [b"x"]


def test_a_full_disk_refuses_only_what_does_not_fit(sim: SimDisk) -> None:
    outcomes = Outcomes()
    with writing(sim) as writer:
        gate = Gate(sim, "sync")
        writer.append(one(b"first"), outcomes.of("first"))
        gate.reached.wait(10)
        writer.append(one(b"small"), outcomes.of("small"))
        writer.append(one(b"fits") + one(b"L" * 10_000), outcomes.of("large"))
        writer.append(one(b"also small"), outcomes.of("also small"))
        sim.set_capacity(sim.used + 1000)
        gate.open()

        told = dict(outcomes.next() for _ in range(4))
        assert list(told) == ["first", "small", "large", "also small"]
        assert isinstance(told.pop("large"), DiskFull)
        assert set(told.values()) == {None}

        sim.set_capacity(None)
        writer.append(one(b"L" * 10_000), outcomes.of("again"))
        assert outcomes.next() == ("again", None)
    assert recovered_payloads(sim) == [b"first", b"small", b"also small", b"L" * 10_000]


def test_a_failed_sync_is_final_for_all_that_wait_and_all_that_come(sim: SimDisk) -> None:
    outcomes = Outcomes()
    with writing(sim) as writer:
        gate = Gate(sim, "sync")
        writer.append(one(b"0"), outcomes.of(0))
        gate.reached.wait(10)
        writer.append(one(b"1"), outcomes.of(1))
        writer.run(lambda log: None, outcomes.of(2))
        sim.fail_next("sync")
        gate.open()
        for n in range(3):
            tag, error = outcomes.next()
            assert tag == n
            assert isinstance(error, DiskFailed)
        writes = sim.counts["write"]
        writer.append(one(b"3"), outcomes.of(3))
        assert isinstance(outcomes.next()[1], DiskFailed)
        assert sim.counts["write"] == writes


def test_an_idle_writer_leaves_a_mark(sim: SimDisk) -> None:
    outcomes = Outcomes()
    marked = threading.Event()
    writes = 0

    def watch(operation: str) -> None:
        nonlocal writes
        writes += operation == "write"
        if writes == 2:
            marked.set()

    with writing(sim, idle_mark_s=0.01) as writer:
        sim.on_operation(watch)
        writer.append(one(b"x"), outcomes.of("x"))
        assert outcomes.next() == ("x", None)
        assert marked.wait(10)
        # An action is a fence: once it has run, the mark is in the file.
        writer.run(lambda log: None, outcomes.of("fence"))
        outcomes.next()
        damaged = sim.clone()
        damaged.flip_bit(file_name(0), damaged.open(file_name(0)).size() - FRAME_BYTES - 8)
        with pytest.raises(LogCorrupt):
            open_log(damaged)


def test_a_full_queue_refuses_at_once(sim: SimDisk) -> None:
    outcomes = Outcomes()
    with writing(sim, max_queued_bytes=100 + 2 * FRAME_BYTES) as writer:
        gate = Gate(sim, "sync")
        writer.append(one(b"first"), outcomes.of("first"))
        gate.reached.wait(10)
        writer.append(one(b"x" * 90), outcomes.of("second"))
        with pytest.raises(LogBusy):
            writer.append(one(b"x" * 11), outcomes.of("refused"))
        writer.append(one(b"x" * 10), outcomes.of("third"))
        gate.open()
        assert [outcomes.next() for _ in range(3)] == [("first", None), ("second", None), ("third", None)]
        writer.append(one(b"x" * 1000), outcomes.of("larger than the queue, alone"))
        assert outcomes.next()[1] is None


def test_a_record_that_is_too_large_does_not_reach_the_queue() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=LogOptions(max_record_bytes=10))
    writer = Writer(log, deliver=lambda complete: complete())
    outcomes = Outcomes()
    with pytest.raises(RecordTooLarge):
        writer.append(one(b"x" * 11), outcomes.of("refused"))
    writer.close()
    assert outcomes.is_empty()


def test_close_finishes_what_is_queued_and_frees_the_directory(disk: Disk) -> None:
    outcomes = Outcomes()
    with writing(disk) as writer:
        for n in range(50):
            writer.append(one(b"%d" % n), outcomes.of(n))
    assert [outcomes.next() for _ in range(50)] == [(n, None) for n in range(50)]
    with pytest.raises(LogClosed):
        writer.append(one(b"late"), outcomes.of("late"))
    writer.close()
    assert len(recovered_payloads(disk)) == 50


def test_many_threads_each_see_their_own_order(disk: Disk) -> None:
    def produce(writer: Writer, name: int, outcomes: Outcomes) -> None:
        for n in range(200):
            writer.append(one(b"%d:%d" % (name, n)), outcomes.of(n))

    collected = [Outcomes() for _ in range(4)]
    with writing(disk) as writer:
        threads = [
            threading.Thread(target=produce, args=(writer, name, outcomes))
            for name, outcomes in enumerate(collected)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outcomes in collected:
            assert [outcomes.next() for _ in range(200)] == [(n, None) for n in range(200)]
    stored = recovered_payloads(disk)
    for name in range(4):
        mine = [payload for payload in stored if payload.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, n) for n in range(200)]


async def test_completions_reach_an_event_loop(disk: Disk) -> None:
    loop = asyncio.get_running_loop()
    writer = Writer(open_log(disk), deliver=loop.call_soon_threadsafe)
    durable: asyncio.Future[None] = loop.create_future()
    writer.append(one(b"x"), lambda outcome: durable.set_result(None))
    await asyncio.wait_for(durable, PATIENCE_S)
    await asyncio.to_thread(writer.close)


def test_an_owner_that_is_gone_does_not_keep_the_log_from_closing(sim: SimDisk) -> None:
    def nobody(_: Callable[[], None]) -> None:
        raise RuntimeError("Event loop is closed")

    writer = Writer(open_log(sim), deliver=nobody)
    writer.append(one(b"x"), lambda outcome: pytest.fail("cannot be reached"))
    writer.close()
    assert recovered_payloads(sim) == [b"x"]


def test_each_group_is_told_of_when_it_is_durable() -> None:
    """Time and bytes, once for all that share a sync, and not for work on the log's files."""
    disk, outcomes = SimDisk(Random(1)), Outcomes()
    told: SimpleQueue[tuple[float, int]] = SimpleQueue()
    writer = Writer(
        open_log(disk),
        deliver=lambda complete: complete(),
        idle_mark_s=NEVER,
        observe=lambda seconds, size: told.put((seconds, size)),
    )
    gate = Gate(disk, "sync")
    try:
        writer.append([(1, [b"first"])], outcomes.of("first"))
        gate.reached.wait(10)
        writer.append([(1, [b"ab"]), (1, [b"cd"])], outcomes.of("second"))
        writer.append([(1, [b"ef"])], outcomes.of("third"))
        assert told.empty()
        gate.open()
        assert [outcomes.next() for _ in range(3)] == [("first", None), ("second", None), ("third", None)]
        writer.run(lambda log: None, outcomes.of("work"))
        assert outcomes.next() == ("work", None)
    finally:
        gate.open()
        writer.close()
    groups = [told.get_nowait() for _ in range(told.qsize())]
    assert [size for _, size in groups] == [5 + FRAME_BYTES, 6 + 3 * FRAME_BYTES]
    assert all(seconds >= 0 for seconds, _ in groups)
