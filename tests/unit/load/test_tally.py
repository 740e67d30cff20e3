"""The tally must notice what is wrong with a stream, and count it right, whatever the stream looks like."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.load.tally import (
    HEADER_BYTES,
    MAX_KEYS,
    MAX_PAGES,
    PAGE,
    Count,
    DeliveryTally,
    KeyOrder,
    LoadSource,
    Maker,
    Owed,
    PayloadKind,
    arrivals,
)

RUN = 7
SOURCE = LoadSource(RUN, 0, 0)


def messages(count: int, *, source: LoadSource = SOURCE, first: int = 0) -> list[bytes]:
    return Maker(source, HEADER_BYTES, HEADER_BYTES + 8).payloads(first, [1] * count)


def end(sequence: int, *, source: LoadSource = SOURCE, failed: int = 0) -> bytes:
    return Maker(source, HEADER_BYTES, HEADER_BYTES).end(sequence, failed)


def gap(first: int, count: int) -> bytes:
    return Maker(SOURCE, HEADER_BYTES, HEADER_BYTES).gap(first, count)


def counted(tally: DeliveryTally, *batches: list[bytes], topic: str = "a") -> Count:
    for batch in batches:
        tally.take(topic, batch)
    return tally.count()


def test_a_stream_as_it_was_sent_is_clean() -> None:
    stream = messages(3 * PAGE)
    count = counted(DeliveryTally(), stream[:1000], stream[1000:], [end(3 * PAGE)])
    assert count.is_clean
    assert (count.received, count.open_ended) == (3 * PAGE, 0)


def test_what_is_missing_is_lost() -> None:
    stream = messages(100)
    count = counted(DeliveryTally(), stream[:10] + stream[13:50], stream[60:], [end(100)])
    assert (count.lost, count.duplicates, count.reordered) == (13, 0, 0)


def test_what_is_missing_at_either_end_is_lost() -> None:
    count = counted(DeliveryTally(), messages(100)[5:90], [end(100)])
    assert count.lost == 15


def test_without_the_last_message_the_missing_tail_is_unknown() -> None:
    count = counted(DeliveryTally(), messages(100)[:90])
    assert (count.lost, count.open_ended) == (0, 1)


def test_what_was_not_read_before_the_end_is_not_lost() -> None:
    """Of two partitions one is read to its end, the other is only begun."""
    tally, stream = DeliveryTally(), messages(100)
    tally.take("a", [*stream[0::2], end(100)])
    tally.take("b", stream[1:20:2])
    count = tally.count(is_all_read=False)
    assert (count.lost, count.unread) == (0, 40)
    assert count.is_clean
    assert tally.count().lost == 40


def test_a_subscription_that_was_there_before_owes_nothing_of_before() -> None:
    tally = DeliveryTally(owed=Owed.REST)
    assert counted(tally, messages(100)[40:60], messages(100)[70:], [end(100)]).lost == 10


def test_partitions_consumed_unevenly_before_owe_nothing_of_before() -> None:
    """Somebody read one partition up to 60, the other up to 20, then stopped. Whoever goes on gets 61, 63 …
    of one and 22, 24 … of the other: 23 was read before, and only what is behind 61 can be lost."""
    stream = messages(100)
    tally = DeliveryTally(owed=Owed.REST, partitions=2)
    tally.take("a", stream[61::2])
    tally.take("b", [*stream[22:80:2], *stream[82::2], end(100)])
    assert tally.count().lost == 1
    assert tally.count().unread == 0


def test_a_partition_of_which_nothing_comes_may_have_been_consumed_before() -> None:
    stream = messages(100)
    tally = DeliveryTally(owed=Owed.REST, partitions=2)
    tally.take("b", [*stream[20::2], end(100)])
    count = tally.count()
    assert (count.lost, count.unread) == (0, 40)
    assert count.is_clean


def test_messages_acked_by_others_of_a_shared_subscription_are_not_lost() -> None:
    stream = messages(100)
    count = counted(DeliveryTally(owed=Owed.SOME), stream[10:20], stream[50:], [end(100)])
    assert (count.lost, count.unread) == (0, 30)


def test_what_comes_again_is_a_duplicate_and_not_out_of_order() -> None:
    stream = messages(100)
    count = counted(DeliveryTally(), stream[:50], stream[40:60], stream[40:], [end(100)])
    assert (count.lost, count.duplicates, count.reordered) == (0, 30, 0)


def test_a_duplicate_of_a_page_that_was_let_go_is_noticed() -> None:
    stream = messages(PAGE + 10)
    count = counted(DeliveryTally(), stream, stream[5:8], [stream[PAGE - 1]], [end(PAGE + 10)])
    assert (count.lost, count.duplicates, count.reordered) == (0, 4, 0)


def test_what_comes_behind_a_later_one_is_out_of_order() -> None:
    stream = messages(100)
    count = counted(DeliveryTally(), [*stream[:10], stream[11], stream[10], *stream[12:]], [end(100)])
    assert (count.lost, count.duplicates, count.reordered) == (0, 0, 1)


def test_each_partition_and_each_shared_consumer_has_its_own_order() -> None:
    for other in ({"topic": "b"}, {"topic": "a", "consumer": 1}):
        tally, stream = DeliveryTally(), messages(100)
        tally.take("a", stream[1::2])
        tally.take(payloads=stream[0::2], **other)
        assert counted(tally, [end(100)]).is_clean


def test_messages_of_another_consumer_are_compared_among_themselves() -> None:
    tally, stream = DeliveryTally(), messages(100)
    tally.take("a", stream[50:])
    tally.take("a", stream[10:50], is_again=True)
    assert tally.count().reordered == 0
    tally.take("a", [stream[5], stream[4], *stream[6:10]], is_again=True)
    assert tally.count().reordered == 1
    tally.take("a", stream[:4])
    assert tally.count().reordered == 5


def test_a_key_has_its_order_wherever_it_comes() -> None:
    source = LoadSource(RUN, 0, 10)
    tally, stream = DeliveryTally(by_key=True), messages(100, source=source)
    tally.take("a", stream[1::10], consumer=0)
    tally.take("a", stream[0:40:10], consumer=1)
    tally.take("a", stream[50::10], consumer=0)  # the key went to another consumer, and 40 is overtaken
    tally.take("a", [stream[40]], consumer=0)
    for key in range(2, 10):
        tally.take("a", stream[key::10], consumer=1)
    count = counted(tally, [end(100, source=source)])
    assert (count.lost, count.duplicates, count.reordered) == (0, 0, 1)


def test_a_key_has_no_order_across_its_old_and_new_partition() -> None:
    """A topic grows in mid-run. Its new partition is read first, the end of the old one later."""
    source = LoadSource(RUN, 0, 5)
    tally, stream = DeliveryTally(by_key=True), messages(100, source=source)
    tally.take("part-1", stream[50:])
    tally.take("part-0", stream[:50])
    assert counted(tally, [end(100, source=source)]).is_clean


def test_the_order_of_keys_takes_no_more_memory_than_it_may() -> None:
    order, sequences = KeyOrder(max_cells=100), np.arange(10)
    for place in range(1000):
        assert not order.is_behind(place, 10, sequences).any()
    assert order._cells == sum(map(len, order._ends.values())) == 100
    assert order.is_behind(999, 10, sequences).all()
    assert not order.is_behind(0, 10, sequences).any()  # forgotten


def test_other_messages_and_other_runs_are_foreign() -> None:
    tally = DeliveryTally(run=RUN)
    count = counted(
        tally, [*messages(10), b"", b"hello", b"x" * 100], messages(5, source=LoadSource(8, 0, 0))
    )
    assert (count.received, count.foreign, count.lost) == (10, 8, 0)


def test_what_was_never_acknowledged_may_be_missing() -> None:
    tally = DeliveryTally()
    stream = messages(100)
    tally.take("a", stream[:30] + stream[35:80])
    tally.sent(SOURCE, 100, [(30, 40), (80, 90)])
    count = tally.count()
    assert (count.uncertain, count.lost) == (15, 10)
    assert not tally.has_all()
    tally.take("a", stream[90:])
    assert tally.has_all()


def test_a_producer_of_which_nothing_came_is_missed() -> None:
    tally = DeliveryTally()
    tally.sent(SOURCE, 100)
    assert tally.count().lost == 100


def test_the_last_message_tells_how_many_were_not_acknowledged() -> None:
    count = counted(DeliveryTally(), messages(100)[:90], [end(100, failed=8)])
    assert (count.lost, count.uncertain) == (2, 8)


def test_messages_that_arrived_unacknowledged_excuse_no_others() -> None:
    """The receipts of ten were lost, and they are there. Ten others were acknowledged, and are not."""
    stream = messages(100)
    told = [gap(20, 10), gap(20, 10), end(100, failed=10)]
    count = counted(DeliveryTally(), stream[:50] + stream[60:], told)
    assert (count.lost, count.uncertain, count.received) == (10, 0, 90)
    count = counted(DeliveryTally(), stream[:20] + stream[25:50] + stream[60:], told)
    assert (count.lost, count.uncertain) == (10, 5)


def test_memory_is_bounded_and_what_cannot_be_told_any_more_is_said() -> None:
    tally = DeliveryTally(max_pages=4)
    stream = [messages(1, first=page * PAGE)[0] for page in range(100)]
    tally.take("a", stream)
    assert len(tally._pages) == 4
    tally.take("a", [stream[0], stream[99]])
    count = tally.count()
    assert (count.late, count.duplicates) == (1, 1)
    assert not count.is_clean


def test_thousands_of_producers_are_told_apart_without_giving_up_any() -> None:
    """Two runs of a thousand producers each, whose messages come in turns."""
    sources = [LoadSource(run, number, 0) for run in (1, 2) for number in range(1000)]
    tally = DeliveryTally()
    for sequence in range(4):
        for source in sources:
            tally.take("a", messages(1, source=source, first=sequence))
    for source in sources:
        tally.take("a", [end(4, source=source)])
    assert tally.count() == Count(received=8_000)
    assert len(tally._pages) < MAX_PAGES
    for source in sources:
        tally.take("a", messages(1, source=source, first=2))
    assert tally.count().duplicates == 2000


def test_of_a_long_run_nothing_is_kept_but_its_length() -> None:
    tally = DeliveryTally()
    for first in range(0, 100 * PAGE, PAGE):
        tally.take("a", messages(PAGE, first=first))
    tally.take("a", [*messages(10, first=100 * PAGE), end(100 * PAGE + 10)])
    (account,) = tally._accounts.values()
    assert not account.pages
    assert not account.full
    assert not tally._pages
    tally.take("a", messages(10, first=100 * PAGE))
    assert (tally.count().duplicates, tally.count().lost) == (10, 0)


def test_a_header_that_makes_no_sense_is_foreign() -> None:
    source = LoadSource(RUN, 0, MAX_KEYS + 1)
    count = counted(DeliveryTally(by_key=True), messages(3, source=source), messages(1, first=1 << 60))
    assert (count.received, count.foreign) == (0, 4)


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 300),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from((0, PAGE - 100)),
)
def test_counts_are_those_of_a_simple_model(
    chance: random.Random, count: int, doctored: int, has_keys: bool, first: int
) -> None:
    """A stream with messages dropped, repeated and put elsewhere, cut into batches anyhow, against a model
    that looks at each message by itself."""
    source = LoadSource(RUN, 3, 5 if has_keys else 0)
    stream = list(range(count))
    for _ in range(doctored):
        at, to = chance.randrange(len(stream)), chance.randrange(len(stream))
        match chance.choice(("drop", "repeat", "move")):
            case "drop" if len(stream) > 1:
                del stream[at]
            case "repeat":
                stream.insert(to, stream[at])
            case _:
                stream.insert(to, stream.pop(at))
    tally = DeliveryTally(by_key=has_keys)
    payloads = messages(count, source=source, first=first)
    position = 0
    while position < len(stream):
        size = chance.randint(1, 50)
        tally.take("a", [payloads[each] for each in stream[position : position + size]])
        position += size
    tally.take("a", [end(first + count, source=source)])

    seen: set[int] = set()
    highest: dict[int, int] = {}
    duplicates = reordered = 0
    for sequence in stream:
        lane = (first + sequence) % 5 if has_keys else 0
        if sequence in seen:
            duplicates += 1
        elif sequence < highest.get(lane, -1):
            reordered += 1
        highest[lane] = max(highest.get(lane, -1), sequence)
        seen.add(sequence)
    found = tally.count()
    lost = first + count - len(seen)
    assert (found.lost, found.duplicates, found.reordered) == (lost, duplicates, reordered)


@pytest.mark.parametrize("size", [(HEADER_BYTES, HEADER_BYTES), (40, 400)])
def test_a_message_carries_what_it_is_recognized_by(size: tuple[int, int]) -> None:
    sources = [LoadSource(0xFFFF_FFFF, (1 << 28) - 1, 0), LoadSource(1, 0, 1 << 20)]
    made = [Maker(source, *size).payloads(1 << 40, [5, 6, 7]) for source in sources]
    assert all(size[0] <= len(payload) <= size[1] for payload in made[0])
    found, foreign = arrivals([*made[0], b"other", *made[1]])
    assert [each.source for each in found] == sources
    assert [each.kind for each in found] == [PayloadKind.MESSAGE] * 2
    assert list(found[0].sequences) == [1 << 40, (1 << 40) + 1, (1 << 40) + 2]
    assert list(found[1].times) == [5, 6, 7]
    assert foreign == 1


def test_a_batch_is_not_worth_compressing() -> None:
    """Messages with the same filling would make a batch of a megabyte one of some kilobytes, and a compressed
    load a load of nothing."""
    batch = b"".join(Maker(SOURCE, 1024, 1024).payloads(0, [1] * 1000))
    assert len(zlib.compress(batch)) > 0.95 * len(batch)
    assert len(pa.compress(batch, "zstd", asbytes=True)) > 0.95 * len(batch)


def test_a_thousand_producers_share_what_they_fill_their_messages_with() -> None:
    makers = [Maker(LoadSource(RUN, number, 0), 1 << 20, 1 << 20) for number in range(1000)]
    assert len({id(maker._filling) for maker in makers}) == 1
