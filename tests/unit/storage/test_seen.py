"""What was seen of an origin, against a set of numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.storage.origin_marks import (
    LATE_EACH,
    MAX_LATE,
    NOTHING,
    SEVERAL,
    Mark,
    SeenOffsets,
    read_marks,
    room_for,
    runs,
    seen,
)
from sava.storage.producers import MAX_PRODUCERS, MAX_WRITERS
from sava.storage.source_positions import MAX_ORIGINS, MAX_SOURCES
from sava.storage.types import Late, OriginMark, ProducerState, TopicState

TOP = 40
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, TOP - 1), min_size=1, max_size=8)),
        st.tuples(st.just("cover"), st.tuples(st.integers(0, TOP), st.integers(0, 12))),
        st.tuples(st.just("trim"), st.integers(2, 5)),
    ),
    max_size=20,
)


def numbers(found: SeenOffsets) -> set[int]:
    return {offset for start, end in found.ranges for offset in range(start, end)}


@given(script=steps)
def test_what_is_certain_is_true_and_what_is_not_is_vague(script: list[tuple[str, Any]]) -> None:
    found, true = NOTHING, set[int]()
    for number, (name, given_numbers) in enumerate(script):
        match name, given_numbers:
            case "add", list(offsets):
                found = found.added(np.array(offsets, np.int64), 1 + number % 2)
                true.update(offsets)
            case "cover", (start, count):
                found = found.covered(start, start + count)
                true.update(range(start, start + count))
            case "trim", room:
                found = found.trimmed(room)
                assert len(found.ranges) <= room
        vague = set(range(*found.vague))
        assert not numbers(found) & vague
        assert numbers(found) | vague == true | vague
        bounds = found.bounds.tolist()
        assert bounds == sorted(set(bounds)), "ranges are ascending, and none touches another"
        assert not vague or found.end >= found.vague[1]
        assert found.end == max(true, default=-1) + 1


@given(known=st.sets(st.integers(0, TOP)), offsets=st.lists(st.integers(0, TOP + 5), min_size=1, max_size=12))
def test_new_is_what_was_not_seen_and_came_first(known: set[int], offsets: list[int]) -> None:
    found = seen(_pairs(sorted(known)))
    asked = np.array(offsets, np.int64)
    expected = [each not in known and each not in offsets[:at] for at, each in enumerate(offsets)]
    assert found.new(asked).tolist() == expected
    assert not found.is_beyond(asked) or all(expected)


def test_the_oldest_holes_are_forgotten_and_what_is_before_them_is_not() -> None:
    found = seen([(3, 10), (12, 13), (15, 16), (20, 30)], by=SEVERAL).trimmed(2)
    assert (found.ranges, found.vague) == ([(3, 10), (20, 30)], (12, 16))
    asked = np.array([2, 9, 10, 15, 16, 19], np.int64)
    assert found.unknown(asked, 5) == 15
    certain = asked[asked != 15]
    assert found.unknown(certain, 5) is None
    assert found.new(certain).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("start", "end", "vague"),
    [
        pytest.param(0, 12, (12, 20), id="from below"),
        pytest.param(18, 25, (10, 18), id="from above"),
        pytest.param(0, 25, (0, 0), id="all of it"),
        pytest.param(12, 15, (10, 20), id="in the midst, which nobody does"),
        pytest.param(20, 30, (10, 20), id="behind it"),
    ],
)
def test_what_the_direct_path_passes_is_vague_no_more(start: int, end: int, vague: tuple[int, int]) -> None:
    found = seen([(0, 10), (30, 31)], vague=(10, 20)).covered(start, end)
    assert found.vague == vague
    assert not numbers(found) & set(range(*vague))


def test_whoever_brings_an_origin_alone_is_known_until_another_does() -> None:
    found = NOTHING.covered(0, 4)
    assert found.by == 0
    found = found.added(np.array([5, 7]), 3).added(np.array([9]), 3)
    assert (found.by, found.top) == (3, 10)
    assert found.added(np.array([6]), 4).by == SEVERAL


def test_a_full_record_fits_into_the_store() -> None:
    """All producers, sources and origins that there can be, with all ranges, and offsets as they are after
    years of a million messages a second."""
    far = 10**14
    late = tuple(Late(far + n, far + n + 1, far, far + 1) for n in range(LATE_EACH))
    for origins in (1, 30, MAX_ORIGINS):
        wide = np.arange(2 * room_for(origins) + 10, dtype=np.int64) * 10**9 + far
        marks = tuple(
            Mark(SeenOffsets(wide, (far, far), 1 << 62, far), late).record(
                ("a-cluster-of-the-world", f"{n:016x}"), origins
            )
            for n in range(origins)
        )
        assert sum(len(each.late) for each in marks) <= MAX_LATE
        count = MAX_PRODUCERS + MAX_WRITERS + MAX_SOURCES
        producers = tuple(ProducerState((1 << 62) + n, far, far, far) for n in range(count))
        state = TopicState(topic_id=1, epoch=1, storage_id="a", producers=producers, origins=marks)
        assert len(msgspec.json.encode(state)) < 1 << 20


def test_a_mark_is_read_as_it_was_written() -> None:
    mark = Mark(seen([(3, 10), (12, 13)], vague=(10, 11), by=7, top=13), (Late(0, 5, 3, 4),))
    record = mark.record(("eu", "x"), 1)
    assert record == OriginMark("eu", "x", (3, 7, 2, 1), (10, 11), 7, 13, (Late(0, 5, 3, 4),))
    again = msgspec.json.decode(msgspec.json.encode(record), type=OriginMark)
    assert read_marks([again]) == {("eu", "x"): mark}


def test_places_of_late_messages_become_fewer_and_none_is_lost() -> None:
    late = tuple(Late(10 * n, 10 * n + 2, 5 * n, 5 * n + 1) for n in range(LATE_EACH + 1))
    fewer = Mark(NOTHING, late).bounded(1).late
    assert len(fewer) <= LATE_EACH
    for each in late:
        assert any(
            one.start <= each.start
            and each.end <= one.end
            and one.lowest <= each.lowest
            and each.top <= one.top
            for one in fewer
        )


def _pairs(offsets: list[int]) -> list[tuple[int, int]]:
    flat = runs(np.array(offsets, np.int64)).tolist() if offsets else []
    return list(zip(flat[::2], flat[1::2], strict=True))
