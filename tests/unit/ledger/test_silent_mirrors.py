"""Mirrors that refuse, fall silent and come back, over real connections and files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sava.ledger.mirror_log import MirrorFiles
from sava.ledger.protocol import RefusalReason
from sava.ledger.writer import LedgerWriter, MirrorOptions
from sava.wal import DiskFull
from tests.support.waiting import PATIENCE_S, until
from tests.unit.ledger.hosts import Host, Hosts

PAIR = MirrorOptions(write_quorum=2, ack_quorum=2)
"""The owner and one mirror, both of which must have a message; the timeout is the default of 5 s."""


def owned_by(host: Host) -> LedgerWriter:
    assert host.mirrored.owned is not None
    return host.mirrored.owned


@contextmanager
def full_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The copies that this host keeps take no more bytes."""
    real = MirrorFiles._write

    def write(files: MirrorFiles, position: int, buffers: list[bytes]) -> None:
        if files.disk.path.startswith(f"{host.path}/"):
            raise DiskFull("full")
        real(files, position, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(MirrorFiles, "_write", write)
        yield


async def test_a_mirror_that_refused_once_is_taken_again_when_no_other_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: three brokers. The disk of b is full, so b refuses and the owner leaves it out. Then b has
    room again, and c dies. The owner and b are healthy and connected, and must acknowledge; without the rule
    the owner avoids b for a minute and waits for c."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner, b, c = hosts.hosts
        await owner.append(0)
        owned = owned_by(owner)
        with full_disk(b, monkeypatch):
            await owner.append(1)
            await until(lambda: b.storage not in owned.owner.record.last.members, "b is left out")
        await owner.append(2)
        hosts.town.go(c.storage)
        c.gate.cut()
        await asyncio.wait_for(owner.append(3), 5.0)
        assert b.storage in owned.owner.record.last.members
        assert owned.owner.record.last.qa == 2, "two must have it, as before"


async def test_a_full_mirror_with_room_again_gets_the_third_copy_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: three brokers. The disk of b is full; b refuses, and the owner goes on with c. A second later
    b has room again. The third copy must be back within seconds, not after a minute, and while b is tried and
    refuses, every message is acknowledged by c."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner, b, _ = hosts.hosts
        await owner.append(0)
        owned = owned_by(owner)
        with full_disk(b, monkeypatch):
            for number in range(1, 21):
                await asyncio.wait_for(owner.append(number), 5.0)
                await asyncio.sleep(0.1)  # the tries of b are in between
            await until(lambda: b.storage not in owned.owner.record.last.members, "b is left out")
        await until(lambda: b.storage in owned.owner.record.last.members, "b is taken again", timeout=15.0)
        await until(lambda: owned.owner.durable_end(b.storage) >= owned.owner.end, "b has everything")


async def test_the_last_mirror_if_full_is_asked_again_every_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the only mirror has no room. The owner sends it the same bytes again and again, so it must
    pause in between; and when there is room, the message is acknowledged within the longest pause."""
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, b = hosts.hosts
        await owner.append(0)
        stream = owned_by(owner)._streams[b.storage]
        with full_disk(b, monkeypatch):
            waiting = owner.append(1)
            await until(lambda: stream.refusal is RefusalReason.FULL, "b has refused")
            before = stream.connects
            await asyncio.sleep(2.0)  # the time itself is what is tested
            assert 1 <= stream.connects - before <= 8
            assert not waiting.done()
        await asyncio.wait_for(waiting, 5.0)


async def test_a_needed_silent_mirror_is_replaced_within_seconds(
    tmp_path: Path,
) -> None:
    """Schedule: the owner and one mirror must both have a message; the mirror is stopped with its connections
    open, and a third broker is there. The owner replaces it long before ``mirror_timeout``."""
    async with Hosts(3, tmp_path, options=PAIR) as hosts:
        await hosts.begin()
        owner = hosts[0]
        for offset in range(40):
            await owner.append(offset)
        owned = owned_by(owner)
        silent = next(host for host in hosts.hosts if host.storage == owned.owner.mirrors[0])
        silent.gate.is_silent = True
        began = asyncio.get_running_loop().time()
        await asyncio.wait_for(owner.append(40), PATIENCE_S)
        assert asyncio.get_running_loop().time() - began < 3.0
        assert silent.storage not in owned.owner.record.last.members
        assert owned.changes == 1


async def test_a_silent_mirror_that_is_not_needed_has_the_whole_timeout(tmp_path: Path) -> None:
    """Two of three are enough, so a slow third delays no message: a change of mirrors would cost more."""
    async with Hosts(4, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        owned = owned_by(owner)
        for offset in range(40):
            await owner.append(offset)
        silent = next(host for host in hosts.hosts if host.storage == owned.owner.mirrors[0])
        silent.gate.is_silent = True
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 2.0:
            await owner.append(offset := offset + 1)
            await asyncio.sleep(0.01)
        assert owned.changes == 0
        await until(lambda: silent.storage not in owned.owner.record.last.members, "it is replaced in time")


async def test_a_once_silent_mirror_is_taken_again_when_the_next_falls_silent(tmp_path: Path) -> None:
    """Schedule: b is stopped for a while, left out, and continues. A moment later c is stopped. The owner
    avoids b for ten seconds, but b is all that is left."""
    async with Hosts(3, tmp_path, options=MirrorOptions(mirror_timeout_s=1.0)) as hosts:
        await hosts.begin()
        owner, b, c = hosts.hosts
        await owner.append(0)
        owned = owned_by(owner)
        b.gate.is_silent = True
        await owner.append(1)
        await until(lambda: b.storage not in owned.owner.record.last.members, "b is left out")
        b.gate.heal()
        c.gate.is_silent = True
        began = asyncio.get_running_loop().time()
        await asyncio.wait_for(owner.append(2), PATIENCE_S)
        assert asyncio.get_running_loop().time() - began < 4.0
        assert owned.owner.record.last.qa == 2
