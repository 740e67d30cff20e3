"""What becomes of rows on their way to another cluster, by column, against a look at each message."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sava.pipeline.replicate.translation import REPLICATE, CopyRoute
from sava.records import STORED_COLUMNS, Message, Origin, RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH

OWN_TOPIC = "00000000000000aa"
START = 1000


def way(*, forward: bool = False, target: str = "us") -> CopyRoute:
    return CopyRoute("eu", OWN_TOPIC, target, forward)


def rows_of(messages: list[Message]) -> Any:
    return RecordBatch.from_messages(messages).to_arrow(STORED_COLUMNS)


class Sent(NamedTuple):
    offset: int
    message: Message


def translated(way: CopyRoute, rows: Any) -> tuple[list[Sent], int]:
    found = way.translate(rows, START)
    flat = found.ranges()
    offsets = [
        offset for start, end in zip(flat[::2], flat[1::2], strict=True) for offset in range(start, end)
    ]
    assert offsets == found.offsets.to_pylist()
    assert flat == sorted(set(flat)), "ranges that touch are one"
    if not offsets:
        return [], found.skipped
    batch = RecordBatch.from_arrow(found.rows)
    return list(map(Sent, offsets, batch.messages())), found.skipped


def naive(way: CopyRoute, messages: list[Message]) -> list[Sent]:
    sent = []
    for offset, message in enumerate(messages, START):
        said = message.attributes
        is_copy = message.origin is not None and PATH in said and ORIGIN_TOPIC in said
        if REPLICATE in said:
            allowed = [name.strip() for name in said[REPLICATE].split(",")]
            if said[REPLICATE].strip() == "none" or way.target not in allowed:
                continue
        if is_copy and (not way.forward or way.target in said[PATH].split(",")):
            continue
        own = {name: value for name, value in said.items() if name not in (PATH, ORIGIN_TOPIC)}
        path = f"{said[PATH]},{way.source}" if is_copy else way.source
        topic = said[ORIGIN_TOPIC] if is_copy else way.topic
        attributes = {**own, PATH: path, ORIGIN_TOPIC: topic}
        origin = message.origin if is_copy else Origin(way.source, offset)
        sent.append(Sent(offset, replace(message, attributes=attributes, origin=origin)))
    return sent


def check(way: CopyRoute, messages: list[Message], rows: Any = None) -> list[Sent]:
    sent, skipped = translated(way, rows_of(messages) if rows is None else rows)
    assert sent == naive(way, messages)
    assert skipped == len(messages) - len(sent)
    return sent


def own(number: int, **attributes: str) -> Message:
    return Message(b"%d" % number, f"k{number}", _named(attributes), 10 + number, producer="web")


def copied(number: int, path: str = "asia", **attributes: str) -> Message:
    given = {PATH: path, ORIGIN_TOPIC: "00000000000000bb", **_named(attributes)}
    return Message(b"%d" % number, None, given, 10 + number, origin=Origin(path.split(",")[0], number))


def _named(attributes: dict[str, str]) -> dict[str, str]:
    """``only``: where a message may go."""
    return {REPLICATE if name == "only" else name: value for name, value in attributes.items()}


# -- stories -----------------------------------------------------------------------------------------------


def test_what_was_published_here_gets_this_place_as_its_origin() -> None:
    sent = check(way(), [own(0), own(1)])
    assert [each.message.origin for each in sent] == [Origin("eu", START), Origin("eu", START + 1)]
    assert sent[0].message.attributes == {PATH: "eu", ORIGIN_TOPIC: OWN_TOPIC}
    assert (sent[0].message.key, sent[0].message.publish_time, sent[0].message.producer) == ("k0", 10, "web")


def test_the_same_attributes_in_all_messages_stay_one_value() -> None:
    """The target looks at one row then, too."""
    for messages in (
        [own(n) for n in range(50)],
        [own(n, a="1") for n in range(50)],
        [copied(n) for n in range(50)],
    ):
        found = way(forward=True).translate(rows_of(messages), START)
        assert RecordBatch.from_arrow(found.rows).constant("attributes") is not None
        check(way(forward=True), messages)


def test_copies_go_on_only_if_the_link_forwards() -> None:
    messages = [own(0), copied(7), own(2), copied(8)]
    assert [each.offset for each in check(way(), messages)] == [START, START + 2]
    sent = check(way(forward=True), messages)
    assert [each.message.origin for each in sent][1::2] == [Origin("asia", 7), Origin("asia", 8)]
    assert sent[1].message.attributes == {PATH: "asia,eu", ORIGIN_TOPIC: "00000000000000bb"}


def test_what_has_been_in_the_target_does_not_go_back() -> None:
    paths = ("us", "asia,us", "us,asia", "asia", "usa", "asia,bus", "u")
    messages = [copied(number, path) for number, path in enumerate(paths)]
    sent = check(way(forward=True), messages)
    assert [each.message.attributes[PATH] for each in sent] == ["asia,eu", "usa,eu", "asia,bus,eu", "u,eu"]


def test_a_message_may_say_where_it_goes() -> None:
    lists = ("us", "asia,us", " asia , us ", "", "none", "asia", "usa", "none,us", "US", " ")
    messages = [own(number, only=value) for number, value in enumerate(lists)] + [own(99)]
    sent = check(way(), messages)
    assert [int(each.message.payload) for each in sent] == [0, 1, 2, 7, 99]
    assert sent[0].message.attributes[REPLICATE] == "us", "the next cluster must know, too"
    assert not check(way(target="none"), [own(0, only="none")])


def test_a_name_is_no_pattern() -> None:
    check(way(target="u.s"), [own(0, only="uxs"), own(1, only="u.s"), own(2, only="a,u.s")])
    check(way(target="a+(b"), [own(0, only="a+(b"), own(1, only="aab")])


def test_what_a_client_claims_is_not_believed() -> None:
    """Only what a copier has written says where a message is from."""
    claims = [
        own(0, **{PATH: "us"}),
        own(1, **{PATH: "us", ORIGIN_TOPIC: "x"}),
        replace(own(2), origin=Origin("us", 4)),
        replace(own(3, **{PATH: "us"}), origin=Origin("us", 4)),
    ]
    sent = check(way(), claims)
    assert [each.message.origin for each in sent] == [Origin("eu", START + n) for n in range(4)]
    assert {each.message.attributes[PATH] for each in sent} == {"eu"}


def test_when_nothing_is_left_there_is_nothing() -> None:
    assert check(way(), [copied(0), copied(1)]) == []
    assert way().translate(rows_of([copied(0)]), START).ranges() == []


def test_holes_are_ranges() -> None:
    messages = [own(n) if n % 3 else own(n, only="none") for n in range(9)]
    found = way().translate(rows_of(messages), 0)
    assert found.ranges() == [1, 3, 4, 6, 7, 9]


# -- anything ----------------------------------------------------------------------------------------------

texts = st.text(alphabet="ab,é ", max_size=4)
clusters = st.sampled_from(["us", "eu", "asia", "usa", "none"])
paths = st.lists(clusters, min_size=1, max_size=3).map(",".join)
attributes = st.dictionaries(
    st.one_of(texts, st.sampled_from([PATH, ORIGIN_TOPIC, REPLICATE])), texts, max_size=4
)
origins = st.builds(Origin, clusters, st.integers(0, 1 << 40))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    said = dict(draw(attributes))
    origin = draw(st.one_of(st.none(), origins))
    if draw(st.booleans()):
        said[REPLICATE] = draw(st.one_of(paths, st.sampled_from(["", "none", " us"])))
    if origin is not None and draw(st.booleans()):
        said[PATH], said[ORIGIN_TOPIC] = draw(paths), draw(st.sampled_from(["00", "ff"]))
    ids = draw(st.one_of(st.none(), st.integers(1, 3)))
    return Message(
        draw(st.binary(max_size=5)),
        draw(st.one_of(st.none(), texts)),
        said,
        draw(st.integers(0, 1 << 40)),
        ids,
        ids,
        origin,
        draw(st.one_of(st.none(), texts)),
    )


uniform = st.builds(lambda message, count: [message] * count, messages(), st.integers(1, 6))
ways = st.builds(way, forward=st.booleans(), target=clusters.filter(lambda name: name != "eu"))


@given(ways, st.one_of(st.lists(messages(), min_size=1, max_size=8), uniform))
@example(way(forward=True), [own(0), copied(1), own(2, a="1"), copied(3, b="2"), own(4)])
def test_rows_become_what_each_message_would(way: CopyRoute, given: list[Message]) -> None:
    check(way, given)


@given(ways, st.lists(messages(), min_size=2, max_size=8), st.data())
def test_so_do_parts_of_larger_batches(way: CopyRoute, given: list[Message], data: st.DataObject) -> None:
    """Arrow's slices share buffers that begin before them and end behind them."""
    first = data.draw(st.integers(0, len(given) - 1))
    end = data.draw(st.integers(first + 1, len(given)))
    check(way, given[first:end], rows_of(given).slice(first, end - first))


def test_an_empty_map_is_as_none() -> None:
    rows = rows_of([own(0), own(1), own(2, a="1")])
    entries = pa.MapArray.from_arrays(pa.array([0, 1, 1, 2], pa.int32()), ["x", "a"], ["y", "1"])
    at = rows.schema.get_field_index("attributes")
    rows = rows.set_column(at, rows.schema.field(at), entries.cast(rows.schema.field(at).type))
    sent, _ = translated(way(), rows)
    ours = {PATH: "eu", ORIGIN_TOPIC: OWN_TOPIC}
    assert sent[0].message.attributes == {"x": "y", **ours}
    assert sent[1].message.attributes == ours
    assert sent[2].message.attributes == {"a": "1", **ours}
