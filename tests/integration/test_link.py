"""The link of a Spark process against a real broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from sava.client import Refused, TopicUnknown, Unavailable
from sava.client.blocking import Client
from sava.pipeline.cluster import ClusterAccess, ClusterClient, OffsetGone, PartitionExtent
from sava.proto import danube_schema_pb2, danube_schema_pb2_grpc, writers_pb2
from sava.records import Compression, RecordBatch
from sava.storage.objectstore import ObjectStore
from tests.support.brokers import Standalone
from tests.support.certificates import make_certificates
from tests.support.objects import message, new_object
from tests.support.waiting import PATIENCE_S

ROWS = 1000


def batches(count: int, *, codec: Compression = Compression.NONE) -> Iterator[RecordBatch]:
    """As the sink makes them: from Arrow, without place and producer."""
    for number in range(count):
        payloads = [b"%d" % row for row in range(number * ROWS, (number + 1) * ROWS)]
        rows = pa.record_batch({"payload": payloads, "key": [None] * ROWS}).cast(
            pa.schema([("payload", pa.binary()), ("key", pa.string())])
        )
        yield RecordBatch.from_arrow(rows, publish_time=1_000_000 * number, codec=codec)


def numbers(found: Iterator[RecordBatch]) -> list[int]:
    return [int(payload) for batch in found for payload in batch.payloads()]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="module")
def link(broker: Standalone) -> Iterator[ClusterClient]:
    link = ClusterClient.of(ClusterAccess(broker.url))
    yield link
    link.close()


def test_topics_are_found_and_created(link: ClusterClient) -> None:
    with pytest.raises(TopicUnknown):
        link.partitions("/default/found")
    created = link.partitions("/default/found", create=True)
    assert created == ("/default/found", True, False, ("/default/found",), "")
    link.partitions("/default/parted-part-2", create=True)
    assert link.partitions("/default/parted").names == tuple(f"/default/parted-part-{n}" for n in range(3))
    assert link.partitions("/default/parted").partitioned
    listed = {each.topic: each.partition_count for each in link.topics("default")}
    assert (listed["/default/found"], listed["/default/parted"]) == (0, 3)
    assert "/default/parted-part-0" not in listed
    with pytest.raises(Refused):
        link.topics("nowhere")


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.LZ4])
def test_what_is_published_is_read(link: ClusterClient, codec: Compression) -> None:
    (name,) = link.partitions(f"/default/read-{codec.name.lower()}", create=True).names
    assert link.extents([name]) == {name: PartitionExtent(0, 0, 0)}
    assert link.publish(name, batches(30, codec=codec)) == 30 * ROWS
    assert link.extents([name])[name].end == 30 * ROWS
    assert numbers(link.read(name, 0, 30 * ROWS)) == list(range(30 * ROWS))
    assert numbers(link.read(name, 1234, 5678)) == list(range(1234, 5678))
    with pytest.raises(Refused) as raised:
        list(link.read(name, 31 * ROWS, 32 * ROWS))
    assert raised.value.code == "offset_out_of_range"
    assert not isinstance(raised.value, OffsetGone), "it never was there"
    assert link.offset_at(name, 3_000_000) == 3 * ROWS
    assert link.offset_at(name, 10**15) == 30 * ROWS
    segments = link.segments(name, 0)
    assert segments.next_offset == 30 * ROWS
    assert segments.store_url.startswith("file://")


def test_growth_wakes_who_waits(link: ClusterClient) -> None:
    names = link.partitions("/default/growing-part-1", create=True).names
    first, second = (f"/default/growing-part-{n}" for n in range(2))
    assert names == (second,)
    assert link.wait_beyond({first: 0, second: 0}, timeout_s=0.1) == {
        first: PartitionExtent(0, 0, 0),
        second: PartitionExtent(0, 0, 0),
    }
    timer = threading.Timer(0.3, lambda: link.publish(second, batches(1)))
    timer.start()
    began = time.monotonic()
    assert link.wait_beyond({first: 0, second: 0}, timeout_s=PATIENCE_S)[second].end == ROWS
    assert time.monotonic() - began < PATIENCE_S / 2, "it did not wait for its time to be over"
    timer.join()


def test_progress_is_seen_as_a_subscription(broker: Standalone, link: ClusterClient) -> None:
    (name,) = link.partitions("/default/progress", create=True).names
    link.publish(name, batches(3))
    for offset in (ROWS, 2 * ROWS, 2 * ROWS):
        link.advance(name, "query", offset)
    with pytest.raises(Refused, match="outside"):
        link.advance(name, "query", 4 * ROWS)
    # It is an ordinary subscription: whoever consumes it gets what is left.
    with Client(broker.url) as client, client.consumer(name, subscription="query") as consumer:
        found = consumer.receive_batch(timeout=PATIENCE_S)
        assert found is not None
        assert found[0].offset == 2 * ROWS


def test_the_schema_of_a_topic_is_found(broker: Standalone, link: ClusterClient) -> None:
    definition = b'{"type": "object"}'
    request = danube_schema_pb2.RegisterSchemaRequest(
        subject="order", schema_type="json_schema", schema_definition=definition
    )
    with grpc.insecure_channel(f"127.0.0.1:{broker.port}") as channel:
        danube_schema_pb2_grpc.SchemaRegistryStub(channel).RegisterSchema(request, timeout=PATIENCE_S)
    with Client(broker.url) as client, client.producer("/default/typed", schema="order"):
        pass
    subject = link.partitions("/default/typed").schema_subject
    assert subject == "order"
    found = link.schema(subject)
    assert (found.version, found.type, found.definition) == (1, "json_schema", definition)
    assert link.schema(subject, 1).schema_id == found.schema_id
    with pytest.raises(Refused):
        link.schema("nothing")


def test_what_was_staged_is_published_once(link: ClusterClient) -> None:
    (name,) = link.partitions("/default/staged", create=True).names
    where = link.staging("w")
    key, data, sections = new_object(f"{where.prefix}/one", {name: list(batches(3))})
    asyncio.run(ObjectStore.open(where.store_url).put_new(key, data))
    request = writers_pb2.CommitRequest(
        writer="w", run="1", query="q", sections=[message(topic, section) for topic, section in sections]
    )
    assert link.commit(request).decided_now
    assert not link.commit(request).decided_now
    assert link.extents([name])[name].end == 3 * ROWS
    assert numbers(link.read(name, 0, 3 * ROWS)) == list(range(3 * ROWS))
    link.commit(writers_pb2.CommitRequest(writer="w", run="2", query="q", batch=1))
    with pytest.raises(Refused) as raised:
        link.commit(writers_pb2.CommitRequest(writer="w", run="1", query="q", batch=2))
    assert raised.value.code == "writer_fenced"


def test_a_broker_that_is_killed_and_comes_back_is_only_a_pause(tmp_path: Path) -> None:
    """While somebody reads, publishes, waits and asks."""
    count = 200
    with Standalone(tmp_path) as broker:
        link = ClusterClient.of(ClusterAccess(broker.url))
        (name,) = link.partitions("/default/orders", create=True).names

        def some() -> Iterator[RecordBatch]:
            for number, batch in enumerate(batches(count)):
                if number == count // 2:
                    broker.kill()
                    broker.start()
                yield batch

        assert link.publish(name, some()) == count * ROWS
        assert link.extents([name])[name].end == count * ROWS

        reading = link.read(name, 0, count * ROWS)
        found = numbers(iter([next(reading)]))
        assert link.wait_beyond({name: count * ROWS}, timeout_s=0.1)[name].end == count * ROWS
        broker.kill()
        broker.start()
        found += numbers(reading)
        assert found == list(range(count * ROWS)), "nothing lost, nothing twice"

        broker.kill()
        assert link.wait_beyond({name: count * ROWS}, timeout_s=0.5) == {}
        broker.start()
        deadline = time.monotonic() + PATIENCE_S
        while name not in link.wait_beyond({name: count * ROWS}, timeout_s=1):
            assert time.monotonic() < deadline
        link.publish(name, batches(1))
        assert link.wait_beyond({name: count * ROWS}, timeout_s=PATIENCE_S)[name].end == (count + 1) * ROWS
        link.close()


def test_certificates_are_shown(tmp_path: Path) -> None:
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    files = {"ca": auth.tls.ca_file, "cert": auth.tls.cert_file, "key": auth.tls.key_file}
    with Standalone(tmp_path, auth) as broker:
        shown = {name: str(path) for name, path in files.items()}
        link = ClusterClient.of(ClusterAccess(broker.url, timeout_s=60, **shown))
        (name,) = link.partitions("/default/orders", create=True).names
        assert link.publish(name, batches(2)) == 2 * ROWS
        assert numbers(link.read(name, 0, 2 * ROWS)) == list(range(2 * ROWS))
        link.close()
        stranger = ClusterClient.of(ClusterAccess(broker.url, ca=shown["ca"], timeout_s=1))
        with pytest.raises(Unavailable):
            stranger.partitions("/default/orders")
        stranger.close()
    with pytest.raises(Refused, match="nowhere"):
        ClusterClient.of(ClusterAccess(broker.url, ca="/nowhere"))
