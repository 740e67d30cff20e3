"""A repeated batch is recognised, a missing one too."""

from __future__ import annotations

import pytest

from sava.records import Header, RecordBatch
from sava.storage.errors import SequenceGap
from sava.storage.producers import (
    MAX_PRODUCERS,
    MAX_WRITERS,
    RUN,
    WINDOW,
    DuplicateForgotten,
    ProducerTable,
)
from sava.storage.types import ProducerState


def header(sequence: int, count: int = 10, *, producer: int = 1, offset: int = 0) -> Header:
    batch = RecordBatch.encode([b""] * count, publish_time=1, producer_id=producer, base_sequence=sequence)
    return batch.assigned(topic_id=1, epoch=1, base_offset=offset).header


def table_of(*appended: Header) -> ProducerTable:
    table = ProducerTable()
    for each in appended:
        table.follow(each)
    return table


def test_the_next_batch_is_new_and_a_repeated_one_has_its_offset() -> None:
    table = table_of(header(0, offset=100), header(10, offset=150))
    assert table.find(header(20)) is None
    assert table.find(header(10)) == 150
    assert table.find(header(0)) == 100


@pytest.mark.parametrize(("sequence", "count"), [(30, 10), (15, 10), (5, 20), (21, 1)])
def test_what_does_not_follow_is_a_gap(sequence: int, count: int) -> None:
    table = table_of(header(0), header(10))
    with pytest.raises(SequenceGap):
        table.find(header(sequence, count))


def test_the_same_sequences_cut_otherwise_are_not_taken_for_the_same_batch() -> None:
    table = table_of(header(0), header(10))
    with pytest.raises(DuplicateForgotten):
        table.find(header(5, 5))


def test_a_stranger_begins_with_zero() -> None:
    assert ProducerTable().find(header(0)) is None
    with pytest.raises(SequenceGap):
        ProducerTable().find(header(10))


def test_producer_zero_is_nobody() -> None:
    table = table_of(header(0, producer=0))
    assert table.find(header(0, producer=0)) is None
    assert table.find(header(77, producer=0)) is None
    assert table.states() == ()


def test_batches_in_flight_count_until_they_are_abandoned() -> None:
    table = table_of(header(0, offset=5))
    table.begin(header(10, offset=15))
    table.begin(header(20, offset=25))
    table.begin(header(0, producer=2, offset=35))
    assert table.find(header(20)) == 25
    assert table.find(header(30)) is None
    table.abandon()
    assert table.find(header(10)) is None
    assert table.find(header(0)) == 5
    assert table.find(header(0, producer=2)) is None


def test_more_in_flight_than_is_remembered_does_not_make_a_stranger() -> None:
    table = table_of(header(0, offset=5))
    for number in range(1, 4 * WINDOW):
        table.begin(header(10 * number, offset=5 + 10 * number))
    table.commit(header(10, offset=15))
    table.abandon()
    assert table.find(header(10)) == 15
    assert table.find(header(20)) is None


def test_memory_is_bounded_by_the_last_batches_and_the_last_producers() -> None:
    table = table_of(*(header(10 * number, offset=10 * number) for number in range(WINDOW + 1)))
    with pytest.raises(DuplicateForgotten):
        table.find(header(0))
    assert table.find(header(10)) == 10
    for producer in range(2, MAX_PRODUCERS + 3):
        table.follow(header(0, producer=producer, offset=1000 + producer))
    assert len(table.states()) == MAX_PRODUCERS
    with pytest.raises(SequenceGap):
        table.find(header(10 * (WINDOW + 1)))


def test_the_next_owner_knows_the_last_batch_of_each() -> None:
    table = table_of(header(0, offset=5), header(10, offset=15), header(0, producer=2, offset=25))
    assert table.states() == (ProducerState(1, 20, 10, 15), ProducerState(2, 10, 0, 25))
    following = ProducerTable(table.states())
    assert following.find(header(10)) == 15
    assert following.find(header(20)) is None
    with pytest.raises(DuplicateForgotten):
        following.find(header(0))


def test_of_two_tables_the_later_offsets_win() -> None:
    table = ProducerTable([ProducerState(1, 50, 40, 500), ProducerState(2, 10, 0, 20)])
    table.adopt(table_of(header(0, offset=5), header(10, producer=2, offset=700)))
    assert table.find(header(50)) is None
    assert table.find(header(20, producer=2)) is None
    assert table.find(header(10, producer=2)) == 700


# -- runs of writers ---------------------------------------------------------------------------


def run(number: int, index: int = 0, count: int = 10, *, producer: int = 1, offset: int = 0) -> Header:
    return header(number * RUN + index, count, producer=producer, offset=offset)


def test_a_run_may_begin_beyond_what_is_expected_and_goes_on_without_a_gap() -> None:
    """Run 4 is here, run 5 had nothing for this topic, run 6 comes in two batches."""
    table = table_of(run(4, offset=100))
    assert table.find(run(6)) is None
    table.follow(run(6, offset=110))
    assert table.find(run(6)) == 110
    assert table.find(run(6, 10)) is None
    with pytest.raises(SequenceGap):
        table.find(run(6, 20))


def test_a_stranger_may_begin_with_any_run_but_not_within_one() -> None:
    assert ProducerTable().find(run(7)) is None
    with pytest.raises(SequenceGap):
        ProducerTable().find(run(7, 10))


def test_a_run_that_was_followed_by_another_is_not_begun_again() -> None:
    """The answer for run 6 is lost, somebody else publishes run 6 and run 7, and the first asks again."""
    table = table_of(run(6, offset=100), run(7, offset=110))
    assert table.find(run(6)) == 100
    following = ProducerTable(table.states())
    with pytest.raises(DuplicateForgotten):
        following.find(run(6))
    assert following.find(run(7)) == 110
    assert following.find(run(8)) is None


def test_a_run_that_broke_off_continues_whatever_became_of_the_topic() -> None:
    """The owner dies behind the first of two frames; then a move hands on the last batch of each."""
    recovered = ProducerTable([ProducerState(1, 4 * RUN + 10, 4 * RUN, 50)])
    recovered.adopt(table_of(run(6, offset=60)))
    assert recovered.next_sequence(1) == 6 * RUN + 10
    moved = ProducerTable(recovered.states())
    assert moved.next_sequence(1) == 6 * RUN + 10
    assert moved.find(run(6, 10)) is None


def test_a_run_in_flight_that_is_refused_may_begin_again() -> None:
    table = table_of(run(4, offset=5))
    table.begin(run(5, offset=15))
    assert table.next_sequence(1) == 5 * RUN + 10
    table.abandon()
    assert table.next_sequence(1) == 4 * RUN + 10
    assert table.find(run(5)) is None


def test_a_crowd_of_clients_does_not_make_the_table_forget_a_writer() -> None:
    """A writer has published half of a run; two thousand clients come; the rest of the run must follow, and
    the first half must not be taken for new."""
    table = table_of(run(6, offset=1))
    for client in range(2, 2 * MAX_PRODUCERS):
        table.follow(header(0, producer=client, offset=client * 10))
    assert table.find(run(6)) == 1
    assert table.find(run(6, 10)) is None
    assert len(table.states()) == MAX_PRODUCERS + 1
    for writer in range(10_000, 10_000 + MAX_WRITERS):
        table.follow(run(1, producer=writer, offset=writer * 10))
    assert table.next_sequence(1) == 0
    assert len(table.states()) == MAX_PRODUCERS + MAX_WRITERS


def test_a_client_is_not_taken_for_one_that_begins_a_run() -> None:
    table = table_of(header(0), header(10))
    with pytest.raises(SequenceGap):
        table.find(header(RUN + 1))
    with pytest.raises(SequenceGap):
        table.find(header(RUN - 1))
