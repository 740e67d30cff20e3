"""A journal over its generations: committed by its mirrors, ended, recovered, gone on in the next."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from sava.ledger import writer as owner_host
from sava.ledger.endpoint import Generation, Generations
from sava.ledger.mirror_log import MirrorFiles
from sava.ledger.protocol import (
    Fence,
    FenceAnswer,
    LedgerId,
    LedgerRecord,
    LedgerState,
    Owner,
    StorageId,
)
from sava.ledger.protocol import owner as protocol_owner
from sava.ledger.protocol.record import LedgerFenced
from sava.ledger.registry import LiveBroker, PeerUnreachable
from sava.ledger.writer import MirrorOptions
from sava.storage.commit_queue import NotCommittable
from sava.tasks import cancelled
from sava.wal import Disk, DiskFull, File, LocalDisk
from tests.support.waiting import FAR_S, PATIENCE_S, until
from tests.unit.ledger.hosts import OPTIONS, Host, Hosts

AVOIDED_S = 1.0
"""A mirror that failed is chosen again after this, where brokers wait for ten seconds."""


async def has_all(mirror: Host, owner: Host, end: int) -> None:
    copy = mirror.mirrored.copies.logs.get(owner.id)
    assert copy is not None
    await until(lambda: copy.member.durable_end >= end, "the mirror has all")


def _is_trimmed(files: MirrorFiles, owner: Owner) -> bool:
    return files.note.floor >= owner.floor > 50_000


async def test_a_message_is_acknowledged_when_a_mirror_has_the_same_bytes(
    tmp_path: Path,
) -> None:
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        for offset in range(200):
            await owner.append(offset, size=500)
        record = await hosts.record(owner)
        assert (len(record.last.members), record.last.qa) == (3, 2)
        start = record.fragments[0].start
        log = b"".join(path.read_bytes() for path in sorted(owner.path.glob("log-*")))
        end = await owner.journal.queue.drained()
        for mirror in hosts[1], hosts[2]:
            await has_all(mirror, owner, end)
            assert mirror.bytes_of(owner)[: end - start] == log[start:end]
        assert [span.base_offset for span in owner.journal.holdings.index(1).spans(0, 1 << 20)] == list(
            range(200)
        )


async def test_nothing_is_acknowledged_while_no_mirror_answers(tmp_path: Path) -> None:
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        for mirror in hosts[1], hosts[2]:
            mirror.gate.is_silent = True
        waiting = owner.append(1)
        await owner.journal.queue.drained()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert owner.journal.holdings.index(1).ranges == [(0, 1)], "what is not committed is not to be read"
        for mirror in hosts[1], hosts[2]:
            mirror.gate.heal()
            mirror.gate.drop()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert owner.journal.holdings.index(1).ranges == [(0, 2)]


async def test_the_bytes_are_on_their_way_while_the_own_disk_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a message would wait for the sum of both syncs, not for the slower one."""
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, mirror = hosts[0], hosts[1]
        await owner.append(0)
        log = owner.journal._log
        real, go_on = log._file.sync, threading.Event()
        monkeypatch.setattr(log._file, "sync", lambda: (go_on.wait(20), real())[1])
        waiting = owner.append(1)
        state = mirror.mirrored.copies.logs.get(owner.id)
        assert state is not None
        await until(lambda: state.member.durable_end >= log.end > log.durable_end, "the mirror has it first")
        assert not waiting.done()
        go_on.set()
        await waiting


async def test_a_mirror_that_was_away_catches_up_from_the_log(tmp_path: Path) -> None:
    """What it lacks is more than is kept in memory."""
    options = MirrorOptions(mirror_timeout_s=60, window_bytes=64 << 10)
    async with Hosts(3, tmp_path, options=options) as hosts:
        await hosts.begin()
        owner, away = hosts[0], hosts[2]
        await owner.append(0)
        away.gate.cut()
        for first in range(1, 201, 20):
            await asyncio.gather(*(owner.append(first + each, size=2000) for each in range(20)))
        away.gate.heal()
        owned, copy = owner.mirrored.owned, away.mirrored.copies.logs.get(owner.id)
        assert owned is not None
        assert copy is not None
        end = owner.journal._log.durable_end
        await until(lambda: copy.member.durable_end >= end, "it has caught up")
        assert owned._streams[away.storage].reread_bytes > 100_000


async def test_the_mirror_that_replaces_a_dead_one_gets_what_is_uncommitted(
    tmp_path: Path,
) -> None:
    async with Hosts(4, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        members = (await hosts.record(owner)).last.members
        gone = next(host for host in hosts.hosts if host.storage == members[1])
        await gone.stop()
        for offset in range(1, 20):
            await owner.append(offset)
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: gone.storage not in owned.owner.record.last.members, "it was replaced")
        assert (len(owned.owner.record.last.members), owned.owner.record.last.qa) == (3, 2)
        assert (await hosts.record(owner)) == owned.owner.record
        await owner.append(20)
        await gone.open()


async def test_a_mirror_that_is_about_to_stop_is_replaced_while_it_still_answers(tmp_path: Path) -> None:
    """Its broker says that it leaves ─▶ another disk takes its place before it goes, so that its end leaves
    no journal with fewer copies. The owner does that also while it leaves itself."""
    async with Hosts(4, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        members = (await hosts.record(owner)).last.members
        leaving = next(host for host in hosts.hosts if host.storage == members[1])
        for host in (owner, leaving):
            hosts.town.come(LiveBroker(host.storage, host.broker, host.gate.address, is_leaving=True))
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: leaving.storage not in owned.owner.record.last.members, "it was replaced")
        assert (len(owned.owner.record.last.members), owned.owner.record.last.qa) == (3, 2)
        await owner.append(1)


async def test_a_mirror_that_is_about_to_stop_stays_if_messages_need_it(tmp_path: Path) -> None:
    """Two disks must have a message, and there are two: the owner goes on with both for as long as the other
    one answers. That the owner itself leaves changes nothing of its own journal."""
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, other = hosts[0], hosts[1]
        for host in (owner, other):
            hosts.town.come(LiveBroker(host.storage, host.broker, host.gate.address, is_leaving=True))
        for offset in range(5):
            await asyncio.wait_for(owner.append(offset), PATIENCE_S)
        record = (await hosts.record(owner)).last
        assert (set(record.members), record.qa) == ({owner.storage, other.storage}, 2)


async def test_the_record_of_a_quiet_journal_names_only_those_who_mirror_it_now(tmp_path: Path) -> None:
    """Its messages are all in segments, and then its mirrors change, again and again. A recovery would ask
    for everybody who was ever named."""
    async with Hosts(4, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        owner.journal.release(1, 1)
        owned = owner.mirrored.owned
        assert owned is not None

        def is_forgotten(storage: StorageId) -> bool:
            return storage not in owned.owner.record.storages

        for _ in range(3):
            gone = next(host for host in hosts.hosts if host.storage == owned.owner.record.last.members[1])
            hosts.town.go(gone.storage)
            await until(partial(is_forgotten, gone.storage), "it is forgotten")
            gone.come()
        assert len(owned.owner.record.fragments) == 1
        await owner.append(1)


async def test_a_mirror_that_does_not_come_forward_is_left_out_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_owner, "AVOID_S", AVOIDED_S)
    async with Hosts(3, tmp_path, options=MirrorOptions(mirror_timeout_s=0.5)) as hosts:
        await hosts.begin()
        owner, slow = hosts[0], hosts[2]
        slow.gate.is_silent = True
        await owner.append(0)
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: slow.storage not in owned.owner.record.last.members, "it is left out")
        assert owned.owner.record.last.qa == 2, "two must have it, as before"
        await owner.append(1)
        slow.gate.heal()
        await until(lambda: slow.storage in owned.owner.record.last.members, "it is taken again")
        await owner.append(2)


async def test_without_enough_disks_messages_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, mirror = hosts[0], hosts[1]
        await owner.append(0)
        mirror.gate.cut()
        waiting = owner.append(1)
        owned = owner.mirrored.owned
        assert owned is not None

        def is_refused() -> bool:
            try:
                owned.check()
            except NotCommittable:
                return True
            return False

        await until(is_refused, "appends are refused")
        with pytest.raises(NotCommittable, match="2 disks must have a message"):
            owner.append(2)
        assert not waiting.done()
        await until(lambda: "messages are refused" in caplog.text, "the log says so")
        assert "needed=2 connected=1" in caplog.text
        mirror.gate.heal()
        await asyncio.wait_for(waiting, PATIENCE_S)
        await until(lambda: not is_refused(), "appends are accepted again")
        await owner.append(2)
        await until(lambda: "messages are accepted again" in caplog.text, "the log says so")
        assert caplog.text.count("messages are refused") == 1


async def test_mirrors_that_have_joined_since_they_were_last_counted_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the journal begins, and nobody has joined yet when its mirrors are counted for the first
    time. They join; the broker is busy, and does not count them again for more than the time of grace. A
    message was refused: two disks must have it, and only three can be reached."""
    monkeypatch.setattr(owner_host, "PASS_S", FAR_S)
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: owned._connected == 2, "both have joined")
        owned._short_since = asyncio.get_running_loop().time() - 10 * owner_host.GRACE_S
        await asyncio.wait_for(owner.append(0), PATIENCE_S)


async def test_the_record_says_degraded_before_a_message_has_fewer_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_owner, "AVOID_S", AVOIDED_S)
    caplog.set_level(logging.INFO)
    options = MirrorOptions(mirror_timeout_s=0.5, may_degrade=True)
    async with Hosts(2, tmp_path, options=options) as hosts:
        await hosts.begin()
        owner, mirror = hosts[0], hosts[1]
        await owner.append(0)
        mirror.gate.cut()
        await asyncio.wait_for(owner.append(1), PATIENCE_S)
        record = await hosts.record(owner)
        assert record.is_degraded
        assert record.last.members == (owner.storage,)
        owned = owner.mirrored.owned
        assert owned is not None
        assert owned.is_degraded
        await until(lambda: "asked=2 enough=1" in caplog.text, "the log says so")
        mirror.gate.heal()
        await until(lambda: not owned.is_degraded, "it is on two disks again")
        await until(lambda: "as many copies again" in caplog.text, "the log says so")
        assert owned.degraded_s > 0
        await owner.append(2)
        assert not (await hosts.record(owner)).is_degraded


async def test_a_single_broker_acknowledges_alone_until_others_come(tmp_path: Path) -> None:
    async with Hosts(3, tmp_path) as hosts:
        for host in hosts[1], hosts[2]:
            hosts.town.go(host.storage)
        hosts.size = 1
        owner = hosts[0]
        await owner.begin()
        await owner.append(0)
        record = await hosts.record(owner)
        assert (record.last.members, record.last.qa) == ((owner.storage,), 1)
        hosts.size = 3
        for host in hosts[1], hosts[2]:
            host.come()
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: len(owned.owner.record.last.members) == 3, "the others are taken")
        assert owned.owner.record.last.qa == 2
        for offset in range(1, 50):
            await owner.append(offset)


async def test_fewer_copies_are_wanted_after_a_removal_and_not_after_a_death(
    tmp_path: Path,
) -> None:
    """Of two brokers one dies: nothing is acknowledged. An operator removes it: the other is all there is."""
    async with Hosts(2, tmp_path, options=MirrorOptions(mirror_timeout_s=0.5)) as hosts:
        owner, other = hosts[0], hosts[1]
        await hosts.begin()
        await owner.append(0)
        record = await hosts.record(owner)
        assert (record.qw, record.qa) == (2, 2)
        hosts.town.go(other.storage)
        other.gate.cut()
        waiting = asyncio.ensure_future(owner.append(1))
        done, _ = await asyncio.wait({waiting}, timeout=2)
        assert not done
        assert await hosts.record(owner) == record
        hosts.size = 1
        await asyncio.wait_for(waiting, PATIENCE_S)
        record = await hosts.record(owner)
        assert (record.qw, record.qa, record.is_degraded) == (1, 1, False)


async def test_a_cluster_of_one_that_grew_is_degraded_when_the_others_are_gone(tmp_path: Path) -> None:
    """And says so in the record, for whoever asks about the journal and was not there before."""
    options = MirrorOptions(mirror_timeout_s=0.5, may_degrade=True)
    async with Hosts(3, tmp_path, options=options) as hosts:
        owner, others = hosts[0], (hosts[1], hosts[2])
        for host in others:
            hosts.town.go(host.storage)
        hosts.size = 1
        await owner.begin()
        await owner.append(0)
        record = await hosts.record(owner)
        assert (record.qw, record.qa, record.is_degraded) == (1, 1, False)
        owned = owner.mirrored.owned
        assert owned is not None
        hosts.size = 3
        await until(lambda: owned.is_degraded, "three are asked for, and the others are not there yet")
        for host in others:
            host.come()
        await until(lambda: len(owned.owner.record.last.members) == 3, "the others are taken")
        record = await hosts.record(owner)
        assert (record.qw, record.qa, record.is_degraded) == (3, 2, False)
        for host in others:
            hosts.town.go(host.storage)
            host.gate.cut()
        await asyncio.wait_for(owner.append(1), PATIENCE_S)
        record = await hosts.record(owner)
        assert (record.qw, record.qa, record.is_degraded) == (3, 2, True)
        assert owned.is_degraded


async def test_a_fence_ends_the_life_and_fails_what_is_in_flight(tmp_path: Path) -> None:
    """Schedule: the owner is cut from its mirrors with a message in flight; somebody recovers the journal
    from the mirrors; the owner comes back to them."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        owner.cut_off()
        waiting = owner.append(1)
        await owner.journal.queue.drained()
        record = await hosts.recover(owner.id, through=hosts[1])
        owner.back()
        with pytest.raises(LedgerFenced):
            await asyncio.wait_for(waiting, PATIENCE_S)
        await until(lambda: owner.renewals, "another registration is asked for")
        with pytest.raises(LedgerFenced):
            owner.append(2)
        assert record.state is LedgerState.CLOSED
        # Its own disk has more than the journal: that part is void.
        await owner.mirrored.lost()
        await owner.begin()
        assert owner.journal.holdings.index(1).ranges == [(0, 1)]
        await owner.append(1, epoch=2)
        assert owner.journal.holdings.index(1).ranges == [(0, 2)]


async def test_messages_in_flight_at_a_lost_registration_count_if_journaled(
    tmp_path: Path,
) -> None:
    """Schedule: a frame is durable here and on no mirror; the registration is lost, its producer is told that
    it failed; the journal is recovered with this disk's answer, and ends behind the frame. In the next
    generation its offset must not be given out a second time."""
    async with Hosts(2, tmp_path) as hosts:
        await hosts.begin()
        owner, mirror = hosts[0], hosts[1]
        await owner.append(0)
        mirror.gate.is_silent = True
        waiting = owner.append(1)
        await owner.journal.queue.drained()
        before = owner.id
        await owner.mirrored.lost()
        with pytest.raises(LedgerFenced):
            await waiting
        owner.register()
        recovery = asyncio.create_task(hosts.recover(before, through=owner))
        await until(lambda: owner.mirrored.own_disk.fences, "this disk has answered")
        mirror.gate.heal()
        mirror.gate.drop()
        await recovery
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        assert owner.journal.holdings.index(1).ranges == [(0, 2)]


async def test_a_broker_that_comes_back_goes_on_in_a_new_journal_with_all_it_had(tmp_path: Path) -> None:
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        for offset in range(50):
            await owner.append(offset)
        before = owner.id
        await owner.stop()
        await owner.open()
        owner.register()
        assert not owner.journal.queue.has_generation
        await hosts.recover(before, through=hosts[1])
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        assert owner.journal.holdings.index(1).ranges == [(0, 50)]
        await owner.append(50, epoch=2)
        batches = await owner.journal.read(1, 0, 1 << 20)
        assert [each.base_offset for each in batches] == list(range(51))


async def test_a_disk_that_lost_its_last_writes_gets_them_from_the_mirrors(tmp_path: Path) -> None:
    """Schedule: power is cut; the owner's last writes were on their way to its disk, a mirror had synced
    them. The journal ends behind them. The owner must not give out their offsets again."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        for offset in range(5):
            await owner.append(offset)
        kept = await owner.journal.queue.drained()
        for offset in range(5, 10):
            await owner.append(offset)
        before, end = owner.id, await owner.journal.queue.drained()
        for mirror in hosts[1], hosts[2]:
            await has_all(mirror, owner, end)
        generations = (owner.path / "generations.json").read_bytes()
        await owner.stop()
        (log,) = owner.path.glob("log-*")
        log.write_bytes(log.read_bytes()[:kept])
        (owner.path / "generations.json").write_bytes(generations)  # as a crash leaves it
        await owner.open()
        owner.register()
        record = await hosts.recover(before, through=hosts[1])
        assert record.end >= end
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        assert owner.journal.holdings.index(1).ranges == [(0, 10)]
        batches = await owner.journal.read(1, 0, 1 << 20)
        assert [each.base_offset for each in batches] == list(range(10))
        # The same once more: what was reappended is not reappended twice.
        again = owner.id
        await owner.stop()
        await owner.open()
        owner.register()
        await hosts.recover(again, through=hosts[1])
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        assert owner.journal.holdings.index(1).ranges == [(0, 10)]


async def test_trimmed_here_is_trimmed_on_the_mirrors(tmp_path: Path) -> None:
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        for offset in range(100):
            await owner.append(offset, size=1000)
        owner.journal.release(1, 100)
        owned = owner.mirrored.owned
        assert owned is not None
        for mirror in hosts[1], hosts[2]:
            copy = mirror.mirrored.copies.logs.get(owner.id)
            assert copy is not None
            files = copy.files
            await until(partial(_is_trimmed, files, owned.owner), "it has let go")
        await until(lambda: len(list(owner.path.glob("log-*"))) <= 2, "the own log is trimmed")


async def test_a_record_goes_when_all_of_its_journal_is_in_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.ledger.host.FORGET_S", 0.05)
    async with Hosts(3, tmp_path, options=OPTIONS) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        before, mirrors = owner.id, (hosts[1], hosts[2])
        await until(
            lambda: all(before in mirror.mirrored.copies.ledgers for mirror in mirrors), "both have a copy"
        )
        await owner.mirrored.lost()
        owner.register()
        await hosts.recover(before, through=hosts[1])
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        await asyncio.sleep(0.2)
        assert before in await hosts.records.of(owner.broker), "a topic still needs it"
        owner.journal.release(1, 1)
        await until(lambda: before not in hosts.records.known(), "its record is gone")
        for mirror in mirrors:
            assert before in mirror.mirrored.copies.ledgers
            await mirror.mirrored.copies.sweep(hosts.records)
            assert mirror.mirrored.copies.ledgers == [
                each for each in mirror.mirrored.copies.ledgers if each != before
            ]


async def test_a_fence_that_comes_while_the_journal_is_being_opened_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the record is written, and its answer is on the way; a recoverer that takes the owner for
    gone asks this disk, which has nothing yet. The journal must not begin behind that answer."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        real, is_written, go_on = hosts.records.open, asyncio.Event(), asyncio.Event()

        async def slowly(journal: LedgerId, record: LedgerRecord) -> int:
            revision = await real(journal, record)
            is_written.set()
            await go_on.wait()
            return revision

        monkeypatch.setattr(hosts.records, "open", slowly)
        host.register()
        await asyncio.wait_for(is_written.wait(), PATIENCE_S)
        closed = await hosts.recover(host.id, through=host)
        go_on.set()
        await until(lambda: host.renewals, "another registration is asked for")
        assert not host.journal.queue.has_generation
        assert closed.end == closed.fragments[0].start
        monkeypatch.undo()
        await host.mirrored.lost()
        await host.begin()
        await host.append(0)


async def test_a_fence_during_the_end_of_a_generation_hears_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the registration is lost, and what is queued is still on its way to the disk; a recoverer
    asks this disk. Taken for a journal that has not begun, it would be told that there is nothing here."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        await host.begin()
        await host.append(0)
        real, is_asked, go_on = host.journal.queue.drained, asyncio.Event(), asyncio.Event()

        async def slowly() -> int:
            is_asked.set()
            await go_on.wait()
            return await real()

        monkeypatch.setattr(host.journal.queue, "drained", slowly)
        losing = asyncio.create_task(host.mirrored.lost())
        await asyncio.wait_for(is_asked.wait(), PATIENCE_S)
        fence = Fence(host.id, host.storage, 1)
        asking = asyncio.create_task(
            host.mirrored.peers.ask(host.storage, fence, origin=host.storage, timeout=PATIENCE_S)
        )
        await asyncio.sleep(0.05)
        assert not asking.done()
        go_on.set()
        answer = await asking
        await losing
        assert isinstance(answer, FenceAnswer)
        assert answer.copy is not None
        assert answer.copy.end >= host.journal._end > answer.copy.base


async def test_a_life_that_never_began_takes_nothing_of_the_next_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the record is written, and the registration is lost before its answer is here. The broker
    registers anew; only then it is asked about the first journal, which ends where it was to begin. Messages
    of the second one stand behind that place. They are void for nobody, whenever the broker starts again."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        real, is_written = hosts.records.open, asyncio.Event()

        async def never(journal: LedgerId, record: LedgerRecord) -> int:
            await real(journal, record)
            is_written.set()
            return await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(hosts.records, "open", never)
        host.register()
        first = host.id
        await asyncio.wait_for(is_written.wait(), PATIENCE_S)
        await host.mirrored.lost()
        monkeypatch.undo()
        host.register()
        second = host.id
        closed = await hosts.recover(first, through=host)
        assert closed.end == closed.fragments[0].start
        await host.journal.queue.wait_for_generation()
        for offset in range(3):
            await host.append(offset)
        await host.stop()
        await host.open()
        host.register()
        third = host.id
        await hosts.recover(second, through=host)
        await host.journal.queue.wait_for_generation()
        await host.mirrored.lost()
        host.register()
        await hosts.recover(third, through=host)
        await host.journal.queue.wait_for_generation()
        assert host.journal.holdings.index(1).ranges == [(0, 3)]


async def test_a_life_without_an_end_ended_where_the_next_one_began(tmp_path: Path) -> None:
    """As an earlier version, or a disk that was full, may have left it."""
    generations = Generations(LocalDisk(tmp_path))
    await generations.belong_to(StorageId("disk"), 0)
    for incarnation, start in ((1, 100), (2, 100), (3, 500)):
        await generations.keep(Generation(incarnation=incarnation, start=start))
    found = Generations(LocalDisk(tmp_path))
    await found.belong_to(StorageId("disk"), 900)
    assert [(generation.start, generation.end) for generation in found] == [
        (100, 100),
        (100, 500),
        (500, 900),
    ]


async def test_a_full_disk_cannot_say_that_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: the registration is lost while the disk is so full that the end of the generation cannot be
    written down. Whoever asks hears nothing until there is room, and then where it ended."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        await host.begin()
        await host.append(0)
        end = await host.journal.queue.drained()

        def full(generations: Generations, _: object) -> None:
            raise DiskFull("no room")

        monkeypatch.setattr(Generations, "_store", full)
        await host.mirrored.lost()
        fence = Fence(host.id, host.storage, 1)
        with pytest.raises(PeerUnreachable):
            await host.mirrored.peers.ask(host.storage, fence, origin=host.storage, timeout=0.3)
        monkeypatch.undo()
        answer = await host.mirrored.peers.ask(host.storage, fence, origin=host.storage, timeout=PATIENCE_S)
        assert isinstance(answer, FenceAnswer)
        assert answer.copy is not None
        assert answer.copy.end == end


@pytest.mark.parametrize(
    ("configured", "brokers", "expected"),
    [
        ((0, 0), 1, (1, 1)),
        ((0, 0), 2, (2, 2)),
        ((0, 0), 9, (3, 2)),
        ((5, 0), 1, (5, 2)),
        ((1, 0), 3, (1, 1)),
        ((0, 2), 1, (2, 2)),
        ((0, 3), 2, (3, 3)),
        ((0, 5), 5, (5, 5)),
        ((0, 1), 3, (3, 1)),
    ],
)
def test_what_is_configured_is_never_lowered(
    configured: tuple[int, int], brokers: int, expected: tuple[int, int]
) -> None:
    options = MirrorOptions(write_quorum=configured[0], ack_quorum=configured[1])
    assert options.quorums(brokers) == expected


class HungDisk:
    """A disk whose sync of one file takes until ``go_on``, as one that hangs does. Ten seconds are the most:
    a test of code that waits on the event loop must fail, not hang."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.has_hung, self.go_on = threading.Event(), threading.Event()

    def open(self, name: str, *, create: bool = False) -> File:
        file = self._disk.open(name, create=create)
        real = file.sync

        def sync() -> None:
            self.has_hung.set()
            assert self.go_on.wait(10), "the event loop was held"
            real()

        file.sync = sync  # type: ignore[method-assign]
        return file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


@contextmanager
def hung(generations: Generations) -> Iterator[HungDisk]:
    """The disk is back at the end, also of a test that fails."""
    disk = HungDisk(generations._disk)
    generations._disk = cast(Disk, disk)
    try:
        yield disk
    finally:
        disk.go_on.set()


async def test_a_disk_that_hangs_at_a_generations_end_does_not_hold_the_loop(tmp_path: Path) -> None:
    """Schedule: the registration is lost; the disk hangs while the end of the generation is written down. The
    event loop sends heartbeats meanwhile. The end is known when the disk is back."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        await host.begin()
        await host.append(0)
        generations = host.mirrored._generations
        with hung(generations) as disk:
            losing = asyncio.create_task(host.mirrored.lost())
            await until(disk.has_hung.is_set, "the end is being written down")
            assert not losing.done()
        await losing
        generation = generations.known.get(host.incarnation)
        assert generation is not None
        assert generation.end == host.journal._end
        assert [each.end for each in Generations(LocalDisk(host.path))] == [generation.end]


async def test_a_life_does_not_begin_while_its_fence_is_being_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: a recoverer fences a journal whose record is written, and whose generation has yet to begin;
    the disk hangs with the promise. The answer to the record comes in that moment. A generation that began
    now would acknowledge messages behind the end that the recoverer is about to hear."""
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        real, is_written, is_answered = hosts.records.open, asyncio.Event(), asyncio.Event()

        async def slowly(journal: LedgerId, record: LedgerRecord) -> int:
            revision = await real(journal, record)
            is_written.set()
            await is_answered.wait()
            return revision

        monkeypatch.setattr(hosts.records, "open", slowly)
        host.register()
        await asyncio.wait_for(is_written.wait(), PATIENCE_S)
        with hung(host.mirrored._generations) as disk:
            fence = Fence(host.id, host.storage, 1)
            asking = asyncio.create_task(
                host.mirrored.peers.ask(host.storage, fence, origin=host.storage, timeout=PATIENCE_S)
            )
            await until(disk.has_hung.is_set, "the promise is being written down")
            is_answered.set()
            await until(
                lambda: host.renewals or host.journal.queue.has_generation, "it has begun, or was found ended"
            )
            assert not host.journal.queue.has_generation
        answer = await asking
        assert isinstance(answer, FenceAnswer)
        assert answer.copy is not None
        assert answer.copy.end == answer.copy.base
        assert not host.journal.queue.has_generation


async def test_changes_of_a_life_that_are_under_way_together_keep_each_other(tmp_path: Path) -> None:
    """Schedule: a generation's end and a promise wait for the disk together, and whoever asked for the first
    does not wait any more. Neither may be lost, in memory or in the file."""
    generations = Generations(LocalDisk(tmp_path))
    await generations.belong_to(StorageId("disk"), 0)
    await generations.keep(Generation(incarnation=1, start=100))
    with hung(generations) as disk:
        first = asyncio.create_task(
            generations.change(1, lambda generation: generation and replace(generation, end=300))
        )
        await until(disk.has_hung.is_set, "the first is being written")
        second = asyncio.create_task(
            generations.change(1, lambda generation: generation and replace(generation, fence=7))
        )
        await cancelled(first)
        assert generations.known.get(1) == Generation(incarnation=1, start=100), (
            "what is not durable is not known"
        )
    await second
    expected = Generation(incarnation=1, start=100, end=300, fence=7)
    assert generations.known.get(1) == expected
    assert list(Generations(LocalDisk(tmp_path))) == [expected]


async def test_a_broker_without_its_mirrors_serves_reads_and_refuses_messages(
    tmp_path: Path,
) -> None:
    """Schedule: two brokers, both of which must have a message. The owner restarts; its former journal is
    closed, then the mirror goes away. The owner's next journal is open all the same, so that its topics can
    be read; a message is refused, with the way out; and the first one after the mirror's return is
    acknowledged by both."""
    options = MirrorOptions(write_quorum=2, ack_quorum=2, mirror_timeout_s=0.3)
    async with Hosts(2, tmp_path, options=options) as hosts:
        await hosts.begin()
        owner, mirror = hosts.hosts
        await owner.append(0)
        former = owner.id
        await owner.stop()
        await owner.open()
        await hosts.recover(former, through=mirror)
        hosts.town.go(mirror.storage)
        mirror.gate.cut()

        await owner.begin()
        assert owner.journal.holdings.index(1).ranges == [(0, 1)], "what was acknowledged can be read"
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: owned._is_refusing, "too few disks are there")
        with pytest.raises(NotCommittable, match="start the other brokers"):
            owned.check()
        assert (owned.owner.record.last.qa, owned.is_degraded) == (2, False)
        assert owned.owner.commit == owned.owner.record.last.start, "nothing is committed with one disk"

        mirror.gate.heal()
        mirror.come()
        await until(lambda: not owned.is_short, "the mirror is back")
        await asyncio.wait_for(owner.append(1, epoch=2), PATIENCE_S)
        assert owned.owner.durable_end(mirror.storage) >= owned.owner.commit


async def test_messages_written_without_mirrors_are_recovered_from_the_disk(tmp_path: Path) -> None:
    """Schedule: as above, and the owner is gone again before its mirror returns. Nothing was acknowledged in
    that generation, and the answer of either disk is enough to close its journal."""
    options = MirrorOptions(write_quorum=2, ack_quorum=2, mirror_timeout_s=0.3)
    async with Hosts(2, tmp_path, options=options) as hosts:
        await hosts.begin()
        owner, mirror = hosts.hosts
        await owner.append(0)
        former = owner.id
        await owner.stop()
        await owner.open()
        await hosts.recover(former, through=mirror)
        hosts.town.go(mirror.storage)
        await owner.begin()
        lonely = owner.id
        await owner.stop()
        mirror.come()
        closed = await hosts.recover(lonely, through=mirror)
        assert (closed.end, closed.lost) == (closed.fragments[0].start, ())
        await owner.open()
        await owner.begin()
        assert owner.journal.holdings.index(1).ranges == [(0, 1)]
