"""How ``sava storage`` shows what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from rich.filesize import decimal

from sava.cli.messages import Printer
from sava.cli.output import Format, RawFormat, print_json, print_line, print_table
from sava.cli.positions import instant
from sava.records import RecordBatch
from sava.storage.inspection import StoppedJournal, TopicView
from sava.storage.types import Segment

# -- topics and segments -------------------------------------------------------------------------


def views(
    found: Sequence[TopicView], sizes: Mapping[str, int] | None, output: Format, *, with_segments: bool
) -> None:
    """``sizes``: of the objects that there are; None when nobody looked."""
    if output is Format.JSON:
        print_json([_as_json(view, sizes) for view in found])
        return
    columns = ("TOPIC", "ID", "START", "END", "SEALED", "EPOCH", "STORAGE_ID", "SEGMENTS", "SIZE")
    print_table(columns, [_row(view) for view in found])
    for view in found:
        if with_segments:
            _show_segments(view, sizes)
        for text in view.faults():
            print_line(f"{view.name.path}: {text}")
        if sizes is not None and not with_segments:
            missing = sum(_presence(segment, sizes) != "there" for segment in view.segments)
            if missing:
                print_line(f"{view.name.path}: the objects of {missing} segments are not as described")


def _row(view: TopicView) -> tuple[object, ...]:
    state = view.state
    size = decimal(sum(segment.size for segment in view.segments))
    if state is None:
        return (view.name.path, *("-" * 6), len(view.segments), size)
    is_sealed = "yes" if state.sealed else "no"
    facts = (state.topic_id, state.start, state.end, is_sealed, state.epoch, state.storage_id)
    return (view.name.path, *facts, len(view.segments), size)


def _show_segments(view: TopicView, sizes: Mapping[str, int] | None) -> None:
    print_line("")
    columns = ["START", "END", "SIZE", "ROWS", "CREATED", "EPOCH", *(["OBJECT"] if sizes is not None else [])]
    rows = [
        (
            *(each.start, each.end, each.size, each.end - each.start),
            *(instant(each.created_ms * 1000), each.epoch),
            *([_presence(each, sizes)] if sizes is not None else []),
            each.key,
        )
        for each in view.segments
    ]
    print_table((*columns, "KEY"), rows)


def _presence(segment: Segment, sizes: Mapping[str, int]) -> str:
    size = sizes.get(segment.key)
    if size is None:
        return "missing"
    return "there" if size == segment.size else f"{size} bytes"


def _as_json(view: TopicView, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    state = msgspec.to_builtins(view.state)
    if state is not None:
        state["topic_id"] = str(state["topic_id"])
    segments = []
    for each in view.segments:
        segment = msgspec.to_builtins(each)
        segment.update(
            topic_id=str(each.topic_id), rows=each.end - each.start, created=instant(each.created_ms * 1000)
        )
        if sizes is not None:
            segment["object_size"] = sizes.get(each.key)
        segments.append(segment)
    return {"topic": view.name.path, "state": state, "segments": segments, "problems": list(view.faults())}


def journal(found: StoppedJournal, faults: Sequence[str], output: Format) -> None:
    identity = found.identity
    if output is Format.JSON:
        print_json(
            {
                "identity": msgspec.to_builtins(identity),
                "files": found.file_count,
                "size": found.size,
                "torn_bytes": found.torn_bytes,
                "topics": [
                    {"topic_id": str(each.topic_id), "ranges": each.ranges, "size": each.size}
                    for each in found.topics
                ],
                "problems": list(faults),
            }
        )
        return
    if identity is not None:
        print_line(
            f"journal {identity.storage_id} of {identity.owner}, opened {identity.incarnation} times: "
            f"{found.file_count} files, {decimal(found.size)}"
        )
    rows = [
        (each.topic_id, ", ".join(f"{first}..{end}" for first, end in each.ranges), decimal(each.size))
        for each in found.topics
    ]
    print_table(("TOPIC_ID", "OFFSETS", "SIZE"), rows)


# -- messages ------------------------------------------------------------------------------------


class Messages:
    """Prints batches as they come, up to ``limit`` messages (0: all)."""

    def __init__(self, output: RawFormat, limit: int) -> None:
        self._printer = Printer(output)
        self._left = limit or None

    def take(self, batch: RecordBatch) -> bool:
        """Whether more is wanted."""
        messages = list(islice(batch, self._left))
        self._printer.show(messages)
        if self._left is None:
            return True
        self._left -= len(messages)
        return self._left > 0
