"""From rows to record batches, and from these to staged objects with sections."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest

from sava.pipeline.errors import WriteRefused
from sava.pipeline.sink.routing import Batcher, TaskStage
from sava.proto import writers_pb2 as pb
from sava.records import Compression, RecordBatch, iter_batches

NAMES = ("/default/a-part-0", "/default/a-part-1", "/default/b")


class Emitted:
    def __init__(self) -> None:
        self.batches: dict[str, list[RecordBatch]] = defaultdict(list)
        self.largest: dict[str, int] = defaultdict(int)

    def __call__(self, name: str, batch: RecordBatch, largest: int) -> None:
        self.batches[name].append(batch.verify())
        self.largest[name] = max(self.largest[name], largest)

    def payloads(self, name: str) -> list[bytes]:
        return [payload for batch in self.batches[name] for payload in batch.payloads()]


def rows_of(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize("codec", list(Compression))
def test_rows_become_batches_in_order(codec: Compression) -> None:
    emitted = Emitted()
    batcher = Batcher(emitted, codec=codec, batch_bytes=5000)
    chance = random.Random(7)
    expected: dict[str, list[bytes]] = defaultdict(list)
    for number in range(200):
        name = chance.choice(NAMES)
        payloads = [
            b"%d-%d-" % (number, row) + bytes(chance.randrange(60)) for row in range(chance.randrange(1, 40))
        ]
        batcher.add(name, rows_of(payload=payloads))
        expected[name] += payloads
    batcher.flush()
    assert {name: emitted.payloads(name) for name in NAMES} == expected
    assert emitted.largest == {name: max(map(len, payloads)) for name, payloads in expected.items()}
    sizes = [batch.header.body_size for batches in emitted.batches.values() for batch in batches[:-1]]
    assert min(sizes) >= 5000
    assert max(sizes) < 2 * 5000 + 500
    assert {batch.header.producer_id for batches in emitted.batches.values() for batch in batches} == {0}
    assert not any(batch.header.is_assigned for batches in emitted.batches.values() for batch in batches)


def test_a_large_payload_does_not_make_batches_small_or_huge() -> None:
    emitted = Emitted()
    batcher = Batcher(emitted, batch_bytes=10_000)
    payloads = [b"small"] * 500 + [bytes(90_000)] + [b"small"] * 500
    batcher.add("/default/b", rows_of(payload=payloads))
    batcher.flush()
    assert emitted.payloads("/default/b") == payloads
    assert len(emitted.batches["/default/b"]) < 10
    assert emitted.largest == {"/default/b": 90_000}


def test_what_waits_is_bounded_over_all_partitions() -> None:
    emitted = Emitted()
    batcher = Batcher(emitted, batch_bytes=10_000, waiting_bytes=50_000)
    for number in range(300):
        batcher.add(f"/default/t{number}", rows_of(payload=[bytes(1000)]))
    assert len(emitted.batches) >= 240, "many partitions with little each are written before they are full"
    for number in range(20):
        batcher.add("/default/t7", rows_of(payload=[bytes(number)]))
    assert len(emitted.batches["/default/t7"]) > 1, "each has its share"


def test_all_columns_arrive(tmp_path: Path) -> None:
    when = pa.array([1_700_000_000_000_000, None, 3], pa.timestamp("us", tz="Europe/Berlin"))
    rows = rows_of(
        payload=pa.array(["a", "b", "é"], pa.utf8()),
        key=pa.array([b"k", None, "ü".encode()], pa.binary()),
        attributes=pa.array([[("x", "1")], None, []], pa.map_(pa.utf8(), pa.utf8())),
        publish_time=when,
        schema_id=pa.array([1, None, 2], pa.int64()),
        schema_version=pa.array([1, None, 2], pa.int16()),
        origin_cluster=["eu", None, "us"],
        origin_offset=pa.array([5, None, 6], pa.int32()),
    )
    emitted = Emitted()
    batcher = Batcher(emitted)
    before = time.time_ns() // 1000
    batcher.add("/default/b", rows)
    batcher.flush()
    first, second, third = emitted.batches["/default/b"][0].messages()
    assert (first.payload, first.key, first.attributes, first.publish_time) == (
        b"a",
        "k",
        {"x": "1"},
        1_700_000_000_000_000,
    )
    assert first.origin is not None
    assert (first.origin.cluster, first.origin.offset, first.schema_id, first.schema_version) == (
        "eu",
        5,
        1,
        1,
    )
    assert (second.key, second.origin, second.schema_id) == (None, None, None)
    assert before <= second.publish_time <= time.time_ns() // 1000, "a row without a time is published now"
    assert (third.payload, third.key, dict(third.attributes), third.publish_time) == (
        "é".encode(),
        "ü",
        {},
        3,
    )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"payload": pa.array([b"x", None], pa.binary())}, "1 messages have no payload"),
        (
            {"payload": [b"x"], "attributes": pa.array([[("a", None)]], pa.map_(pa.utf8(), pa.utf8()))},
            "an attribute has no value",
        ),
        (
            {"payload": [b"x"], "origin_cluster": ["eu"], "origin_offset": pa.array([None], pa.int64())},
            "an origin has a cluster and an offset, or is not given",
        ),
    ],
)
def test_rows_that_are_no_messages_are_refused_with_their_topic(columns: dict[str, Any], said: str) -> None:
    batcher = Batcher(Emitted())
    batcher.add("/default/b", rows_of(**columns))
    with pytest.raises(WriteRefused, match=f"/default/b: invalid message: {said}"):
        batcher.flush()


@pytest.mark.parametrize("object_bytes", [1 << 20, 3000])
def test_staged_sections_name_exactly_what_was_added(tmp_path: Path, object_bytes: int) -> None:
    """In one object, or in several when there is more than one should hold."""
    stage = TaskStage(
        pb.StagingResponse(store_url=tmp_path.as_uri(), prefix="staged/w"), "7-0-0", object_bytes=object_bytes
    )
    added: dict[str, list[bytes]] = defaultdict(list)
    for number in range(30):
        name = NAMES[number % len(NAMES)]
        payloads = [b"%d-%d" % (number, row) + bytes(number) for row in range(5)]
        stage.add(name, RecordBatch.encode(payloads, publish_time=1), 100 + number)
        added[name] += payloads
    sections = stage.finish()
    staged: dict[str, list[bytes]] = defaultdict(list)
    for section in sections:
        data = (tmp_path / section.key).read_bytes()[section.start : section.end]
        assert google_crc32c.value(data) == section.crc32c
        payloads = [payload for batch in iter_batches(data) for payload in batch.verify().payloads()]
        assert len(payloads) == section.messages
        staged[section.topic] += payloads
    assert staged == added
    assert max(section.largest for section in sections) == 129
    objects = set((tmp_path / "staged" / "w").iterdir())
    assert {tmp_path / section.key for section in sections} == objects
    assert (len(objects) == 1) == (object_bytes == 1 << 20)
    assert all(path.name.startswith("7-0-0-") for path in objects)
    assert objects <= {tmp_path / key for key in stage.abandon()}


def test_attempts_of_a_task_have_names_of_their_own(tmp_path: Path) -> None:
    where = pb.StagingResponse(store_url=tmp_path.as_uri(), prefix="staged/w")
    stages = [TaskStage(where, "7-0-0") for _ in range(2)]
    for stage in stages:
        stage.add("/default/b", RecordBatch.encode([b"x"], publish_time=1), 1)
    keys = {section.key for stage in stages for section in stage.finish()}
    assert len(keys) == 2


def test_nothing_is_staged_for_nothing(tmp_path: Path) -> None:
    stage = TaskStage(pb.StagingResponse(store_url=tmp_path.as_uri(), prefix="staged/w"), "7-0-0")
    assert stage.finish() == []
    assert not list(tmp_path.iterdir())
