"""ObjectStore: one contract for files, memory and a real S3 server; and what each fault becomes."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from sava.storage import objectstore
from sava.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
    ObjectTruncated,
    UnsupportedStore,
)
from sava.storage.objectstore import ObjectStore
from tests.support.objects import S3Server
from tests.support.waiting import OwnTime
from tests.unit.storage.faults import BROKEN, FaultyBackend, cut, hang, lose_answer, refuse


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore.open(f"file://{tmp_path}/a%20directory")
    if request.param == "memory":
        return ObjectStore.open("memory://")
    server: S3Server = request.getfixturevalue("s3_server")
    return ObjectStore.open(f"{server.url}/{uuid.uuid4()}", options=server.options)


async def keys_under(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


# -- the contract ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"12345", memoryview(b"12345"), [b"12", b"", b"345"]], ids=["bytes", "memoryview", "parts"]
)
async def test_what_was_put_is_read(store: ObjectStore, data: bytes) -> None:
    await store.put_new("a/b/c.parquet", data)
    assert await store.get("a/b/c.parquet") == b"12345"
    assert await store.get_range("a/b/c.parquet", 1, 3) == b"23"
    assert await store.get_ranges("a/b/c.parquet", [(0, 1), (3, 5), (2, 3)]) == [b"1", b"45", b"3"]
    assert (await store.head("a/b/c.parquet")).size == 5


async def test_a_large_object_is_written_in_one_piece(store: ObjectStore) -> None:
    data = os.urandom(1 << 20) * 20
    await store.put_new("large", data)
    assert await store.get("large") == data
    assert await store.get_range("large", 19 << 20, 20 << 20) == data[: 1 << 20]
    with pytest.raises(ObjectExists):
        await store.put_new("large", data)


async def test_put_new_never_overwrites(store: ObjectStore) -> None:
    await store.put_new("a", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(ObjectExists):
            await store.put_new("a", data)
    assert await store.get("a") == b"first"


async def test_one_of_many_writers_at_once_wins(store: ObjectStore) -> None:
    """The fence under every upload: on S3 it is the server's, so it is tried on a real one."""
    contents = [b"%d" % number * 1000 for number in range(16)]
    results = await asyncio.gather(*(store.put_new("a", data) for data in contents), return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert all(isinstance(result, ObjectExists) for result in results if result is not None)
    assert await store.get("a") == contents[results.index(None)]


async def test_what_is_not_there(store: ObjectStore) -> None:
    for call in (store.get("no"), store.get_range("no", 0, 1), store.head("no")):
        with pytest.raises(ObjectMissing):
            await call
    assert await keys_under(store, "no") == []


async def test_a_range_beyond_the_end_is_an_error_and_not_a_short_answer(store: ObjectStore) -> None:
    await store.put_new("a", b"12345")
    for start, end in ((3, 9), (5, 6), (7, 9)):
        with pytest.raises(ObjectTruncated) as caught:
            await store.get_range("a", start, end)
        assert (caught.value.wanted_end, caught.value.size) == (end, 5)


async def test_listing_covers_whole_names_in_order(store: ObjectStore) -> None:
    names = ["t/1/b", "t/1/a", "t/1/c/d", "t/12/a", "t/2"]
    for name in names:
        await store.put_new(name, name.encode())
    assert await keys_under(store, "t/1") == ["t/1/a", "t/1/b", "t/1/c/d"]
    assert await keys_under(store, "t") == sorted(names)


async def test_listing_goes_on_over_pages(store: ObjectStore) -> None:
    names = [f"many/{number:04}" for number in range(1100)]
    await asyncio.gather(*(store.put_new(name, b"x") for name in names))
    assert await keys_under(store, "many") == names


async def test_deleting_what_is_there_and_what_is_not(store: ObjectStore) -> None:
    for name in ("a", "b", "c"):
        await store.put_new(name, b"x")
    await store.delete(["no", "a", "no either", "b"])
    await store.delete(["a"])
    await store.delete([])
    assert [name for name in ("a", "b", "c") if await exists(store, name)] == ["c"]


async def exists(store: ObjectStore, key: str) -> bool:
    try:
        await store.head(key)
    except ObjectMissing:
        return False
    return True


async def test_names_of_any_script(store: ObjectStore) -> None:
    key = "topics/défaut/заказы-1/7/x.parquet"
    await store.put_new(key, b"x")
    assert await keys_under(store, "topics/défaut/заказы-1") == [key]
    assert await store.get(key) == b"x"


# -- opening -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["", "nowhere", "ftp://host/x", "http://host/x", "file://relative/x", "file:///x?y", "s3://", "az://x"],
)
def test_what_cannot_be_opened(url: str) -> None:
    with pytest.raises(UnsupportedStore, match="cannot be opened"):
        ObjectStore.open(url)


async def test_plain_http_is_for_loopback_only() -> None:
    store = ObjectStore.open(
        "s3://bucket",
        timeout_s=2,
        attempts=1,
        options={"endpoint": "http://192.0.2.1:1", "access_key_id": "a", "secret_access_key": "b"},
    )
    with pytest.raises(ObjectStoreUnavailable, match=r"(?i)http|builder"):
        await store.head("a")


# -- faults ------------------------------------------------------------------------------


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(MemoryStore())


@pytest.fixture
def flaky(backend: FaultyBackend) -> ObjectStore:
    return ObjectStore("memory://", backend, timeout_s=5, attempts=3, pause_s=0.001)


READS: list[tuple[str, Callable[[ObjectStore], Awaitable[object]]]] = [
    ("get_async", lambda store: store.get("a")),
    ("get_ranges_async", lambda store: store.get_range("a", 0, 5)),
    ("head_async", lambda store: store.head("a")),
    ("delete_async", lambda store: store.delete(["a"])),
]


@pytest.mark.parametrize(("method", "call"), READS, ids=[method for method, _ in READS])
async def test_what_passes_is_tried_again(
    backend: FaultyBackend, flaky: ObjectStore, method: str, call: Callable[[ObjectStore], Awaitable[object]]
) -> None:
    await flaky.put_new("a", b"12345")
    backend.plan(method, refuse(BROKEN), refuse(OSError("no route")))
    await call(flaky)
    assert backend.is_done


@pytest.mark.parametrize(("method", "call"), READS, ids=[method for method, _ in READS])
async def test_what_does_not_pass_is_reported_after_the_last_attempt(
    backend: FaultyBackend, flaky: ObjectStore, method: str, call: Callable[[ObjectStore], Awaitable[object]]
) -> None:
    await flaky.put_new("a", b"12345")
    backend.plan(method, *[refuse(BROKEN)] * 3)
    with pytest.raises(ObjectStoreUnavailable, match="tried 3 times: the connection was reset"):
        await call(flaky)
    assert backend.is_done
    assert await flaky.get("a") == b"12345"


async def test_a_put_that_never_reached_the_store_is_repeated(
    backend: FaultyBackend, flaky: ObjectStore
) -> None:
    backend.plan("put_async", refuse(BROKEN), refuse(BROKEN))
    await flaky.put_new("a", b"mine")
    assert await flaky.get("a") == b"mine"


@pytest.mark.parametrize("data", [b"mine", [b"mi", b"ne"]], ids=["bytes", "parts"])
async def test_a_lost_answer_is_no_conflict_with_oneself(
    backend: FaultyBackend, flaky: ObjectStore, data: bytes
) -> None:
    backend.plan("put_async", lose_answer(BROKEN))
    await flaky.put_new("a", data)
    assert backend.calls.count("put_async") == 2
    assert await flaky.get("a") == b"mine"


@pytest.mark.parametrize("theirs", [b"them", b"theirs"], ids=["same size", "other size"])
async def test_a_failed_put_that_finds_anothers_object_is_a_conflict(
    backend: FaultyBackend, flaky: ObjectStore, theirs: bytes
) -> None:
    await flaky.put_new("a", theirs)
    backend.plan("put_async", refuse(BROKEN))
    with pytest.raises(ObjectExists):
        await flaky.put_new("a", b"mine")
    assert await flaky.get("a") == theirs


async def test_a_refusal_because_of_a_put_that_fails_in_the_end(
    backend: FaultyBackend, flaky: ObjectStore
) -> None:
    """S3 answers 'conflict' to one of two overlapping puts; the other may fail yet. Nobody has written, so go
    on."""
    await flaky.put_new("a", b"theirs")

    async def vanish(call: Callable[[], Awaitable[object]]) -> object:
        await flaky.delete(["a"])
        raise FileNotFoundError

    backend.plan("head_async", vanish)
    await flaky.put_new("a", b"mine")
    assert await flaky.get("a") == b"mine"


async def test_a_store_that_hangs_costs_the_deadline_and_no_more(backend: FaultyBackend) -> None:
    store = ObjectStore("memory://", backend, timeout_s=2, attempts=3, pause_s=0.001)
    await store.put_new("a", b"12345")
    backend.plan("head_async", hang)
    assert (await store.head("a")).size == 5, "one attempt that hangs leaves time for another"
    backend.plan("head_async", hang, hang, hang)
    own = OwnTime()
    with pytest.raises(ObjectStoreUnavailable):
        await store.head("a")
    assert own.seconds < 4


async def test_the_deadline_grows_with_what_is_moved(
    backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow line is not a dead one."""
    monkeypatch.setattr(objectstore, "SLOWEST_BYTES_PER_S", 1000)
    store = ObjectStore("memory://", backend, timeout_s=0.05, attempts=1)

    async def slowly(call: Callable[[], Awaitable[object]]) -> object:
        await asyncio.sleep(0.3)
        return await call()

    backend.plan("put_async", slowly, slowly)
    await store.put_new("large", b"x" * 5000)
    with pytest.raises(ObjectStoreUnavailable):
        await store.put_new("small", b"x")


async def test_a_short_answer_is_asked_for_again(backend: FaultyBackend, flaky: ObjectStore) -> None:
    await flaky.put_new("a", b"12345")
    backend.plan("get_ranges_async", cut(3))
    assert await flaky.get_range("a", 0, 5) == b"12345"
    backend.plan("get_ranges_async", cut(3), cut(0), cut(4))
    with pytest.raises(ObjectStoreUnavailable, match="fewer bytes"):
        await flaky.get_range("a", 0, 5)


async def test_wrong_credentials_are_not_tried_again(backend: FaultyBackend, flaky: ObjectStore) -> None:
    backend.plan("head_async", refuse(PermissionDeniedError("access denied")))
    with pytest.raises(ObjectStoreUnavailable, match="access denied"):
        await flaky.head("a")
    assert backend.calls == ["head_async"]


async def test_a_bucket_that_is_not_there_is_no_missing_object(
    backend: FaultyBackend, flaky: ObjectStore
) -> None:
    backend.plan("put_async", *[refuse(FileNotFoundError("no such bucket"))] * 3)
    with pytest.raises(ObjectStoreUnavailable, match="no such bucket"):
        await flaky.put_new("a", b"x")


async def test_only_the_first_line_of_a_long_complaint_is_shown(
    backend: FaultyBackend, flaky: ObjectStore
) -> None:
    backend.plan("head_async", *[refuse(GenericError("timed out\n\nDebug source:\nreqwest"))] * 3)
    with pytest.raises(ObjectStoreUnavailable, match=r"timed out$"):
        await flaky.head("a")


async def test_the_same_trouble_has_the_same_text() -> None:
    """A real client of S3 says how many microseconds its attempt took. Who tells a trouble once, as long as
    it is the same, would tell it at every attempt of an outage."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = ObjectStore.open(
            "s3://bucket",
            attempts=1,
            options={"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"},
        )
        texts = set()
        for _ in range(3):
            with pytest.raises(ObjectStoreUnavailable) as refused:
                await store.head("a")
            texts.add(str(refused.value))
    assert len(texts) == 1
    assert endpoint in texts.pop()


async def test_a_file_is_durable_with_its_directories_before_the_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store = ObjectStore.open(f"file://{tmp_path}/new/store")
    assert synced == [f"{tmp_path}/new", f"{tmp_path}"]
    synced.clear()
    await store.put_new("a/b/c", b"x")
    root = f"{tmp_path}/new/store"
    assert synced == [f"{root}/a/b/c", f"{root}/a/b", f"{root}/a", root]
