"""``sava storage`` as operators run it: a real broker answers for the records, objects are in a directory or
on an S3 server, and each kind of damage is named."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from sava.api.admin_client import AdminClient
from sava.cli.storage import RemoteRecords
from sava.metadata import commands as c
from sava.metadata.store import MetadataStore, RangeResult
from sava.proto import admin_pb2 as pb
from sava.records import Message, RecordBatch
from sava.storage import keys
from sava.storage.broker_storage import BrokerStorage
from sava.storage.catalog import Catalog, StorageHeld
from sava.storage.objectstore import ObjectStore
from sava.storage.types import Segment, TopicKey
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.support.brokers import BrokerProcess, Cluster, sava
from tests.support.messages import write
from tests.support.objects import S3Server, s3_server
from tests.support.one_disk import OneDisk
from tests.support.storage import LAZY, numbered

__all__ = ["s3_server"]

ORDERS = TopicKey("default", "orders", 7)
PAYMENTS = TopicKey("default", "payments", 8)


class RemoteStore:
    """As much of a MetadataStore as storage needs, over a broker's admin port."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client
        self._records = RemoteRecords(client)

    async def get(self, key: str) -> c.KeyValue | None:
        return next(iter((await self._records.range(key)).kvs), None)

    async def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult:
        return await self._records.range(prefix, limit=limit, start_after=start_after)

    async def txn(self, compare: Sequence[c.Compare], then: Sequence[c.Operation], **how: Any) -> c.TxnResult:
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    key=each.key,
                    target=cast("pb.Compare.Target.ValueType", int(each.target)),
                    relation=cast("pb.Compare.Relation.ValueType", int(each.relation)),
                    operand=each.operand,
                )
                for each in compare
            ],
            then=[_operation(each) for each in then],
        )
        answer = await self._client.call(self._client.meta.Txn, request)
        return c.TxnResult(answer.succeeded, answer.revision, ())


def _operation(operation: c.Operation) -> pb.Operation:
    if isinstance(operation, c.Put):
        return pb.Operation(put=pb.Operation.Put(key=operation.key, value=operation.value))
    assert isinstance(operation, c.Delete)
    return pb.Operation(delete=pb.Operation.Delete(key=operation.key))


class World:
    """A broker, topics that were written through it, and the directory of their objects."""

    def __init__(self, broker: BrokerProcess, path: Path) -> None:
        self.broker = broker
        self.path = path
        self.url = (path / "objects").as_uri()
        (path / "objects").mkdir()
        self.metadata = cast(MetadataStore, RemoteStore(broker.client))

    async def fill(self, url: str, topic: TopicKey = ORDERS, options: dict[str, str] | None = None) -> None:
        """22 messages in two segments, sealed; then a third segment and a tail that is in the journal."""
        storage = await BrokerStorage.open(
            LocalDisk(self.path / "journal"),
            broker="a",
            store=ObjectStore.open(url, options=options),
            metadata=self.metadata,
            options=LAZY,
            fail=lambda failure: None,
            supervisor=Supervisor(),
        )
        try:
            await storage.journal.begin_generation(OneDisk())
            for epoch, batch in enumerate((numbered(0, 10), numbered(10, 22), numbered(22, 30)), 1):
                log = await storage.open_topic(topic, epoch=epoch)
                await log.append(batch)
                await log.seal()
            log = await storage.open_topic(topic, epoch=4)
            paid = Message(b"paid", key="k", attributes={"a": "b"}, publish_time=1, producer="shop")
            await log.append(RecordBatch.from_messages([paid]))
        finally:
            await storage.close()

    async def segments(self, topic: TopicKey = ORDERS) -> list[Segment]:
        return await Catalog(self.metadata, topic).segments()

    def file(self, segment: Segment) -> Path:
        return self.path / "objects" / segment.key

    async def sava(self, command: str, *arguments: str, check: bool = True) -> tuple[int, str, str]:
        return await sava("storage", command, *arguments, admin=self.broker.admin, check=check)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with Cluster(1, tmp_path) as cluster:
        await cluster.init()
        yield World(cluster.brokers[0], tmp_path)


async def test_an_operator_holds_segments_to_copy_them(world: World) -> None:
    await world.fill(world.url)
    catalog = Catalog(world.metadata, ORDERS)
    _, said, _ = await world.sava("hold", "--minutes", "5")
    assert said.startswith("segments stay as they are until 20")
    _, said, _ = await world.sava("hold", "-o", "json")
    assert datetime.fromisoformat(json.loads(said)["until"]) > datetime.now(UTC) + timedelta(minutes=50)
    with pytest.raises(StorageHeld):
        await catalog.drop(epoch=4, before=10)
    _, said, _ = await world.sava("release")
    assert said == "segments are not held any more\n"
    _, said, _ = await world.sava("release", "-o", "json")
    assert json.loads(said) == {"was_held": False}
    assert len(await catalog.drop(epoch=4, before=10)) == 1


async def test_an_operator_looks_at_what_is_stored(world: World) -> None:
    await world.fill(world.url)
    segments = await world.segments()

    _, table, _ = await world.sava("inspect")
    assert table.splitlines()[1].split()[:6] == ["/default/orders", "7", "0", "30", "no", "4"]
    assert len(table.splitlines()) == 2
    _, table, _ = await world.sava("inspect", "--topic", "/default/orders", "--url", world.url)
    assert [segment.key in table for segment in segments] == [True] * 3
    assert table.count(" there ") == 3
    _, out, _ = await world.sava("inspect", "-o", "json")
    (told,) = json.loads(out)
    assert (told["topic"], told["state"]["topic_id"], told["problems"]) == ("/default/orders", "7", [])
    assert [(each["start"], each["end"], each["rows"]) for each in told["segments"]] == [
        (0, 10, 10),
        (10, 22, 12),
        (22, 30, 8),
    ]

    _, out, _ = await world.sava("verify", "--url", world.url)
    assert "1 topics; 3 segments with 30 messages" in out
    assert "no problems" in out

    _, out, _ = await world.sava("dump", "/default/orders", "--from", "8", "--to", "24", "--url", world.url)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["offset"] for line in lines] == list(range(8, 24))
    assert [line["payload"] for line in lines] == [str(offset) for offset in range(8, 24)]
    code, _, err = await world.sava("dump", "/default/orders", "--to", "31", "--url", world.url, check=False)
    assert code == 1
    assert "segments hold 0..30; what follows is in journal" in err
    assert err.count("\n") == 1

    # ... which is that of a stopped broker, on this machine.
    _, out, _ = await sava("storage", "dump", "7", "--journal", str(world.path / "journal"))
    assert json.loads(out)["producer"] == "shop"


def url(world: World) -> tuple[str, str]:
    return "--url", world.url


async def test_verify_names_each_kind_of_damage(world: World) -> None:
    """A flipped byte, a cut object, a lost object; a lost descriptor; an orphan. What is sound stays so."""
    await world.fill(world.url)
    await world.fill(world.url, PAYMENTS)
    flipped, cut, lost = await world.segments(ORDERS)
    sound, unnamed, _ = await world.segments(PAYMENTS)
    data = bytearray(world.file(flipped).read_bytes())
    data[100] ^= 1
    world.file(flipped).write_bytes(data)
    world.file(cut).write_bytes(world.file(cut).read_bytes()[:-1])
    world.file(lost).unlink()
    await sava("meta", "delete", keys.segment_key(PAYMENTS, unnamed.start), admin=world.broker.admin)
    orphan = await write(ObjectStore.open(world.url), 0, 5, topic=PAYMENTS)
    for old in (unnamed, orphan):
        os.utime(world.file(old), (0, 0))

    code, out, _ = await world.sava("verify", *url(world), check=False)

    assert code == 1
    for line in (
        f"/default/orders: {flipped.key}: the checksum does not match",
        f"/default/orders: {cut.key} has {cut.size - 1} bytes instead of {cut.size}",
        f"/default/orders: there is no object {lost.key}",
        f"/default/payments: offsets {unnamed.start}..{unnamed.end} are in no segment",
        f"/default/payments: no descriptor names the object {unnamed.key}",
        f"/default/payments: no descriptor names the object {orphan.key}",
    ):
        assert line in out, out
    assert sound.key not in out
    assert out.splitlines()[-1].endswith("6 problems")
    code, out, _ = await world.sava("inspect", *url(world))
    assert "/default/orders: the objects of 2 segments are not as described" in out
    code, out, _ = await world.sava("verify", "--topic", "/default/payments", *url(world), check=False)
    assert (code, out.count("/default/orders")) == (1, 0)


async def test_on_a_brokers_machine_its_configuration_is_enough(world: World) -> None:
    await world.fill(world.url)
    config = world.path / "storage.yaml"
    host, port = world.broker.admin.split(":")
    config.write_text(
        f"broker: {{host: {host}, ports: {{admin: {port}}}}}\nstorage: {{url: '{world.url}'}}\n",
        encoding="utf-8",
    )
    _, out, _ = await sava("storage", "verify", "--config", str(config))
    assert "3 segments" in out
    _, out, _ = await sava("storage", "inspect", "--config", str(config), "-o", "json")
    assert all(each["object_size"] == each["size"] for each in json.loads(out)[0]["segments"])


async def test_what_cannot_be_looked_at_is_one_line(world: World) -> None:
    await world.fill(world.url)
    missing = (world.path / "nowhere").as_uri()
    for arguments, reason in (
        (("verify", "--url", missing), "there is no such directory"),
        (("verify", "--url", "memory://"), "in the memory of one broker"),
        (("verify", "--url", "ftp://x"), "must begin with"),
        (("verify", "--topic", "/default/never", *url(world)), "knows no topic /default/never"),
        (("inspect", "--topic", "orders"), "write /namespace/topic"),
        (("dump", "/default/never", *url(world)), "knows no topic"),
        (("verify", "--config", str(world.path / "none.yaml")), "cannot be read"),
    ):
        code, out, err = await world.sava(*arguments, check=False)
        assert (code, out) == (1, "")
        assert reason in err
        assert err.count("\n") == 1, err
    assert not (world.path / "nowhere").exists()


async def test_segments_on_an_s3_server(
    world: World, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials and endpoint come from the environment."""
    address = f"{s3_server.url}/{uuid.uuid4().hex}"
    await world.fill(address, options=s3_server.options)
    for name, value in s3_server.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    _, out, _ = await world.sava("verify", "--url", address)
    assert "3 segments with 30 messages" in out
    store = ObjectStore.open(address, options=s3_server.options)
    await store.delete([(await world.segments())[1].key])
    code, out, _ = await world.sava("verify", "--url", address, check=False)
    assert code == 1
    assert "there is no object" in out
