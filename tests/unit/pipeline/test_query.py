"""The driver's side of a stream, against a cluster that is a table of extents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from sava.client.errors import TopicUnknown
from sava.pipeline.cluster import ClusterClient, PartitionExtent, TopicPartitions
from sava.pipeline.errors import DataLost, SourceRefused
from sava.pipeline.options import OptionError, SourceOptions, TopicPartition
from sava.pipeline.source import query as query_module
from sava.pipeline.source.query import Query
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/t"
P0, P1, P2 = (TopicPartition(TOPIC, number) for number in range(3))


class Table:
    """Takes the place of a link."""

    def __init__(self, *extents: tuple[int, int, int]) -> None:
        self.extents_of = {
            f"{TOPIC}-part-{number}": PartitionExtent(*each) for number, each in enumerate(extents)
        }
        self.silent: set[str] = set()
        """Partitions whose broker is down."""
        self.others: list[pb.ListedTopic] = []
        self.waits: list[float] = []
        self.segments_asked = 0
        self.advanced: list[tuple[str, str, int]] = []
        self.is_deleted = False

    def topics(self, namespace: str = "") -> list[pb.ListedTopic]:
        return [
            pb.ListedTopic(topic=TOPIC, reliable=True, partition_count=len(self.extents_of)),
            *self.others,
        ]

    def partitions(self, topic: str, *, create: bool = False) -> TopicPartitions:
        if topic != TOPIC or self.is_deleted:
            raise TopicUnknown(f"topic {topic} does not exist")
        return TopicPartitions(topic, True, True, tuple(self.extents_of), "")

    def extents(self, names: Sequence[str]) -> dict[str, PartitionExtent]:
        return {name: self.extents_of[name] for name in names}

    def wait_beyond(self, ends: Mapping[str, int], *, timeout_s: float) -> dict[str, PartitionExtent]:
        if self.is_deleted:
            raise TopicUnknown("gone")
        self.waits.append(timeout_s)
        return {name: self.extents_of[name] for name in ends if name not in self.silent}

    def offset_at(self, name: str, publish_time: int) -> int:
        return publish_time // 1000

    def segments(self, name: str, start: int) -> pb.SegmentsResponse:
        self.segments_asked += 1
        extent = self.extents_of[name]
        return pb.SegmentsResponse(
            segments=[
                pb.Segment(
                    start_offset=first,
                    end_offset=min(first + 100, extent.stored),
                    key=f"topics/default/t/1/{first:020}-{first + 100:020}-1-00.parquet",
                    size=10_000,
                )
                for first in range(extent.start, extent.stored, 100)
                if first + 100 > start
            ],
            store_url="file:///store",
            stored_offset=extent.stored,
        )

    def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
        batch = RecordBatch.encode([b"x" * 912] * (end - start), publish_time=0)
        yield batch.assigned(topic_id=1, epoch=1, base_offset=start)

    def advance(self, name: str, subscription: str, offset: int) -> None:
        self.advanced.append((name, subscription, offset))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_module, "PAUSE_S", 0.0)


def begin(monkeypatch: pytest.MonkeyPatch, table: Table, **options: str) -> Query:
    monkeypatch.setattr(ClusterClient, "of", lambda access: table)
    chosen: dict[str, str] = {} if "topicPattern" in options else {"topic": TOPIC}
    return Query(SourceOptions.parse({**chosen, **options}, stream=True))


def latest(query: Query, start: Mapping[TopicPartition, int], **limits: Any) -> dict[TopicPartition, int]:
    return query.advance(start, **{"max_messages": None, "max_bytes": None, **limits})


# -- positions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {P0: 30, P1: 7}),
        ({"startingOffsets": "earliest"}, {P0: 10, P1: 0}),
        ({"startingTimestamp": "5"}, {P0: 5, P1: 5}),
        ({"startingOffsets": '{"/default/t": {"0": -1, "1": -2}}'}, {P0: 30, P1: 0}),
        ({"startingOffsets": '{"/default/t": {"0": 12, "1": 7}}'}, {P0: 12, P1: 7}),
    ],
)
def test_where_it_begins(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], expected: dict[TopicPartition, int]
) -> None:
    assert begin(monkeypatch, Table((10, 20, 30), (0, 0, 7)), **options).beginning() == expected


def test_a_message_during_the_first_planning_does_not_move_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark asks where the stream begins (30), and how far the first batch goes (30); a message comes; Spark
    asks again where the stream begins, to plan the batch: at 31 the topic would seem to end before it."""
    table = Table((10, 20, 30))
    query = begin(monkeypatch, table)
    first = query.beginning()
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(10, 20, 31)
    assert query.beginning() == first == {P0: 30}


@pytest.mark.parametrize("options", [{}, {"startingOffsets": '{"/default/t": {"0": -1}}'}])
def test_a_query_that_is_killed_in_its_first_batch_begins_where_it_began(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    """Spark writes down the first batch's end, and is killed; five messages come; the next process is asked
    where the stream begins (35) and to plan a batch from there to 30. Then the five are read."""
    table = Table((10, 20, 30))
    query = begin(monkeypatch, table, **options)
    first = query.beginning()
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(10, 20, 32)
    kept = latest(query, first)
    assert kept == first == {P0: 30}
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(10, 20, 35)
    again = begin(monkeypatch, table, **options)
    assert again.plan(again.beginning(), kept) == []
    assert latest(again, kept) == {P0: 35}
    (share,) = again.plan(kept, {P0: 35})
    assert [(piece.start, piece.end) for piece in share.pieces] == [(30, 35)]
    assert latest(query, first) == {P0: 35}


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ('{"/default/t": {"0": 12}}', "/default/t partition 1 is missing"),
        ('{"/default/t": {"0": 12, "1": 0, "2": 0}}', "/default/t partition 2 is not read by this query"),
        ('{"/default/t": {"0": 31, "1": 0}}', "/default/t partition 0 ends at 30"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, offsets: str, error: str
) -> None:
    query = begin(monkeypatch, Table((10, 20, 30), (0, 0, 7)), startingOffsets=offsets)
    with pytest.raises(OptionError, match=error):
        query.beginning()


def test_a_topic_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 0))
    table.is_deleted = True
    with pytest.raises(SourceRefused, match=r"there is no topic /default/t"):
        begin(monkeypatch, table)


# -- how far -----------------------------------------------------------------------------


def test_everything_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    query = begin(monkeypatch, Table((0, 0, 30), (0, 0, 7)))
    assert latest(query, {P0: 0, P1: 7}) == {P0: 30, P1: 7}
    assert query.ends() == {P0: 30, P1: 7}


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    query = begin(monkeypatch, Table((0, 0, 300), (0, 0, 100)))
    assert latest(query, {P0: 0, P1: 0}, max_messages=40) == {P0: 30, P1: 10}
    # Nothing is in segments: the size is that of messages that were read for it, about 1,000 bytes.
    by_bytes = latest(query, {P0: 0, P1: 100}, max_bytes=100_000)
    assert 90 <= by_bytes[P0] <= 110
    assert by_bytes[P1] == 100


def test_a_broker_that_is_down_leaves_the_last_known_end(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 30), (0, 0, 7))
    query = begin(monkeypatch, table)
    assert latest(query, {P0: 0, P1: 0}, max_messages=2) == {P0: 1, P1: 1}
    table.silent = {f"{TOPIC}-part-1"}
    assert latest(query, {P0: 1, P1: 1}) == {P0: 30, P1: 7}
    assert latest(query, {P0: 30, P1: 7}) == {P0: 30, P1: 7}


def test_it_waits_longer_while_nothing_happens_and_less_after_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table((0, 0, 5))
    query = begin(monkeypatch, table)
    for _ in range(7):
        latest(query, {P0: 5})
    assert table.waits[0] == query_module.SHORT_WAIT_S
    assert table.waits == sorted(table.waits)
    assert table.waits[-1] == query_module.LONG_WAIT_S
    query.committed()
    latest(query, {P0: 5})
    assert table.waits[-1] == query_module.SHORT_WAIT_S


def test_new_partitions_begin_at_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_module, "REFRESH_S", 0.0)
    table = Table((0, 0, 5))
    query = begin(monkeypatch, table)
    table.extents_of[f"{TOPIC}-part-1"] = PartitionExtent(3, 3, 9)
    deadline = time.monotonic() + PATIENCE_S
    while (found := latest(query, {P0: 5})) == {P0: 5}:
        assert time.monotonic() < deadline
    assert found == {P0: 5, P1: 9}
    (share,) = query.plan({P0: 5}, found)
    assert [(piece.part, piece.start, piece.end) for piece in share.pieces] == [(P1, 3, 9)]


def test_a_new_partition_without_messages_makes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    query = begin(monkeypatch, Table((0, 0, 5), (0, 0, 0)))
    assert latest(query, {P0: 5}) == {P0: 5}


def test_topics_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 5))
    table.others = [
        pb.ListedTopic(topic="/default/tt", reliable=True),
        pb.ListedTopic(topic="/default/volatile", reliable=False),
        pb.ListedTopic(topic="/other/t", reliable=True),
    ]
    table.extents_of["/default/tt"] = PartitionExtent(0, 0, 1)
    monkeypatch.setattr(table, "extents", lambda names: {name: PartitionExtent(0, 0, 1) for name in names})
    query = begin(monkeypatch, table, topicPattern="/default/[tv].*")
    assert {part.topic for part in query.beginning()} == {TOPIC, "/default/tt"}


def test_what_is_there_now_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 30), (0, 0, 7))
    query = begin(monkeypatch, table, startingOffsets="earliest")
    query.stop_at_present_end()
    start = query.beginning()
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(0, 0, 1000)
    seen = [start]
    while (found := latest(query, seen[-1], max_messages=10)) != seen[-1]:
        seen.append(found)
    assert seen[-1] == {P0: 30, P1: 7}
    assert len(seen) == 5
    assert table.waits == []


# -- what to read ------------------------------------------------------------------------


def test_a_range_over_segments_and_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    query = begin(monkeypatch, Table((0, 250, 300)))
    (share,) = query.plan({P0: 50}, {P0: 290})
    assert [(piece.start, piece.end, piece.segment is None) for piece in share.pieces] == [
        (50, 100, False),
        (100, 200, False),
        (200, 250, False),
        (250, 290, True),
    ]
    assert share.store_url == "file:///store"


def test_a_tail_needs_no_question_about_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 250, 300))
    query = begin(monkeypatch, table)
    end = latest(query, {P0: 260})
    (share,) = query.plan({P0: 260}, end)
    assert [(piece.start, piece.end, piece.segment) for piece in share.pieces] == [(260, 300, None)]
    assert table.segments_asked == 0


def test_descriptors_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 1000, 1000))
    query = begin(monkeypatch, table)
    at = {P0: 0}
    while (end := latest(query, at, max_messages=50)) != at:
        query.plan(at, end)
        at = end
    assert table.segments_asked == 1


def test_an_empty_range_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(monkeypatch, Table((0, 0, 5))).plan({P0: 5}, {P0: 5}) == []


# -- loss --------------------------------------------------------------------------------


def test_what_retention_has_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    query = begin(monkeypatch, Table((100, 200, 300)))
    with pytest.raises(
        DataLost, match=r"topic /default/t, partition 0: offsets 50 to 100 cannot be read.*failOnData"
    ):
        query.plan({P0: 50}, {P0: 150})


def test_or_is_skipped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    query = begin(monkeypatch, Table((100, 200, 300)), failOnDataLoss="false")
    (share,) = query.plan({P0: 50}, {P0: 150})
    assert [(piece.start, piece.end) for piece in share.pieces] == [(100, 150)]
    assert query.plan({P0: 50}, {P0: 80}) == []
    assert "offsets 50 to 100 are skipped" in caplog.text


def test_a_former_owner_that_knows_less_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 30))
    query = begin(monkeypatch, table)
    assert latest(query, {P0: 30}) == {P0: 30}
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(0, 0, 12)
    assert latest(query, {P0: 30}) == {P0: 30}
    table.extents_of[f"{TOPIC}-part-0"] = PartitionExtent(0, 0, 31)
    assert latest(query, {P0: 30}) == {P0: 31}


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_topic_that_was_created_anew(monkeypatch: pytest.MonkeyPatch, fails: bool, ends: bool) -> None:
    """Its offsets begin again: going on at the old ones would skip messages."""
    monkeypatch.setattr(query_module, "BELIEVED_AFTER_S", -1.0)
    query = begin(monkeypatch, Table((0, 0, 12)), failOnDataLoss=str(fails))
    if ends:
        query.stop_at_present_end()
    if fails:
        with pytest.raises(DataLost, match="created again"):
            latest(query, {P0: 30})
        return
    end = latest(query, {P0: 30})
    assert end == {P0: 12}
    (share,) = query.plan({P0: 30}, end)
    assert [(piece.start, piece.end) for piece in share.pieces] == [(0, 12)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_topic_that_was_deleted(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    table = Table((0, 0, 12))
    query = begin(monkeypatch, table, failOnDataLoss=str(fails))
    assert latest(query, {P0: 3}) == {P0: 12}
    table.is_deleted = True
    if fails:
        with pytest.raises(DataLost, match="offsets 3 to 12 cannot be read any more: the topic was deleted"):
            latest(query, {P0: 3})
    else:
        assert latest(query, {P0: 3}) == {P0: 3}


# -- progress ----------------------------------------------------------------------------


def test_progress_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table((0, 0, 30), (0, 0, 7))
    query = begin(monkeypatch, table, subscription="spark")
    query.stop_at_present_end()
    latest(query, {P0: 30, P1: 7})
    expected = [(f"{TOPIC}-part-0", "spark", 30), (f"{TOPIC}-part-1", "spark", 7)]
    assert table.advanced == expected
    latest(query, {P0: 30, P1: 7})
    assert table.advanced == expected
