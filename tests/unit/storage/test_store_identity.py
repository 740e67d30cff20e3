"""Whether two brokers see the same segments."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from sava.storage.errors import UnsupportedStore
from sava.storage.objectstore import ObjectStore, store_id
from tests.support.objects import S3Server
from tests.unit.storage.faults import BROKEN, FaultyBackend, before, lose_answer


@pytest.fixture(params=["file", "memory", "s3"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ObjectStore]:
    """Another broker's view of one store."""
    if request.param == "file":
        return lambda: ObjectStore.open(f"file://{tmp_path}/objects")
    if request.param == "memory":
        shared = MemoryStore()
        return lambda: ObjectStore("memory://", shared)
    server: S3Server = request.getfixturevalue("s3_server")
    url = f"{server.url}/{uuid.uuid4()}"
    return lambda: ObjectStore.open(url, options=server.options)


async def test_all_who_share_a_store_agree(open_again: Callable[[], ObjectStore]) -> None:
    identity = await store_id(open_again())
    assert len(identity) == 32
    assert await store_id(open_again()) == identity


async def test_also_if_they_come_at_once(open_again: Callable[[], ObjectStore]) -> None:
    identities = await asyncio.gather(*(store_id(open_again()) for _ in range(8)))
    assert len(set(identities)) == 1
    assert await store_id(open_again()) == identities[0]


async def test_stores_differ(tmp_path: Path) -> None:
    stores = [f"file://{tmp_path}/one", f"file://{tmp_path}/two", "memory://", "memory://"]
    assert len({await store_id(ObjectStore.open(url)) for url in stores}) == 4


async def test_whoever_comes_second_takes_what_is_there() -> None:
    shared = MemoryStore()
    backend = FaultyBackend(shared)
    others: list[str] = []

    async def come_first() -> None:
        others.append(await store_id(ObjectStore("memory://", shared)))

    backend.plan("put_async", before(come_first))
    assert await store_id(ObjectStore("memory://", backend)) == others[0]


async def test_a_lost_answer_does_not_make_two_of_them() -> None:
    backend = FaultyBackend(MemoryStore())
    backend.plan("put_async", lose_answer(BROKEN))
    store = ObjectStore("memory://", backend, pause_s=0)
    assert await store_id(store) == await store_id(store)
    assert backend.is_done


@pytest.mark.parametrize("content", [b"", b"something else", b"A" * 32, b"0" * 33])
async def test_an_object_that_is_something_else_is_refused(content: bytes) -> None:
    store = ObjectStore.open("memory://")
    await store.put_new("store-id", content)
    with pytest.raises(UnsupportedStore, match="store-id in memory://"):
        await store_id(store)
