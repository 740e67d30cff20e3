"""Routing of rows: where the client would send them, in whole batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.client.producer import fnv1a, partition_of
from sava.pipeline.cluster import TopicPartitions
from sava.pipeline.errors import WriteRefused
from sava.pipeline.sink.routing import FEW, LONG, RUN_ROWS, RowRouter, fnv1a_of

KEYS = st.text(max_size=12) | st.sampled_from(["", "a", "é" * 40, "k" * LONG, "k" * (LONG + 1), "🚂" * 100])
COUNTS = {"/default/plain": 0, "/default/three": 3, "/default/seven": 7}


def look_up(topic: str) -> TopicPartitions:
    count = COUNTS[topic]
    names = tuple(f"{topic}-part-{number}" for number in range(count)) or (topic,)
    return TopicPartitions(topic, True, bool(count), names, "")


def rows_of(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def routed(router: RowRouter, *batches: Any) -> dict[str, list[Any]]:
    """The payloads that each partition gets, in order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for rows in batches:
        for name, part in router.route(rows):
            assert "topic" not in part.schema.names
            assert "partition" not in part.schema.names
            found[name] += part.column("payload").to_pylist()
    return dict(found)


@settings(max_examples=25)
@given(st.lists(KEYS, max_size=20), st.integers(0, 3), st.data())
def test_hashes_are_those_of_the_client(keys: list[str], skip: int, data: st.DataObject) -> None:
    """Also for so many keys that they are hashed together, and for an array that is a slice of another."""
    many = keys + [
        f"{index}{key}"
        for index in range(FEW + 1)
        for key in data.draw(st.lists(KEYS, min_size=1, max_size=2))
    ]
    for given_keys in (keys, many):
        hashes = fnv1a_of(pa.array(given_keys, pa.utf8()).slice(skip))
        assert hashes.to_pylist() == [fnv1a(key) for key in given_keys[skip:]]


@given(st.lists(st.tuples(st.sampled_from(list(COUNTS)), KEYS), min_size=1, max_size=50))
def test_rows_with_a_key_go_where_the_client_sends_them(rows: list[tuple[str, str]]) -> None:
    topics, keys = zip(*rows, strict=True)
    expected: dict[str, list[int]] = defaultdict(list)
    for number, (topic, key) in enumerate(rows):
        names = look_up(topic).names
        expected[names[partition_of(key, len(names))]].append(number)
    batch = rows_of(topic=pa.array(topics), key=pa.array(keys), payload=pa.array(range(len(rows))))
    assert routed(RowRouter(look_up), batch) == expected


def test_keys_can_be_binary() -> None:
    rows = rows_of(key=pa.array([b"a", "é".encode()], pa.binary()), payload=[0, 1])
    found = routed(RowRouter(look_up, topic="/default/seven"), rows)
    assert found == routed(
        RowRouter(look_up, topic="/default/seven"), rows_of(key=["a", "é"], payload=[0, 1])
    )


def test_large_types_are_the_same() -> None:
    """Spark sends them when it is told to."""
    rows = rows_of(
        topic=pa.array(["/default/seven"] * 2, pa.large_utf8()),
        key=pa.array(["a", "é"], pa.large_utf8()),
        payload=pa.array([b"0", b"1"], pa.large_binary()),
    )
    expected = routed(
        RowRouter(look_up, topic="/default/seven"), rows_of(key=["a", "é"], payload=[b"0", b"1"])
    )
    assert routed(RowRouter(look_up), rows) == expected


def test_binary_keys_that_are_no_text_are_refused() -> None:
    rows = rows_of(key=pa.array([b"\xff\xfe"], pa.binary()), payload=[b"x"])
    with pytest.raises(WriteRefused, match="column key: Invalid UTF8"):
        routed(RowRouter(look_up, topic="/default/three"), rows)


def test_rows_without_a_key_are_spread_evenly_in_runs() -> None:
    router = RowRouter(look_up, topic="/default/three")
    batches = [rows_of(payload=list(range(start, start + 700))) for start in range(0, 9 * RUN_ROWS, 700)]
    found = routed(router, *batches)
    sizes = {name: len(payloads) for name, payloads in found.items()}
    assert len(sizes) == 3
    assert max(sizes.values()) - min(sizes.values()) <= RUN_ROWS
    for payloads in found.values():
        assert payloads == sorted(payloads), "rows of a partition keep their order"


def test_small_tasks_begin_at_different_partitions() -> None:
    found = Counter(
        name
        for first in range(9)
        for name in routed(RowRouter(look_up, topic="/default/three", first=first), rows_of(payload=[first]))
    )
    assert sorted(found.values()) == [3, 3, 3]


def test_rows_with_and_without_keys_in_one_batch() -> None:
    rows = rows_of(key=pa.array(["a", None, "b", None], pa.utf8()), payload=[0, 1, 2, 3])
    found = routed(RowRouter(look_up, topic="/default/seven"), rows)
    names = look_up("/default/seven").names
    assert 0 in found[names[partition_of("a", 7)]]
    assert 2 in found[names[partition_of("b", 7)]]
    assert sorted(payload for payloads in found.values() for payload in payloads) == [0, 1, 2, 3]


def test_the_partition_column_wins_over_the_key() -> None:
    rows = rows_of(key=["a", "a", None], partition=pa.array([2, None, 0], pa.int32()), payload=[0, 1, 2])
    names = look_up("/default/seven").names
    expected: dict[str, list[int]] = defaultdict(list)
    for number, partition in enumerate((2, partition_of("a", 7), 0)):
        expected[names[partition]].append(number)
    assert routed(RowRouter(look_up, topic="/default/seven"), rows) == expected


@pytest.mark.parametrize("partition", [-1, 3, 2**31 - 1])
def test_a_partition_that_is_not_there_is_named_with_its_topic(partition: int) -> None:
    rows = rows_of(
        topic=["/default/seven", "/default/three"],
        partition=pa.array([6, partition], pa.int32()),
        payload=[0, 1],
    )
    with pytest.raises(WriteRefused) as refused:
        routed(RowRouter(look_up), rows)
    assert str(refused.value) == (
        f"column partition: {partition} for topic /default/three, which has 3 partitions (0 to 2)"
    )


def test_the_option_topic_wins_over_the_column() -> None:
    rows = rows_of(topic=["/default/three"], payload=[0])
    assert routed(RowRouter(look_up, topic="/default/plain"), rows) == {"/default/plain": [0]}


def test_rows_without_a_topic_are_refused() -> None:
    rows = rows_of(topic=pa.array(["/default/three", None], pa.utf8()), payload=[0, 1])
    with pytest.raises(WriteRefused, match="column topic: 1 rows have none"):
        routed(RowRouter(look_up), rows)


def test_a_part_keeps_no_more_than_its_own_rows_in_memory() -> None:
    """A partition that gets one row of each batch collects them for long."""
    wanted = pa.array([1] + [0] * 999, pa.int32())
    rows = rows_of(payload=[bytes(1000)] * 1000, partition=wanted)
    parts = dict(RowRouter(look_up, topic="/default/three").route(rows))
    assert parts["/default/three-part-1"].num_rows == 1
    assert parts["/default/three-part-1"].get_total_buffer_size() < 5000


def test_each_topic_is_looked_up_once() -> None:
    asked: list[str] = []

    def counting(topic: str) -> TopicPartitions:
        asked.append(topic)
        return look_up(topic)

    rows = rows_of(topic=["/default/three", "/default/plain"] * 3, payload=list(range(6)))
    routed(RowRouter(counting), rows, rows)
    assert sorted(asked) == ["/default/plain", "/default/three"]
