"""Copies of other brokers' journals: the same bytes, durable before that is said, fenced for ever, and
honest about what was damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from sava.ledger import mirror_log as copy_files
from sava.ledger.mirror_log import MirrorFiles, WalRangeReader, directory_name
from sava.ledger.protocol import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerId,
    LedgerMember,
    LedgerRefused,
    Message,
    Range,
    Read,
    ReadAnswer,
    RefusalReason,
    StorageId,
    Trim,
    WriteBack,
)
from sava.ledger.store import MirrorStore
from sava.wal import DiskFull, LocalDisk, Log, LogCorrupt, LogOptions
from sava.wal.format import record_bytes
from tests.sim.disk import CrashPolicy, SimDisk
from tests.support.waiting import PATIENCE_S, until
from tests.unit.ledger.disks import Writing

T = TypeVar("T")
JOURNAL = LedgerId(7, 3)
HERE = StorageId("here")
START = 512


class Owner:
    """Bytes of a real log, whole records at a time."""

    def __init__(self, path: Path, count: int = 100, *, size: int = 300, file_bytes: int = 8192) -> None:
        writing = Writing(path, file_bytes=file_bytes)
        self.positions = [writing.append(1, [b"%d " % number + b"x" * size])[0] for number in range(count)]
        self.origin = writing.origin
        self.data = writing.bytes()
        self.end = writing.log.end
        self.positions.append(self.end)
        writing.log.close()

    def append(self, first: int, last: int, *, commit: int = 0, floor: int = 0) -> LedgerAppend:
        start = START if first == 0 else self.positions[first]
        data = self.data[start : self.positions[last]]
        return LedgerAppend(JOURNAL, HERE, 0, start, data, commit, floor)


class Said:
    """What the copies answer, to be waited for."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._new = asyncio.Event()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self._new.set()

    async def the_next(self, kind: type[T]) -> T:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for index, message in enumerate(self.messages):
                    if isinstance(message, kind):
                        del self.messages[: index + 1]
                        return message
                self._new.clear()
                await self._new.wait()


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[MirrorStore]:
    failures: list[BaseException] = []
    copies = MirrorStore(LocalDisk(path), HERE, fail=failures.append)
    await copies.open()
    try:
        yield copies
    finally:
        await copies.close()
    assert not failures


async def asked(copies: MirrorStore, message: Message, kind: type[T], origin: StorageId) -> T:
    said = Said()
    copies.receive(origin, message, said)
    return await said.the_next(kind)


async def joined(copies: MirrorStore, owner: Owner) -> Said:
    said = Said()
    copies.receive(owner.origin, Join(JOURNAL, HERE, 0, START, START), said)
    answer = await said.the_next(JoinAnswer)
    assert answer.end >= START
    if answer.durable < answer.end:
        assert (await said.the_next(Durable)).end == answer.end
    return said


async def test_a_copy_that_was_begun_and_never_noted_is_begun_again(tmp_path: Path) -> None:
    """Its file is made, the process is killed before the first note, and the owner joins the next one at the
    same place: the file that is there must not stop the broker, at every start."""
    owner = Owner(tmp_path / "owner", 10)
    async with opened(tmp_path / "mirror") as copies:
        disk = copies._disk.directory(directory_name(JOURNAL))
        begun = MirrorFiles.create(disk, owner.origin, JOURNAL)
        begun._begin(START)
        begun.close()
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 10), said)
        assert (await said.the_next(Durable)).end == owner.end


async def test_it_holds_the_same_bytes_at_the_same_positions(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 60), said)
        assert (await said.the_next(Durable)).end == owner.positions[60]
        copies.receive(owner.origin, owner.append(50, 100), said)  # what is there already is the same
        assert (await said.the_next(Durable)).end == owner.end
        records = list(copies.scan(JOURNAL, START, owner.end))
        assert [record.position for record in records] == owner.positions[:-1]
    files = sorted((tmp_path / "mirror" / "7-3").glob("copy-*"))
    whole = b"".join(path.read_bytes() for path in files)
    assert whole[: owner.end - START] == owner.data[START:]


async def test_a_gap_is_refused_and_the_end_told(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 10), said)
        copies.receive(owner.origin, owner.append(20, 30), said)
        refused = await said.the_next(LedgerRefused)
        assert (refused.reason, refused.end) == (RefusalReason.GAP, owner.positions[10])


async def test_a_fence_outlives_the_process_and_keeps_the_owner_out(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 10, commit=owner.positions[5]), said)
        fenced = await asked(copies, Fence(JOURNAL, HERE, 2), FenceAnswer, owner.origin)
        assert fenced.copy == CopyState(START, START, owner.positions[10], owner.positions[5])
    async with opened(tmp_path / "mirror") as copies:
        said = Said()
        copies.receive(owner.origin, owner.append(10, 20), said)
        refused = await said.the_next(LedgerRefused)
        assert (refused.reason, refused.epoch) == (RefusalReason.FENCED, 2)
        again = await asked(copies, Fence(JOURNAL, HERE, 1), LedgerRefused, owner.origin)
        assert again.epoch == 2
        state = copies.state(JOURNAL)
        assert state is not None
        assert state.end == owner.positions[10]


async def test_a_disk_without_a_copy_says_so_and_remembers_the_fence(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner", 10)
    async with opened(tmp_path / "mirror") as copies:
        fenced = await asked(copies, Fence(JOURNAL, HERE, 1), FenceAnswer, owner.origin)
        assert fenced == FenceAnswer(JOURNAL, HERE, 1, None)
    async with opened(tmp_path / "mirror") as copies:
        said = Said()
        copies.receive(owner.origin, Join(JOURNAL, HERE, 0, START, START), said)
        assert (await said.the_next(LedgerRefused)).reason is RefusalReason.FENCED


async def test_a_question_to_another_disk_is_not_answered_in_its_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as copies:
        other = Fence(JOURNAL, StorageId("the former"), 1)
        refused = await asked(copies, other, LedgerRefused, StorageId("owner"))
        assert refused == LedgerRefused(JOURNAL, HERE, RefusalReason.OTHER_DISK)
        assert copies.ledgers == []


async def test_what_is_written_back_continues_the_copy(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner", 20)
    async with opened(tmp_path / "mirror") as copies:
        await asked(copies, Fence(JOURNAL, HERE, 4), FenceAnswer, owner.origin)
        part = owner.append(5, 15)
        early = WriteBack(JOURNAL, HERE, 3, part.position, part.data)
        assert (await asked(copies, early, LedgerRefused, owner.origin)).reason is RefusalReason.FENCED
        right = WriteBack(JOURNAL, HERE, 4, part.position, part.data, is_first=True)
        durable = await asked(copies, right, Durable, owner.origin)
        assert durable == Durable(JOURNAL, HERE, owner.positions[15])
        read = await asked(
            copies, Read(JOURNAL, HERE, part.position, owner.end, 700), ReadAnswer, owner.origin
        )
        assert read.data == owner.data[owner.positions[5] : owner.positions[7]]
        # The same bytes again, and more: what was damaged here is repaired.
        copy = copies.logs.get(JOURNAL)
        assert copy is not None
        _spoil(tmp_path, owner.positions[8] - part.position + 50)
        more = owner.append(7, 18)
        repair = WriteBack(JOURNAL, HERE, 4, more.position, more.data)
        durable = await asked(copies, repair, Durable, owner.origin)
        assert durable.end == owner.positions[18]
        checked = await asked(
            copies, Check(JOURNAL, HERE, part.position, durable.end), CheckAnswer, owner.origin
        )
        assert checked.bad == ()


async def test_damage_is_told_and_not_given_back(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 100), said)
        await said.the_next(Durable)
        await asked(copies, Fence(JOURNAL, HERE, 1), FenceAnswer, owner.origin)
    _spoil(tmp_path, owner.positions[40] - START + 100)
    async with opened(tmp_path / "mirror") as copies:
        state = copies.state(JOURNAL)
        assert state is not None
        assert state.end == owner.end, "it still answers for its end"
        checked = await asked(copies, Check(JOURNAL, HERE, START, owner.end), CheckAnswer, owner.origin)
        assert checked.bad == (Range(owner.positions[40], owner.positions[41]),)
        bad = await asked(
            copies, Read(JOURNAL, HERE, owner.positions[40], owner.end, 500), ReadAnswer, owner.origin
        )
        assert bad == ReadAnswer(JOURNAL, HERE, owner.positions[40], b"")
        with pytest.raises(LogCorrupt):
            list(copies.scan(JOURNAL, START, owner.end))


async def test_what_is_trimmed_is_deleted_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path / "owner")
    monkeypatch.setattr(copy_files, "FILE_BYTES", 4096)
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        for first in range(0, 100, 10):
            copies.receive(owner.origin, owner.append(first, first + 10), said)
            await said.the_next(Durable)
        before = len(_files(tmp_path))
        copies.receive(owner.origin, Trim(JOURNAL, HERE, 0, owner.positions[70]), said)
        await said.the_next(Trim)
        fenced = await asked(copies, Fence(JOURNAL, HERE, 1), FenceAnswer, owner.origin)
        assert fenced.copy is not None
        assert fenced.copy.floor == owner.positions[70]
        assert 1 < len(_files(tmp_path)) < before
        records = list(copies.scan(JOURNAL, owner.positions[70], owner.end))
        assert [record.position for record in records] == owner.positions[70:-1]


def _spoil(path: Path, offset: int) -> None:
    (file,) = _files(path)
    with file.open("r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


def _files(path: Path) -> list[Path]:
    return sorted((path / "mirror" / "7-3").glob("copy-*"))


async def test_a_full_disk_takes_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path / "owner", 30)
    async with opened(tmp_path / "mirror") as copies:
        said = await joined(copies, owner)
        copies.receive(owner.origin, owner.append(0, 10), said)
        await said.the_next(Durable)
        copy = copies.logs.get(JOURNAL)
        assert copy is not None
        real, is_full = MirrorFiles._write, True

        def write(files: MirrorFiles, position: int, buffers: list[bytes]) -> None:
            real(files, position, buffers)
            if is_full:
                raise DiskFull("full")

        monkeypatch.setattr(MirrorFiles, "_write", write)
        copies.receive(owner.origin, owner.append(10, 20), said)
        refused = await said.the_next(LedgerRefused)
        assert (refused.reason, refused.end) == (RefusalReason.FULL, owner.positions[10])
        is_full = False
        copies.receive(owner.origin, owner.append(10, 30), said)
        assert (await said.the_next(Durable)).end == owner.end
        assert len(list(copies.scan(JOURNAL, START, owner.end))) == 30


async def test_a_failing_disk_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path / "owner", 20)
    failures: list[BaseException] = []
    copies = MirrorStore(LocalDisk(tmp_path / "mirror"), HERE, fail=failures.append)
    await copies.open()
    said = await joined(copies, owner)
    copies.receive(owner.origin, owner.append(0, 10), said)
    await said.the_next(Durable)

    def fail(files: MirrorFiles) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(MirrorFiles, "sync", fail)
    copies.receive(owner.origin, owner.append(10, 20), said)
    await until(lambda: failures, "the failure is told")
    copies.receive(owner.origin, Fence(JOURNAL, HERE, 1), said)
    copies.receive(owner.origin, Read(JOURNAL, HERE, START, owner.end, 500), said)
    await asyncio.sleep(0.05)
    assert said.messages == []
    monkeypatch.undo()
    await copies.close()


def test_a_crash_while_the_note_is_written_leaves_the_note_before_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner", 20)
    disk = LocalDisk(tmp_path / "mirror")
    files = MirrorFiles.create(disk, owner.origin, JOURNAL)
    member = LedgerMember(HERE, files.note)
    for epoch in (1, 2):
        member.receive(Fence(JOURNAL, HERE, epoch))
        work = member.poll()
        assert work is not None
        files.perform(work)
        member.done(work.number)
    files.close()
    note = tmp_path / "mirror" / "note"
    data = bytearray(note.read_bytes())
    data[20:100] = bytes(80)  # the slot of the second
    note.write_bytes(data)
    restored = MirrorFiles.restore(disk)
    assert restored is not None
    assert restored.note.fence == 1
    data[4096 + 20 : 4096 + 100] = bytes(80)
    note.write_bytes(data)
    with pytest.raises(LogCorrupt, match="no intact note"):
        MirrorFiles.restore(disk)


@pytest.mark.parametrize("seed", range(40))
def test_what_was_said_survives_any_crash(seed: int) -> None:
    """Random work on a disk that keeps only what it promised; after each power cut the copy is a beginning of
    the journal, holds all that was said to be durable, and obeys the greatest fence that was answered."""
    rng = Random(seed)
    origin, stream, borders = _stream(rng)
    disk = SimDisk(rng)
    promised, fence, sent = 0, 0, 0
    for _ in range(6):
        place = disk.directory("copy")
        files = MirrorFiles.restore(place, file_bytes=2048) or MirrorFiles.create(
            place, origin, JOURNAL, file_bytes=2048
        )
        member = LedgerMember(HERE, files.note, end=files.end, note_bytes=rng.choice([500, 5000]))
        assert files.note.fence >= fence
        assert files.end >= promised
        if files.note.base is not None:
            reader = WalRangeReader(
                place, origin=origin, name=copy_files.file_name, start_of=copy_files.file_start
            )
            first = max(files.note.base, files.note.floor)
            assert files.end == first or reader.intact(first, files.end) == [Range(first, files.end)]
        epoch = files.note.fence
        member.receive(Join(JOURNAL, HERE, epoch, START, START))
        for _ in range(rng.randrange(1, 15)):
            sent = borders.index(max(member.end, START))
            if rng.random() < 0.1:
                epoch += 1
                member.receive(Fence(JOURNAL, HERE, epoch))
            until = min(len(borders) - 1, sent + rng.randrange(1, 6))
            data = stream[borders[sent] : borders[until]]
            floor = borders[rng.randrange(sent + 1)] if rng.random() < 0.3 else 0
            member.receive(LedgerAppend(JOURNAL, HERE, epoch, borders[sent], data, 0, floor))
            work = member.poll(is_idle=rng.random() < 0.3)
            if work is None or rng.random() < 0.05:
                continue
            files.perform(work)
            for said in member.done(work.number):
                if isinstance(said, Durable):
                    promised = said.end
                elif isinstance(said, FenceAnswer):
                    fence = said.epoch
        disk = disk.crash(CrashPolicy.ANY) if rng.random() < 0.8 else disk.kill()


def _stream(rng: Random) -> tuple[StorageId, bytes, list[int]]:
    """A log's bytes, and where its records begin."""
    disk = SimDisk(Random(1))
    log = Log.open(disk, owner="7", new_storage_id=lambda: "origin", options=LogOptions(file_bytes=4096))
    borders = [START]
    for number in range(150):
        size = rng.randrange(400)
        position = log.append(1, [b"%d" % number + b"x" * size])
        if position != borders[-1]:
            borders.append(position)  # a file's header lies between
        borders.append(position + record_bytes(size + len(b"%d" % number)))
    log.sync()
    data = b""
    for name in disk.list():
        file = disk.open(name)
        data += file.read(0, file.size())
    return StorageId("origin"), data, borders
