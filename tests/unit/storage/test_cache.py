"""The newest batches of all topics, within one bound."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.records import Compression, RecordBatch
from sava.storage.errors import DataGap
from sava.storage.tiered import BatchCache, RecentBatches


def batch(
    base: int, count: int = 10, *, size: int = 100, codec: Compression = Compression.NONE
) -> RecordBatch:
    return RecordBatch.encode([b"x" * size] * count, publish_time=1, codec=codec).assigned(
        topic_id=1, epoch=1, base_offset=base
    )


def cost(one: RecordBatch) -> int:
    cache = BatchCache(1 << 30)
    cache.recent().put(one)
    return cache.held_bytes


def test_an_offset_finds_the_batch_that_holds_it() -> None:
    recent = BatchCache(1 << 20).recent()
    first, second = batch(5), batch(15)
    recent.put(first)
    recent.put(second)
    assert [recent.get(offset) for offset in (5, 14, 15, 24)] == [first, first, second, second]
    assert [recent.get(offset) for offset in (0, 4, 25, 99)] == [None] * 4


def test_what_came_first_over_all_topics_goes_first() -> None:
    cache = BatchCache(3 * cost(batch(0)))
    one, two = cache.recent(), cache.recent()
    one.put(batch(0))
    two.put(batch(0))
    one.put(batch(10))
    two.put(batch(10))
    assert one.get(0) is None
    assert one.get(10) is not None
    assert two.get(0) is not None
    one.put(batch(20))
    assert two.get(0) is None


def test_the_bound_holds_for_many_small_batches_and_over_many_evictions() -> None:
    cache = BatchCache(100_000)
    parts = [cache.recent() for _ in range(7)]
    for base in range(5000):
        parts[base % 7].put(batch(base // 7, 1, size=1))
        assert cache.held_bytes <= 100_000
    for index, part in enumerate(parts):
        last = (4999 - index) // 7
        newest = part.get(last)
        assert newest is not None
        assert newest.base_offset == last
        assert part.get(0) is None


def test_a_compressed_batch_counts_with_the_columns_it_may_keep() -> None:
    packed = batch(0, 1000, codec=Compression.ZSTD)
    assert packed.header.length < 10_000
    assert cost(packed) > 100_000


def test_a_batch_larger_than_the_cache_is_not_kept() -> None:
    cache = BatchCache(1000)
    recent = cache.recent()
    recent.put(batch(0, 100))
    assert recent.get(0) is None
    assert cache.held_bytes == 0
    recent.put(batch(100, 1, size=1))
    assert recent.get(100) is not None


def test_a_closed_topic_gives_its_room_back() -> None:
    cache = BatchCache(3 * cost(batch(0)))
    one, two = cache.recent(), cache.recent()
    one.put(batch(0))
    one.put(batch(10))
    two.put(batch(0))
    one.drop()
    one.drop()
    assert one.get(0) is None
    assert cache.held_bytes == cost(batch(0))
    for base in (10, 20, 30):
        two.put(batch(base))
    assert two.get(0) is None
    assert two.get(10) is not None


def test_topics_that_come_and_go_leave_nothing_in_a_cache_that_is_not_full() -> None:
    """Their batches go with them, and their turns stayed, each with its topic: only a full cache takes turns,
    and a broker whose topics are short-lived never fills it."""

    def alive() -> int:
        gc.collect()
        return sum(type(each) is RecentBatches for each in gc.get_objects())

    before = alive()
    cache = BatchCache(1 << 30)
    stays = cache.recent()
    stays.put(batch(0))
    for _ in range(1000):
        goes = cache.recent()
        goes.put(batch(0))
        goes.put(batch(10))
        goes.drop()
    del goes
    assert alive() <= before + 2
    assert cache.held_bytes == cost(batch(0))
    assert stays.get(0) is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200))
def test_the_oldest_goes_first_whatever_was_dropped_before(steps: list[tuple[int, bool]]) -> None:
    """Against a plain list of what is there, in the order of arrival."""
    one = cost(batch(0))
    cache = BatchCache(5 * one)
    parts = [cache.recent() for _ in range(4)]
    ends = [0] * 4
    held: list[tuple[int, int]] = []
    for index, is_dropped in steps:
        if is_dropped:
            parts[index].drop()
            parts[index], ends[index] = cache.recent(), 0
            held = [each for each in held if each[0] != index]
        else:
            parts[index].put(batch(ends[index]))
            held = [*held, (index, ends[index])][-5:]
            ends[index] += 10
        assert cache.held_bytes == one * len(held)
        found = [(part, offset) for part in range(4) for offset in range(0, ends[part], 10)]
        assert [each for each in found if parts[each[0]].get(each[1]) is not None] == sorted(held)


def test_a_gap_is_refused() -> None:
    recent = BatchCache(1 << 20).recent()
    recent.put(batch(0))
    with pytest.raises(DataGap):
        recent.put(batch(11))
