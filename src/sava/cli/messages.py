"""How commands print messages, and how users write positions in a topic.

Messages are a line each, as a table for people, as JSON, or the payloads alone. A terminal gets no control
characters from keys and payloads. What is printed is flushed before it counts as printed, so that an ack
after it is true."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import typer

from sava.cli.output import RawFormat, leave_standard_output, text_of
from sava.proto import topics_admin_pb2 as pb

if TYPE_CHECKING:  # it brings Arrow, which those who print something else do not need
    from sava.records import Message

Position = str | int | datetime
"""``earliest``, ``latest``, an offset, or a publish time."""

POSITION_FORMS: Final = (
    "earliest, latest, an offset, or a time such as 2026-03-01T12:00 (UTC unless it names a zone)"
)

_ENDS: Final = ("earliest", "latest")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WIDTH: Final = 100
"""Characters of a value in a table."""
_WIDTHS: Final = (12, 21, 12, 0)
"""Of key, producer, attributes and payload, unless they are longer."""
_PARTITION: Final = re.compile(r"-part-(\d+)$")


class Printer:
    def __init__(self, output: RawFormat) -> None:
        self._output = output
        if output is RawFormat.TABLE:
            self._write([_line("OFFSET", "PUBLISH_TIME", "KEY", "PRODUCER", "ATTRIBUTES", "PAYLOAD")])

    def show(self, messages: Sequence[Message]) -> None:
        if self._output is RawFormat.RAW:
            sys.stdout.buffer.write(b"".join(message.payload + b"\n" for message in messages))
            sys.stdout.buffer.flush()
        else:
            line = _json_line if self._output is RawFormat.JSON else _table_line
            self._write([line(message) for message in messages])

    def _write(self, lines: Sequence[str]) -> None:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """``sava consume … | head`` ends quietly when its reader has seen enough."""
    try:
        yield
    except BrokenPipeError:
        leave_standard_output()
        raise SystemExit(0) from None


def _json_line(message: Message) -> str:
    fields: dict[str, Any] = {} if message.topic is None else {"topic": message.topic}
    fields |= {
        "offset": message.offset,
        "publish_time": instant(message.publish_time),
        "key": message.key,
        "producer": message.producer,
        "attributes": dict(message.attributes),
    }
    if message.schema_id is not None:
        fields |= {"schema_id": str(message.schema_id), "schema_version": message.schema_version}
    try:
        fields["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        fields["payload_base64"] = base64.b64encode(message.payload).decode("ascii")
    return json.dumps(fields, ensure_ascii=False)


def _table_line(message: Message) -> str:
    attributes = ",".join(f"{key}={value}" for key, value in message.attributes.items())
    return _line(
        _place(message),
        instant(message.publish_time),
        _shown(message.key),
        _shown(message.producer),
        _shown(attributes or None),
        _shown(text_of(message.payload)),
    )


def _place(message: Message) -> str:
    """The offset, behind the number of the partition if there is one: 2:17."""
    if message.offset is None:
        return "-"
    partition = _PARTITION.search(message.topic or "")
    return f"{partition[1]}:{message.offset}" if partition else str(message.offset)


def _line(offset: str, time: str, *values: str) -> str:
    padded = (f"{value:<{width}}" for value, width in zip(values, _WIDTHS, strict=True))
    return "  ".join((f"{offset:>12}", f"{time:<27}", *padded)).rstrip()


def _shown(value: str | None) -> str:
    """One line of printable characters, cut to a bearable length."""
    if value is None:
        return "-"
    cut = value if len(value) <= _WIDTH else value[: _WIDTH - 1] + "…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)


# -- positions ----------------------------------------------------------------


def parse_position(text: str) -> Position:
    if text in _ENDS:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_time(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is no position: give {POSITION_FORMS}") from None


def parse_time(text: str) -> datetime:
    """Without a zone it is UTC, like every time that Sava prints."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 2026-03-01T12:00") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def chosen_position(*, offset: int | None, time: str | None, earliest: bool, latest: bool) -> Position:
    """The one of these options that was given."""
    given: list[Position] = []
    if offset is not None:
        given.append(offset)
    if time is not None:
        given.append(parse_time(time))
    given.extend(name for name, is_given in zip(_ENDS, (earliest, latest), strict=True) if is_given)
    if len(given) != 1:
        raise typer.BadParameter("give one of --offset, --time, --earliest and --latest")
    return given[0]


def position_message(position: Position) -> pb.StartPosition:
    match position:
        case int():
            return pb.StartPosition(offset=position)
        case datetime():
            return pb.StartPosition(publish_time=(position - _EPOCH) // timedelta(microseconds=1))
        case "earliest":
            return pb.StartPosition(earliest=True)
        case _:
            return pb.StartPosition(latest=True)


def instant(microseconds: int) -> str:
    """ISO 8601 in UTC; as a number what no calendar holds, since producers choose their times."""
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return str(microseconds)


def moment(milliseconds: int) -> str:
    """ISO 8601 in UTC, to the second; nothing for a time that has not come."""
    if not milliseconds:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
