"""Journal inspection: the journal of a stopped broker, read without changing a byte of its directory.

Opening a journal changes it: a torn tail is cut, the incarnation rises, remains are removed. Whoever looks at
the disk of a broker that does not start must leave it as it is, so the same recovery (``wal.recovery``) and
the same replay (``journal``) run here on a directory that can only be read. They say what the next start will
find, or why it will refuse.

The directory is locked as long as it is looked at: shared, so that several may look, against which a broker
that is started meanwhile finds it in use.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from sava.errors import CallerError, HostError
from sava.records import RecordBatch
from sava.storage.journal_index import JournalIndex
from sava.storage.replay import BATCH, Replay
from sava.wal import DirectoryLocked, FileMissing, Identity, Record
from sava.wal.disk import LOCK_FILE, LocalFile
from sava.wal.format import FormatVersion, file_start, read_header
from sava.wal.reader import Reader
from sava.wal.recovery import recover

_STRETCH_BYTES: Final = 1 << 20


class NoJournal(CallerError):
    """The directory holds no journal."""


class NotInJournal(CallerError):
    """Offsets that this journal does not hold."""


class TopicFrames(NamedTuple):
    """What the journal holds of a topic and has not released."""

    topic_id: int
    ranges: list[tuple[int, int]]
    size: int


class _ReadOnlyDirectory:
    """A ``wal.Disk`` of which only the log files are seen and nothing can be changed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        return str(self._path)

    def list(self) -> list[str]:
        try:
            return sorted(each.name for each in self._path.iterdir() if each.name.startswith("log-"))
        except OSError as error:
            raise NoJournal(f"{self._path}: cannot list: {error.strerror}") from error

    def open(self, name: str, *, create: bool = False) -> LocalFile:
        if create:
            self._refuse()
        path = self._path / name
        try:
            return LocalFile(path, os.open(path, os.O_RDONLY))
        except FileNotFoundError as error:
            raise FileMissing(f"{path}: cannot open: {error.strerror}") from error
        except OSError as error:
            raise HostError(f"{path}: cannot open: {error.strerror}") from error

    def _refuse(self) -> NoReturn:
        raise HostError(f"{self._path} is only looked at, and cannot be changed")

    def rename(self, old: str, new: str) -> None:
        self._refuse()

    def remove(self, name: str) -> None:
        self._refuse()

    def sync_dir(self) -> None:
        self._refuse()

    def directory(self, name: str) -> NoReturn:
        self._refuse()

    def lock(self) -> None:
        self._refuse()

    def unlock(self) -> None:
        self._refuse()


class StoppedJournal:
    """Made by ``open_stopped``, ``scan`` first. Owned by one thread."""

    def __init__(self, path: Path) -> None:
        self._disk = _ReadOnlyDirectory(path)
        self._files = [name for name in self._disk.list() if file_start(name) is not None]
        if not self._files:
            raise NoJournal(f"{path} holds no journal: give the directory that storage.journal_dir names")
        self._first = file_start(self._files[0]) or 0
        self._found = Replay()
        self.identity = self._first_identity()
        """None: there is no intact header; ``scan`` says why."""
        self.size = sum((path / name).stat().st_size for name in self._files)
        self.torn_bytes = 0
        """At the end, never acknowledged: the next start cuts them off."""
        self.records = 0

    def _first_identity(self) -> Identity | None:
        file = self._disk.open(self._files[0])
        try:
            return read_header(file, self._first)
        except FormatVersion:
            return None
        finally:
            file.close()

    @property
    def file_count(self) -> int:
        return len(self._files)

    def scan(self, advance: Callable[[int], None] = lambda done: None) -> list[str]:
        """Read all of it, each record by its checksum and each batch by its own; what is wrong, in words. The
        last of them may be what keeps a broker from starting: nothing behind it was read. ``advance`` is told
        how many bytes were read so far."""
        faults: list[str] = []
        try:
            recovered = recover(
                self._disk,
                owner="" if self.identity is None else self.identity.owner,
                replay=partial(self._take, faults, advance),
            )
        except HostError as error:
            return [*faults, str(error)]
        assert recovered is not None
        recovered.file.close()
        self.identity, self.torn_bytes = recovered.identity, recovered.torn_bytes
        return faults

    def _take(self, faults: list[str], advance: Callable[[int], None], record: Record) -> None:
        self.records += 1
        if record.kind == BATCH:
            try:
                RecordBatch.parse(record.payload).verify()
            except CallerError as error:
                faults.append(f"the batch at position {record.position}: {error}")
                return
        self._found.take(record)
        advance(record.position - self._first)

    @property
    def topics(self) -> list[TopicFrames]:
        held = self._found.holdings
        return [
            TopicFrames(topic_id, index.ranges, index.bytes_from(0))
            for topic_id in sorted(held.topic_ids)
            if (index := held.index(topic_id))
        ]

    def read(self, topic_id: int, start: int | None, end: int | None = None) -> Iterator[RecordBatch]:
        """Batches that cover exactly ``start .. end``: by default from the first that is held, and to the end
        of the stretch without a gap. Raises NotInJournal."""
        index = self._found.holdings.index(topic_id)
        position = index.start if start is None else start
        stop = next((stop for first, stop in index.ranges if first <= position < stop), None)
        if stop is None or (end is not None and not position <= end <= stop):
            held = ", ".join(f"{first}..{stop}" for first, stop in index.ranges) or "nothing"
            wanted = f"{position}..{'' if end is None else end}"
            raise NotInJournal(
                f"{self._disk.path}: offsets {wanted} of topic id {topic_id} were asked for, "
                f"and it holds {held}; `sava storage inspect --journal` lists what there is"
            )
        return self._stretch(index, position, stop if end is None else end)

    def _stretch(self, index: JournalIndex, position: int, end: int) -> Iterator[RecordBatch]:
        assert self.identity is not None
        reader = Reader(self._disk, storage_id=self.identity.storage_id)
        try:
            while position < end:
                spans = index.spans(position, _STRETCH_BYTES)
                for record in reader.read([(span.position, span.length) for span in spans]):
                    if position >= end:
                        break
                    batch = RecordBatch.parse(record.payload).slice(position, end)
                    position = batch.next_offset
                    yield batch
        finally:
            reader.close()


@contextmanager
def open_stopped(path: Path) -> Iterator[StoppedJournal]:
    """Raises DirectoryLocked while a broker runs on the directory, NoJournal."""
    with _locked(path):
        yield StoppedJournal(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A directory without a lock file was never opened (a copy, say): nobody can be working on it."""
    try:
        fd = os.open(path / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    except OSError as error:
        raise HostError(f"{path / LOCK_FILE}: cannot open: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise DirectoryLocked(
            f"{path} is in use by a running broker: stop it, or leave out --journal to look at segments"
        ) from error
    try:
        yield
    finally:
        os.close(fd)
