"""Segment process: a process beside the broker that makes its segments, so that the event loop does not wait.

Encoding a segment takes a tenth of a second of the interpreter's time, and a thread of the broker would take
it from the event loop, message by message. So the uploader hands a job to a child:

    uploader   topic, epoch, where its frames are in the journal      ──▶  child
    child      reads the journal's files, encodes, compresses, sums, puts the object, reads it back
    child      descriptor, and what the frames say of producers       ──▶  uploader, which registers it

The journal's files are the hand-over: the child reads them by positions, as consumers do (``wal.reader``),
and every frame is checked against its checksum on the way. The broker copies nothing: a job of 16 MiB is a
message of a few kilobytes. The child changes nothing but the object store, where it writes under names of
its own. It knows nothing of catalogs: what it has made is nothing until the uploader registers it.

    what happens                     what becomes of the range
    the child dies (also: SIGKILL)   ``SegmentProcessDied``; the uploader tries again, with a new child
    a job takes too long             the same: the child is killed
    the child cannot read a frame    the uploader writes this range itself, and knows what is wrong
    the broker dies                  the child dies with it (Linux: at once; else when it has no more to read)
    the broker stops                 an idle child ends by itself, one that works is killed

In each of these cases an object may be left that nothing names (``orphans``).

**Idle brokers have none.** The child is started for the first job that is worth it and ends ``IDLE_S`` after
the last one; while it is there, it takes 50 MB of its own to begin with, and 110 MB when it has made large
segments. It imports no gRPC, and comes from a fresh interpreter: gRPC cannot be used after a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple

from sava.errors import Outcome, RetryableError, SavaError
from sava.records import Header, RecordBatch
from sava.storage.errors import ObjectStoreUnavailable, SegmentCorrupt
from sava.storage.journal_index import BATCH, Span
from sava.storage.objectstore import ObjectStore
from sava.storage.origin_marks import Mark
from sava.storage.segment import write_segment
from sava.storage.source_positions import Origin, is_source_key, learned
from sava.storage.types import Segment, TopicKey
from sava.tasks import cancelled
from sava.wal import LocalDisk
from sava.wal.reader import WalReader

_log = logging.getLogger(__name__)

IDLE_S: Final = 120.0
"""After which a child that has nothing to do ends, and its memory is free."""
WORTH_BYTES: Final = 256 << 10
WORTH_RANGES: Final = 8
"""A job of less is done in the broker, unless there is a child: it takes a few milliseconds, and a child half
a second to start."""
SIDE_BY_SIDE: Final = 8
"""Segments of a job that are on their way to the object store at once: small ones wait for little else."""
JOB_S: Final = 150.0
SLOWEST_BYTES_PER_S: Final = 256 << 10
"""A job has this time, and a second for each of these: more than the object store's own limits together."""
STOP_S: Final = 2.0
NICENESS: Final = 5
"""Below the broker: a segment that comes later delays no message."""
_LENGTH: Final = struct.Struct("<Q")
_MAX_ANSWER: Final = 64 << 20
_PR_SET_PDEATHSIG: Final = 1


class SegmentProcessDied(RetryableError):
    """The process that makes segments ended in the middle of its work. Nothing is registered."""


class SegmentRange(NamedTuple):
    """A range of a topic that is to be a segment."""

    topic: TopicKey
    epoch: int
    spans: Sequence[Span]
    known: Mapping[Origin, Mark]
    """What is known of the sources that are copied into the topic, as of the range's start."""


class MadeSegment(NamedTuple):
    """A verified object, and what its batches say."""

    segment: Segment
    headers: Sequence[Header]
    """See ``telling``."""
    marks: Mapping[Origin, Mark]
    """What they add to what is known of sources."""
    taken_bytes: int


async def make_segment(
    store: ObjectStore,
    topic: TopicKey,
    epoch: int,
    batches: list[RecordBatch],
    known: Mapping[Origin, Mark],
    threads: Executor,
) -> MadeSegment:
    """Raises as ``write_segment``. The batches are let go of once they are encoded."""
    headers = [batch.header for batch in batches]
    marks = await marks_of(batches, known, threads)
    writing = write_segment(store, topic, epoch=epoch, batches=batches.copy(), threads=threads)
    batches.clear()
    segment = await writing
    return MadeSegment(segment, telling(headers), marks, sum(header.length for header in headers))


async def marks_of(
    batches: Sequence[RecordBatch], known: Mapping[Origin, Mark], threads: Executor | None
) -> Mapping[Origin, Mark]:
    """What these batches, which follow what is known of the sources, add to the marks of origins. Messages of
    sources are looked at for it, on another thread."""
    copied = [batch for batch in batches if is_source_key(batch.header.producer_id)]
    if not copied:
        return {}
    return await asyncio.get_running_loop().run_in_executor(threads, learned, known, copied)


def telling(headers: Sequence[Header]) -> list[Header]:
    """Those from which a table of producers comes to the same end as from all: of each producer the last, of
    each source all, in order."""
    told: list[Header] = []
    seen = {0}
    for header in reversed(headers):
        if header.producer_id in seen:
            continue
        if not is_source_key(header.producer_id):
            seen.add(header.producer_id)
        told.append(header)
    told.reverse()
    return told


class LeftToBroker(SavaError):
    """The child could not write this range, for a reason that the broker finds out by writing it itself."""

    outcome = Outcome.NOT_DONE


# -- in the broker ---------------------------------------------------------------------------------


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class SegmentProcess:
    """The child of one broker, while there is one. Owned by the event loop; one job at a time."""

    def __init__(self, store_url: str, directory: str, storage_id: str) -> None:
        self._place = store_url, directory, storage_id
        self._child: _Child | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._until = 0.0
        """When the child ends, unless a job is worth it before."""
        self._ending: set[asyncio.Task[int]] = set()
        self.deaths = 0
        """In the middle of a job."""

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None else None

    def is_worth(self, size: int, ranges: int) -> bool:
        """Whether a job goes to the child."""
        return self._child is not None or _is_worth_it(size, ranges)

    async def write(self, ranges: Sequence[SegmentRange]) -> list[MadeSegment | SavaError]:
        """For each range a verified object, or ObjectStoreUnavailable, SegmentCorrupt, LeftToBroker. Raises
        SegmentProcessDied, OSError (there is no child to be had)."""
        if self._idle is not None:
            self._idle.cancel()
        size = sum(span.length for each in ranges for span in each.spans)
        job = pickle.dumps((*self._place, list(ranges)), pickle.HIGHEST_PROTOCOL)
        child = self._child = self._child or await _start()
        try:
            async with asyncio.timeout(JOB_S + size / SLOWEST_BYTES_PER_S):
                await _send(child.writer, job)
                outcomes: list[Any] = pickle.loads(await _receive(child.reader))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self.deaths += 1
            code = await self._kill(child)
            why = "took too long" if isinstance(error, TimeoutError) else f"ended with {code}"
            raise SegmentProcessDied(f"the process that makes segments {why}; it is started again") from error
        except BaseException:
            await self._kill(child)
            raise
        loop = asyncio.get_running_loop()
        if _is_worth_it(size, len(ranges)):
            self._until = loop.time() + IDLE_S
        self._idle = loop.call_at(self._until, self._let_go)
        return [_error_of(*each) if isinstance(each, tuple) and len(each) == 2 else each for each in outcomes]

    def _let_go(self) -> None:
        """It has nothing to do: it ends when it sees that no job can come."""
        child, self._child = self._child, None
        if child is not None:
            ending = asyncio.create_task(_end(child), name="segment-process-end")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _kill(self, child: _Child) -> int:
        self._child = None
        child.process.kill()
        return await _end(child)

    async def close(self) -> None:
        """The child is gone on return. A job must not be under way."""
        if self._idle is not None:
            self._idle.cancel()
        self._let_go()
        while self._ending:
            await asyncio.wait(self._ending)


def _is_worth_it(size: int, ranges: int) -> bool:
    return size >= WORTH_BYTES or ranges >= WORTH_RANGES


def _error_of(kind: str, text: str) -> SavaError:
    if kind == ObjectStoreUnavailable.__name__:
        return ObjectStoreUnavailable(text)
    if kind == SegmentCorrupt.__name__:
        return SegmentCorrupt(text)
    return LeftToBroker(f"{kind}: {text}")


async def _start() -> _Child:
    """From a fresh interpreter. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            # -P: what lies in the directory that the broker was started in is no part of it.
            program = f"from {main.__module__} import main; main()"
            command = [sys.executable, "-P", "-c", program, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(  # noqa: ASYNC220 (it returns once the kernel has started it)
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system", **os.environ},
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
    except BaseException:
        ours.close()
        raise
    return _Child(process, reader, writer)


async def _end(child: _Child) -> int:
    """Wait for it, not long; its exit code."""
    child.writer.close()
    with suppress(OSError):
        await child.writer.wait_closed()
    try:
        return await asyncio.to_thread(child.process.wait, STOP_S)
    except subprocess.TimeoutExpired:
        child.process.kill()
        return await asyncio.to_thread(child.process.wait)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(_LENGTH.pack(len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError, OSError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MAX_ANSWER:
        raise OSError(f"a message of {length} bytes between a broker and the process of its segments")
    return await reader.readexactly(length)


# -- in the child ----------------------------------------------------------------------------------


class _Work:
    """What a child keeps from job to job."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="sava-segment")
        self._store: ObjectStore | None = None

    async def do(
        self, url: str, directory: str, storage_id: str, ranges: Sequence[SegmentRange]
    ) -> list[MadeSegment | tuple[str, str]]:
        if self._store is None:
            self._store = ObjectStore.open(url)
        # For this job alone: a descriptor keeps the space of a file that the journal has removed.
        reader = WalReader(LocalDisk(directory), storage_id=storage_id, max_open_files=4)
        slots = asyncio.Semaphore(SIDE_BY_SIDE)
        making = [asyncio.create_task(self._make(self._store, reader, each, slots)) for each in ranges]
        try:
            return [await each for each in making]
        finally:
            await cancelled(*making)
            reader.close()

    async def _make(
        self, store: ObjectStore, reader: WalReader, wanted: SegmentRange, slots: asyncio.Semaphore
    ) -> MadeSegment | tuple[str, str]:
        """Or the kind of an error, and its text."""
        async with slots:
            try:
                batches = _read(reader, wanted)
                return await make_segment(
                    store, wanted.topic, wanted.epoch, batches, wanted.known, self._threads
                )
            except Exception as error:  # noqa: BLE001 (the broker finds out more)
                return type(error).__name__, str(error)


def _read(reader: WalReader, wanted: SegmentRange) -> list[RecordBatch]:
    records = reader.read([(span.position, span.length) for span in wanted.spans])
    batches = [RecordBatch.parse(record.payload) for record in records]
    for span, record, batch in zip(wanted.spans, records, batches, strict=True):
        if record.kind != BATCH or batch.base_offset != span.base_offset:
            raise ValueError(f"the frame at {span.position} is not offset {span.base_offset}")
    return batches


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    work = _Work()
    while True:
        try:
            job = pickle.loads(await _receive(reader))
            await _send(writer, pickle.dumps(await work.do(*job), pickle.HIGHEST_PROTOCOL))
        except (asyncio.IncompleteReadError, OSError):
            return  # the broker wants no more


def _die_with(broker: int) -> None:
    """Whatever it dies of. Elsewhere than on Linux the end of the connection says it, a job later."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != broker:  # it died before
        os._exit(0)


def main() -> None:
    """With the number of its connection, and the id of the broker's process, as arguments."""
    _die_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):
        # They go to all processes of a service or a terminal. The broker needs this one to stop in order.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
