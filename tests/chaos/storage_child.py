"""A broker's storage in a process of its own, made to be killed: ``python -m tests.chaos.storage_child``.

Its metadata lives in the parent (``MetadataServer``), as that of a real broker lives in other processes. It
waits for one line of JSON on stdin, so that the parent can start the next child while it still looks at what
the last one has left.

* ``produce``: several producers append to several topics until the kill comes; each acknowledged batch is
  reported on stdout. Producers begin with their first batch that was not acknowledged, as real ones do.
* ``hand over``: append 22 messages, then seal; the process kills itself at the step that it was told.
* ``merge``: put each of 22 messages into a segment of its own, then merge them; the same.
* ``trickle``: put one message after the other into segments, and merge them, until the kill comes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from sava.metadata.commands import Delete, Put
from sava.metadata.store import MetadataStore
from sava.records import RecordBatch
from sava.storage import segment_process
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.journal import JournalOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.producers import DuplicateForgotten
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey, TopicState
from sava.storage.uploader import UploadOptions
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.support.memory_store import MemoryStore
from tests.support.one_disk import OneDisk

IN_FLIGHT = 8
OPTIONS = StorageOptions(
    cache_bytes=64 << 10,
    journal=JournalOptions(file_bytes=128 << 10),
    upload=UploadOptions(segment_bytes=64 << 10, segment_age_s=0.05),
)
"""Small everywhere, so that a short life sees files begun and trimmed and segments registered."""

_LENGTH = struct.Struct("<I")


class Work(msgspec.Struct):
    """What a child is to do."""

    task: str
    directory: str
    objects: str
    metadata: str
    broker: str
    epoch: int
    topics: list[TopicKey] = []
    producers: dict[str, int] = {}
    """``topic id:producer`` → the first sequence that was not acknowledged."""
    kill_at: str = ""
    has_process: bool = False
    """Segments are made by a process of their own, which dies with the child."""


# -- metadata over a socket --------------------------------------------------------------------


class MetadataServer:
    """In the parent: a MemoryStore for children."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store = store
        self._path = path
        self._server: asyncio.Server | None = None
        self.changes: Counter[str] = Counter()

    async def __aenter__(self) -> MetadataServer:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                method, args, kwargs = await _receive(reader)
                if method == "txn":
                    self.changes[_name_change(args[1])] += 1
                try:
                    answer = True, await getattr(self._store, method)(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 (it belongs to the child)
                    answer = False, error
                _send(writer, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # killed
        finally:
            writer.close()


class RemoteMetadata:
    """In the child: as much of a MetadataStore as storage needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self.kill_at = ""

    async def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        async with self._turn:
            _send(self._writer, (method, args, kwargs))
            succeeded, answer = await _receive(self._reader)
        if not succeeded:
            raise answer
        return answer

    async def get(self, key: str, **kwargs: object) -> Any:
        return await self._call("get", key, **kwargs)

    async def range(self, prefix: str, **kwargs: object) -> Any:
        return await self._call("range", prefix, **kwargs)

    async def txn(self, compare: object, then: Sequence[object], *args: object, **kwargs: object) -> Any:
        change = _name_change(then)
        die_if(self.kill_at == f"before {change}")
        answer = await self._call("txn", compare, then, *args, **kwargs)
        die_if(self.kill_at == f"after {change}")
        return answer


def _name_change(operations: Sequence[object]) -> str:
    puts = [operation for operation in operations if isinstance(operation, Put)]
    if any(isinstance(operation, Delete) for operation in operations):
        return "replace"
    if any("/objects/" in put.key for put in puts):
        return "register"
    state = msgspec.json.decode(puts[0].value, type=TopicState)
    return "seal" if state.sealed else "claim"


def _send(writer: asyncio.StreamWriter, value: object) -> None:
    data = pickle.dumps(value)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


# -- killing itself -----------------------------------------------------------------------------


def die_if(is_time: bool) -> None:
    if is_time:
        os.kill(os.getpid(), signal.SIGKILL)


class KillingStore(ObjectStore):
    kill_at = ""

    async def put_new(self, key: str, data: bytes | memoryview | Sequence[bytes]) -> None:
        die_if(self.kill_at == "before put")
        if self.kill_at == "during put":
            whole = bytes(data) if isinstance(data, bytes | memoryview) else b"".join(data)
            await super().put_new(key, whole[: len(whole) // 2])
            die_if(True)
        await super().put_new(key, data)
        die_if(self.kill_at == "after put")

    async def delete(self, keys: Sequence[str]) -> None:
        die_if(self.kill_at == "before delete")
        if self.kill_at == "during delete":
            await super().delete(keys[: len(keys) // 2])
            die_if(True)
        await super().delete(keys)
        die_if(self.kill_at == "after delete")


# -- working -----------------------------------------------------------------------------------


def batch_of(topic: TopicKey, producer: int, sequence: int) -> RecordBatch:
    """The batch of a producer that begins with this sequence: always the same one."""
    payloads = [
        b"%d:%d:%d:" % (topic.topic_id, producer, number) + b"x" * (number * 37 % 400)
        for number in range(sequence, sequence + 1 + sequence % 7)
    ]
    return RecordBatch.encode(payloads, publish_time=sequence, producer_id=producer, base_sequence=sequence)


async def produce(log: TopicLog, producer: int, sequence: int) -> None:
    """Several batches in flight, as a client has; acknowledgements are told as they come."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def append(batch: RecordBatch) -> None:
        header = batch.header
        try:
            base = await log.append(batch)
        except DuplicateForgotten:
            base = -1
        os.write(
            1, b"%d %d %d %d %d\n" % (log.topic.topic_id, producer, header.base_sequence, len(batch), base)
        )
        room.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await room.acquire()
            batch = batch_of(log.topic, producer, sequence)
            group.create_task(append(batch))
            sequence += len(batch)


async def produce_all(storage: BrokerStorage, work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        for topic in work.topics:
            log = await storage.open_topic(topic, epoch=work.epoch)
            for name, sequence in work.producers.items():
                topic_id, producer = map(int, name.split(":"))
                if topic_id == topic.topic_id:
                    group.create_task(produce(log, producer, sequence))


async def hand_over(storage: BrokerStorage, work: Work) -> None:
    log = await storage.open_topic(work.topics[0], epoch=work.epoch)
    for offset in range(22):
        base = await log.append(RecordBatch.encode([b"%d" % offset], publish_time=1))
        os.write(1, b"%d\n" % base)
        die_if(work.kill_at == f"append {offset}")
    await log.seal()


async def store_next(storage: BrokerStorage, log: TopicLog) -> None:
    """One more message, in a segment of its own."""
    base = await log.append(RecordBatch.encode([b"%d" % log.next_offset], publish_time=1))
    os.write(1, b"%d\n" % base)
    await storage.uploader.flush(log._backlog, base + 1)


async def merge(storage: BrokerStorage, work: Work, *edges: RemoteMetadata | KillingStore) -> None:
    log = await storage.open_topic(work.topics[0], epoch=work.epoch)
    for _ in range(22):
        await store_next(storage, log)
    for edge in edges:
        edge.kill_at = work.kill_at
    await log.maintenance.merge_segments(None)


async def trickle(storage: BrokerStorage, work: Work) -> None:
    log = await storage.open_topic(work.topics[0], epoch=work.epoch)
    while True:
        await store_next(storage, log)
        await log.maintenance.merge_segments(None)


async def main() -> None:
    work = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=Work)
    reader, writer = await asyncio.open_unix_connection(work.metadata)
    store = cast(KillingStore, KillingStore.open(work.objects))
    metadata = RemoteMetadata(reader, writer)
    options = OPTIONS
    if work.has_process:
        segment_process.WORTH_BYTES = 0  # type: ignore[misc]
        options = replace(OPTIONS, upload=replace(OPTIONS.upload, has_process=True))
    if work.task != "merge":
        store.kill_at = metadata.kill_at = work.kill_at
    storage = await BrokerStorage.open(
        LocalDisk(work.directory),
        broker=work.broker,
        store=store,
        metadata=cast(MetadataStore, metadata),
        options=options,
        fail=lambda failure: os._exit(3),
        supervisor=Supervisor(),
    )
    await storage.journal.begin_generation(OneDisk())
    if work.task == "produce":
        await produce_all(storage, work)
    elif work.task == "merge":
        await merge(storage, work, metadata, store)
    elif work.task == "trickle":
        await trickle(storage, work)
    else:
        await hand_over(storage, work)


if __name__ == "__main__":
    asyncio.run(main())
