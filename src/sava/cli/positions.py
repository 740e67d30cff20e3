"""Positions in a topic, as people write them: ``earliest``, ``latest``, an offset, or a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import typer

from sava.proto import topics_admin_pb2 as pb

Position = str | int | datetime
"""``earliest``, ``latest``, an offset, or a publish time."""

FORMS: Final = "earliest, latest, an offset, or a time such as 2026-03-01T12:00 (UTC unless it names a zone)"

_ENDS: Final = ("earliest", "latest")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse(text: str) -> Position:
    if text in _ENDS:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_time(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is no position: give {FORMS}") from None


def parse_time(text: str) -> datetime:
    """Without a zone it is UTC, like every time that Sava prints."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 2026-03-01T12:00") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def chosen(*, offset: int | None, time: str | None, earliest: bool, latest: bool) -> Position:
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


def to_message(position: Position) -> pb.StartPosition:
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
