"""Segments and catalog on a real S3 server: the whole way of a topic's history, and a server or network that
fails."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import duckdb
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from sava.cluster.writers import INEXACT_MS
from sava.records import RecordBatch
from sava.storage import staging
from sava.storage.catalog import Catalog
from sava.storage.errors import ObjectStoreUnavailable
from sava.storage.keys import objects_prefix
from sava.storage.maintenance import RetentionPolicy, drop_expired
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import delete_topic, sweep_orphans
from sava.storage.segment import SegmentReader, write_segment
from sava.storage.staging import Manifest, Part
from tests.support.memory_store import MemoryStore
from tests.support.messages import TOPIC, numbered, placed, read_messages, write
from tests.support.objects import BUCKET, S3Server, batch, new_object, s3_server

__all__ = ["s3_server"]

FAR = 1 << 50


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(s3_server: S3Server, prefix: str) -> ObjectStore:
    return ObjectStore.open(f"{s3_server.url}/{prefix}", options=s3_server.options)


async def test_plain_http_beyond_loopback_must_be_asked_for(
    s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator names an S3 server without TLS on another host. Sava does not know that 127.1 is this
    machine, so it refuses plain HTTP there until AWS_ALLOW_HTTP is set, and then takes it."""
    options = {**s3_server.options, "endpoint": f"http://127.1:{s3_server.port}"}
    refusing = ObjectStore.open(f"{s3_server.url}/{prefix}", options=options)
    with pytest.raises(ObjectStoreUnavailable):
        await refusing.put_new("object", b"1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = ObjectStore.open(f"{s3_server.url}/{prefix}", options=options)
    await store.put_new("object", b"1")
    assert await store.get("object") == b"1"


async def test_the_history_of_a_topic_that_moves(store: ObjectStore) -> None:
    """0..22 on one broker, 22.. on the next; a consumer at 6 reads on without a gap; retention, deletion,
    nothing left."""
    catalog = Catalog(MemoryStore(), TOPIC)
    await catalog.claim(epoch=1, storage_id="a", has_tail=False)
    await catalog.register(await write(store, 0, 22), epoch=1, producers=(), origins=())
    await catalog.seal(epoch=1, end=22, producers=(), origins=())
    state = await catalog.claim(epoch=2, storage_id="b", has_tail=False)
    assert state.end == 22
    later = await write(store, 22, 40, epoch=2, created_ms=10)
    await catalog.register(later, epoch=2, producers=(), origins=())

    reader = SegmentReader(store)
    found = [m for each in await catalog.segments(6) for m in await read_messages(reader, each, 6)]
    assert [int(message.payload) for message in found] == list(range(6, 40))
    for segment in await catalog.segments():
        await reader.verify(segment)

    await drop_expired(catalog, store, RetentionPolicy(max_age_ms=5), epoch=2, now_ms=5)
    assert [info.key async for info in store.list(objects_prefix(TOPIC))] == [later.key]
    await write(store, 22, 40, epoch=1)
    assert len(await sweep_orphans(catalog, store, now_ms=FAR)) == 1
    assert await delete_topic(catalog, store) == 1
    assert [info.key async for info in store.list(objects_prefix(TOPIC))] == []


async def test_what_is_staged_is_found_aged_read_and_removed(store: ObjectStore) -> None:
    assert await staging.list_staged(store) == []
    key, data, ((_, section),) = new_object(
        staging.parts_prefix("w"), {"/default/orders": [batch([b"a", b"b"]), batch([b"c"])]}
    )
    await store.put_new(key, data)
    manifest = Manifest(writer="w", batch=1, parts=(Part("/default/orders", 1, (section,)),))
    named = staging.manifest_key("w", 1, "x")
    await staging.put_manifest(store, named, manifest)
    found = await staging.get_manifest(store, named)
    batches = [each async for each in staging.read_batches(store, found.parts[0].sections)]
    assert [payload for each in batches for payload in each.payloads()] == [b"a", b"b", b"c"]
    now_ms = await staging.store_time_ms(store)
    listed = await staging.list_staged(store)
    assert {info.key for info in listed} == {key, named}
    for info in listed:
        # As a sweep and a commit see it.
        assert abs((await store.head(info.key)).modified_ms - info.modified_ms) < INEXACT_MS
        assert abs(now_ms - info.modified_ms) < 60_000
    await store.delete([info.key for info in listed])
    assert await staging.list_staged(store) == []


async def test_other_programs_read_the_same_objects(
    s3_server: S3Server, store: ObjectStore, prefix: str
) -> None:
    """Straight from S3 by plain pyarrow, which lists the topic's directory; DuckDB on what pyarrow read."""
    for start in range(0, 3000, 1000):
        await write(store, start, start + 1000)
    files = pyarrow.fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{s3_server.port}",
        scheme="http",
        access_key="sava",
        secret_key="secret",
        region="us-east-1",
    )
    table = pq.read_table(f"{BUCKET}/{prefix}/{objects_prefix(TOPIC)}", filesystem=files)
    assert table.column("offset").to_pylist() == list(range(3000))
    rows = duckdb.sql(
        """SELECT count(*), min("offset"), max("offset"), bool_and(payload::VARCHAR::BIGINT = "offset")
           FROM "table" """
    )
    assert rows is not None
    assert rows.fetchall() == [(3000, 0, 2999, True)]


async def test_a_seek_in_a_topic_of_many_segments_reads_little(store: ObjectStore) -> None:
    """Of 64 MB here; what is read depends on row groups and on one footer, not on how large the topic is."""
    random_bytes = os.urandom(16 << 20)
    payloads = [random_bytes[start : start + 1000] for start in range(0, len(random_bytes), 1000)]
    segments = [
        await write_segment(
            store,
            TOPIC,
            epoch=1,
            batches=placed([RecordBatch.encode(payloads, publish_time=1)], number * len(payloads)),
            created_ms=0,
        )
        for number in range(4)
    ]
    counting = _Counting(store)
    wanted = 2 * len(payloads) + 8000
    stream = SegmentReader(counting).read(segments[2], wanted, segments[2].end)
    assert (await anext(stream)).base_offset == wanted
    await stream.aclose()
    assert counting.bytes_read < 8 << 20


class _Counting(ObjectStore):
    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.url, store._backend)
        self.bytes_read = 0

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        self.bytes_read += end - start
        return await super().get_range(key, start, end)


async def test_endpoint_and_credentials_from_the_environment(
    s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.options["secret_access_key"])
    store = ObjectStore.open(f"{s3_server.url}/{prefix}")
    await store.put_new("a", b"x")
    assert await store.get("a") == b"x"


async def test_wrong_credentials_are_said_and_not_tried_again(s3_server: S3Server, prefix: str) -> None:
    options = s3_server.options | {"secret_access_key": "wrong"}
    store = ObjectStore.open(f"{s3_server.url}/{prefix}", options=options)
    for call in (store.put_new("a", b"x"), store.get("a"), store.head("a")):
        with pytest.raises(ObjectStoreUnavailable) as caught:
            await call
        assert "tried" not in str(caught.value)


# -- a server that goes away ------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_a_server_that_is_killed_and_comes_back(own_server: S3Server) -> None:
    store = ObjectStore.open(own_server.url, options=own_server.options, timeout_s=3, attempts=3)
    reader = SegmentReader(store)
    segment = await write(store, 0, 100)
    own_server.kill()
    with pytest.raises(ObjectStoreUnavailable):
        await write(store, 100, 200)
    with pytest.raises(ObjectStoreUnavailable):
        await read_messages(reader, segment)
    with pytest.raises(ObjectStoreUnavailable):
        assert [info async for info in store.list(objects_prefix(TOPIC))]
    await asyncio.to_thread(own_server.start)
    assert len(await read_messages(reader, segment)) == 100
    await reader.verify(await write(store, 100, 200))


# -- a network that fails ---------------------------------------------------------------------


class Proxy:
    """A TCP proxy in front of the server. ``answer_limits``: for the next connections, how many bytes of the
    server's answers pass before the connection is cut; others are left alone."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.answer_limits: list[int] = []
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        limit = self.answer_limits.pop(0) if self.answer_limits else None
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._relay(reader, up_writer, None), self._relay(up_reader, writer, limit))
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.transport.abort()
            up_writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        passed = 0
        while data := await reader.read(1 << 16):
            await self.flowing.wait()
            if limit is not None and passed + len(data) > limit:
                writer.write(data[: limit - passed])
                await writer.drain()
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
            passed += len(data)
        raise ConnectionResetError

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(
    server: S3Server, prefix: str, *, timeout_s: float = 10
) -> AsyncIterator[tuple[Proxy, ObjectStore]]:
    proxy = Proxy(server.port)
    listener = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    store = ObjectStore.open(
        f"{server.url}/{prefix}", options=server.options_behind(proxy.port), timeout_s=timeout_s, attempts=4
    )
    try:
        yield proxy, store
    finally:
        listener.close()
        await proxy.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(listener.wait_closed(), 5)


async def test_an_upload_whose_answer_is_lost_is_found_and_kept(s3_server: S3Server, prefix: str) -> None:
    async with proxied(s3_server, prefix) as (proxy, store):
        proxy.answer_limits = [0, 10]
        await store.put_new("a", b"mine" * 1000)
        assert await store.get("a") == b"mine" * 1000
        assert proxy.answer_limits == []


async def test_answers_that_break_off_are_asked_for_again(s3_server: S3Server, prefix: str) -> None:
    async with proxied(s3_server, prefix) as (_, store):
        batches = numbered(0, 20_000, size=100)
        segment = await write_segment(store, TOPIC, epoch=1, batches=batches, created_ms=0)
    async with proxied(s3_server, prefix) as (proxy, store):
        proxy.answer_limits = [100, 1000, 20_000]
        messages = await read_messages(SegmentReader(store), segment)
        assert [int(message.payload) for message in messages] == list(range(20_000))
        assert proxy.answer_limits == []


async def test_answers_that_always_break_off_are_an_error(s3_server: S3Server, prefix: str) -> None:
    async with proxied(s3_server, prefix) as (_, store):
        segment = await write(store, 0, 5000)
    async with proxied(s3_server, prefix) as (proxy, store):
        proxy.answer_limits = [700] * 100
        with pytest.raises(ObjectStoreUnavailable):
            await read_messages(SegmentReader(store), segment)


async def test_a_network_that_stalls_costs_the_deadline(s3_server: S3Server, prefix: str) -> None:
    async with proxied(s3_server, prefix, timeout_s=1) as (proxy, store):
        await store.put_new("a", b"x")
        proxy.flowing.clear()
        with pytest.raises(ObjectStoreUnavailable):
            await store.get("a")
        proxy.flowing.set()
        assert await store.get("a") == b"x"
