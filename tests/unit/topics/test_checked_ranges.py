"""Source ranges, read and cut: what is left out, and where appends end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.storage.origin_marks import (
    NOTHING,
    SEVERAL,
    SeenOffsets,
    seen,
)
from sava.storage.source_positions import (
    SOURCE_BIT,
    OriginForgotten,
    SourceAppend,
    is_source_key,
    learned,
    origin_topic,
)
from sava.topics.errors import MessageInvalid
from sava.topics.ranges import runs
from sava.topics.source_copier import CheckedRange, Source
from tests.support.copying import Copy, Origins
from tests.unit.topics.copies import HERE

ORIGINS = (("eu", 7), ("eu", 8), ("asia", 7))


def payloads(links: Sequence[SourceAppend]) -> list[bytes]:
    return [payload for link in links if link.batch is not None for payload in link.batch.payloads()]


def of(offsets: set[int]) -> SeenOffsets:
    return seen(runs(sorted(offsets)))


def test_a_source_is_its_cluster_and_topic_by_their_ids_and_nobody_else() -> None:
    one = Source("eu", "c1", "/default/a", 7)
    assert one.key == Source("renamed", "c1", "/default/b", 7).key
    others = {Source("eu", "c1", "/default/a", 8).key, Source("eu", "c2", "/default/a", 7).key}
    assert one.key not in others
    assert len(others) == 2
    assert is_source_key(one.key)
    assert one.key < 2 * SOURCE_BIT


def test_one_batch_is_one_link_with_the_sequences_before_its_end() -> None:
    eu = Origins("eu").publish(20, skip=(0, 18, 19))
    pieces = CheckedRange(eu.source, eu.source_range(0, 20, begin=True), HERE)
    (link,) = pieces.cut(0, {eu.source.origin: NOTHING})
    assert link.batch is not None
    header = link.batch.header
    assert (header.producer_id, header.base_sequence, header.next_sequence) == (eu.source.key, 3, 20)
    assert (link.start, link.end, link.begin) == (0, 20, True)
    after = seen([(0, 20)], by=eu.source.key, top=18)
    assert (link.before, link.after, link.late) == (
        {eu.source.origin: NOTHING},
        {eu.source.origin: after},
        {},
    )
    found = learned({}, [link.batch])[eu.source.origin]
    assert found.seen == seen([(1, 20)], by=eu.source.key, top=18), "a frame does not say where it began"


@pytest.mark.parametrize(
    ("start", "end", "offsets"),
    [
        pytest.param(0, 10, [0, 11], id="beyond the end"),
        pytest.param(3, 10, [0, 10], id="before the start"),
        pytest.param(0, 10, [5, 10, 0, 5], id="not in order"),
        pytest.param(0, 10, [0, 5, 4, 9], id="twice"),
        pytest.param(0, 10, [0, 9], id="too few"),
        pytest.param(0, 10, [0, 5, 10], id="half a range"),
        pytest.param(10, 10, [10, 10], id="no range"),
        pytest.param(0, 1 << 63, [0, 1 << 62], id="more than can be"),
    ],
)
def test_offsets_that_cannot_be_are_refused(start: int, end: int, offsets: list[int]) -> None:
    eu = Origins("eu").publish(10)
    with pytest.raises(MessageInvalid):
        CheckedRange(eu.source, eu.source_range(0, 10)._replace(start=start, end=end, offsets=offsets), HERE)


def test_messages_of_the_source_itself_must_have_its_offsets() -> None:
    eu = Origins("eu").publish(10)
    moved = eu.source_range(0, 5)._replace(start=5, end=10, offsets=[5, 10])
    with pytest.raises(MessageInvalid):
        CheckedRange(eu.source, moved, HERE)


def test_messages_of_the_source_between_copies_must_have_its_offsets() -> None:
    eu, asia = Origins("eu").publish(2), Origins("asia").publish(3)
    mixed = Origins("eu").relay(asia, 0, 1)
    mixed.held += [eu.held[0], eu.held[1]]
    with pytest.raises(MessageInvalid):
        CheckedRange(eu.source, mixed.source_range(0, 3), HERE)


def test_what_cannot_be_judged_is_refused_unless_one_source_brought_all() -> None:
    eu = Origins("eu").publish(20)
    asia = Origins("asia").relay(eu)
    origin, source_range = eu.source.origin, asia.source_range(4, 8)
    pieces = CheckedRange(asia.source, source_range, HERE)
    vague = seen([(0, 2), (15, 16)], vague=(6, 15), by=SEVERAL, top=16)
    with pytest.raises(OriginForgotten) as refused:
        pieces.cut(4, {asia.source.origin: NOTHING, origin: vague})
    assert (refused.value.origin, refused.value.offset) == (origin, 6)
    alone = seen([(0, 2), (15, 16)], vague=(6, 15), by=asia.source.key, top=16)
    (link,) = pieces.cut(4, {asia.source.origin: NOTHING, origin: alone})
    assert payloads([link]) == [payload.encode() for payload in eu.payloads[4:8]]
    assert link.after[origin].ranges == [(0, 2), (4, 6), (15, 16)], "what is vague stays so"
    assert link.late == {origin: (4, 8)}


messages = st.lists(
    st.tuples(st.sampled_from(ORIGINS), st.integers(0, 12), st.booleans(), st.integers(1, 3)),
    min_size=1,
    max_size=25,
)


@given(
    given_messages=messages,
    batches=st.integers(1, 4),
    were_seen=st.tuples(*[st.sets(st.integers(0, 12))] * 3),
    skip=st.integers(0, 10),
)
def test_what_is_left_out_is_what_a_look_at_each_message_leaves_out(
    given_messages: list[tuple[tuple[str, int], int, bool, int]],
    batches: int,
    were_seen: tuple[set[int], set[int], set[int]],
    skip: int,
) -> None:
    """Messages of several origins, in any order, some of which were here, at offsets with holes."""
    relay = Origins("africa", 1)
    for (cluster, topic_id), offset, was_here, step in given_messages:
        relay.held += [None] * (step - 1)
        path = (cluster, HERE, "africa") if was_here else (cluster, "africa")
        relay.held.append(Copy(cluster, topic_id, offset, path, cluster))
    end = len(relay.held)
    start = min(skip, end - 1)
    before = {
        (cluster, origin_topic(cluster, topic_id)): each
        for (cluster, topic_id), each in zip(ORIGINS, were_seen, strict=True)
    }
    pieces = CheckedRange(relay.source, relay.source_range(0, end, batches=batches), HERE)
    links = pieces.cut(start, {origin: of(before.get(origin, set())) for origin in pieces.origins})

    running = {origin: set(each) for origin, each in before.items()}
    wanted, loops = [], 0
    for place, copy in enumerate(relay.held):
        if copy is None:
            continue
        origin = copy.cluster, origin_topic(copy.cluster, copy.topic_id)
        if HERE in copy.path:
            loops += 1
        elif place >= start and copy.offset not in running[origin]:
            running[origin].add(copy.offset)
            wanted.append(copy.payload)
    assert payloads(links) == wanted
    assert pieces.loops == loops
    after = {origin: of(each).ranges for origin, each in running.items() if each and origin in pieces.origins}
    assert {origin: each.ranges for origin, each in links[-1].after.items()} == after
    assert [link.start for link in links] == [start, *(link.end for link in links[:-1])]
    assert links[-1].end == end


@given(count=st.integers(1, 60), batches=st.integers(1, 8), limit=st.integers(1, 20))
def test_any_prefix_of_the_links_is_a_position(count: int, batches: int, limit: int) -> None:
    eu = Origins("eu").publish(count, skip=range(2, count, 3))
    pieces = CheckedRange(eu.source, eu.source_range(0, count, begin=True, batches=batches), HERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sava.records.header.MAX_COUNT", max(limit, -(-count // batches)))
        links = pieces.cut(0, {eu.source.origin: NOTHING})
    position, marks = 0, {eu.source.origin: NOTHING}
    for number, link in enumerate(links):
        assert link.batch is not None
        assert (link.start, link.begin, link.before) == (position, number == 0, marks)
        assert [each.ranges for each in link.after.values()] == [[(0, link.end)]]
        assert link.batch.header.next_sequence == link.end
        offsets = [int(payload.rsplit(b"/")[-1]) for payload in link.batch.payloads()]
        assert position <= offsets[0] <= offsets[-1] < link.end
        position, marks = link.end, dict(link.after)
    assert position == count
    assert payloads(links) == [payload.encode() for payload in eu.payloads]
