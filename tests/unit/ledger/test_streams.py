"""The own journal on its way to one mirror: what is kept in memory, what is read back, what is repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sava.ledger.mirror_log import WalRangeReader
from sava.ledger.protocol import RefusalReason
from sava.ledger.streams import MAX_RUNS, RUN_BYTES, RecentBytes
from sava.ledger.writer import MirrorOptions
from sava.wal import LocalDisk
from tests.support.waiting import PATIENCE_S, until
from tests.unit.ledger.disks import Writing
from tests.unit.ledger.hosts import Hosts


def tapped(recent: RecentBytes, position: int, *sizes: int) -> int:
    recent.tap(position, [(size, (b"%d" % (size % 10) * size,)) for size in sizes])
    return position + sum(sizes)


def test_small_records_go_together_and_large_ones_alone() -> None:
    grown: list[int] = []
    recent = RecentBytes(10 << 20, lambda: grown.append(1))
    end = tapped(recent, 512, *[1000] * 10)
    end = tapped(recent, end, 500_000)
    end = tapped(recent, end, 2000)
    assert recent.end == end
    first = recent.take(512)
    assert first is not None
    assert len(first) == 10_000
    second = recent.take(10_512)
    assert second is not None
    assert len(second) == 500_000
    inside = recent.take(512 + 3000)  # between two records
    assert inside is not None
    assert len(inside) == 7000
    assert recent.take(end) is None
    assert len(grown) == 3


def test_a_mark_alone_is_not_sent() -> None:
    """It would cost every mirror a sync each time that the owner is idle."""
    grown: list[int] = []
    recent = RecentBytes(1 << 20, lambda: grown.append(1))
    end = tapped(recent, 512, 32)
    assert not grown
    tapped(recent, end, 200)
    assert len(grown) == 1
    data = recent.take(512)
    assert data is not None
    assert len(data) == 232


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    recent = RecentBytes(1 << 20, lambda: None)
    at = 0
    for _ in range(100):
        at = tapped(recent, at, RUN_BYTES)
    assert recent._held <= 1 << 20
    assert recent.take(0) is None
    assert recent.take(at - RUN_BYTES) is not None
    for _ in range(2 * MAX_RUNS):
        at = tapped(recent, at, 40)
    assert len(recent._runs) <= MAX_RUNS


def test_read_back_is_verified_and_cut_between_records(tmp_path: Path) -> None:
    writing = Writing(tmp_path, file_bytes=4096)
    positions = [writing.append(1, [b"x" * 500])[0] for _ in range(40)]
    whole, end = writing.bytes(), writing.log.end
    reader = WalRangeReader(LocalDisk(tmp_path), origin=writing.origin)
    at, found = 512, b""
    while at < end:
        data = reader.read(at, end, 1500)
        found += data
        at += len(data)
    assert found == whole[512:]
    assert len(reader.read(512, end, 1)) == positions[1] - 512, "at least one"
    names = sorted(tmp_path.glob("log-*"))
    spoiled = bytearray(names[2].read_bytes())
    spoiled[700] ^= 1
    names[2].write_bytes(spoiled)
    at = 512
    while data := reader.read(at, end, 1500):
        at += len(data)
    assert int(names[2].name[4:24]) <= at < int(names[3].name[4:24])
    writing.log.close()


async def test_a_broken_connection_is_made_anew_and_nothing_is_missing(tmp_path: Path) -> None:
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, mirror = hosts[0], hosts[1]
        owned = owner.mirrored.owned
        assert owned is not None
        for offset in range(60):
            if offset % 15 == 7:
                mirror.gate.drop()
            await asyncio.wait_for(owner.append(offset), PATIENCE_S)
        stream = owned._streams[mirror.storage]
        assert stream.connects >= 4
        copy = mirror.mirrored.copies.logs.get(owner.id)
        assert copy is not None
        end = owner.journal._log.durable_end
        start = copy.files.note.base
        assert start is not None
        await until(lambda: copy.member.durable_end >= end, "the mirror has all")
        records = list(mirror.mirrored.copies.scan(owner.id, start, end))
        assert len([record for record in records if record.kind == 1]) == 60


async def test_no_more_is_under_way_than_the_window(tmp_path: Path) -> None:
    """The mirror syncs nothing for a while: what it holds in memory is bounded by the owner."""
    options = MirrorOptions(mirror_timeout_s=60, window_bytes=64 << 10)
    async with Hosts(3, tmp_path, options=options) as hosts:
        await hosts.begin()
        owner, slow = hosts[0], hosts[2]
        await owner.append(0)
        copy = slow.mirrored.copies.logs.get(owner.id)
        assert copy is not None
        real = copy._pump
        copy._pump = lambda **_: None  # type: ignore[method-assign]
        for offset in range(1, 101):
            await owner.append(offset, size=4000)
        held = sum(len(data) for _, data in copy.member._writes)
        assert 0 < held <= (64 << 10) + 8192
        copy._pump = real  # type: ignore[method-assign]
        copy._pump()
        end = owner.journal._log.durable_end
        await until(lambda: copy.member.durable_end >= end, "it has caught up")


async def test_a_mirror_that_has_no_room_is_replaced(tmp_path: Path) -> None:
    async with Hosts(4, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        owned = owner.mirrored.owned
        assert owned is not None
        full = owned.owner.record.last.members[1]
        stream = owned._streams[full]
        # Whatever it answers forgets refusals: nothing is to be on its way.
        await until(lambda: owned.owner.durable_end(full) >= owned.owner.end, "it has everything")
        stream.refusal = RefusalReason.FULL
        await until(lambda: full not in owned.owner.record.last.members, "it is replaced")
        assert len(owned.owner.record.last.members) == 3
        await owner.append(1)
