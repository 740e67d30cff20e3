"""Positions: where a subscription or a reader begins, as users write it and as the protocol says it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from sava.client.errors import Refused
from sava.proto import streams_pb2 as pb

Start = Literal["earliest", "latest"] | int | datetime
"""An offset, or a time: the first message that was not published before it."""
End = Literal["latest"] | int | datetime | None
"""Exclusive. None: go on with what comes; "latest": what is there when the reader opens."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def microseconds(time: datetime) -> int:
    """Since 1970-01-01 UTC. Raises Refused for a time without a zone: it would mean something else on every
    machine."""
    if time.tzinfo is None:
        raise Refused(f"the time {time.isoformat()} has no time zone")
    return (time - _EPOCH) // _MICROSECOND


def position_of(start: Start) -> pb.Position:
    match start:
        case "earliest":
            return pb.Position(earliest=True)
        case "latest":
            return pb.Position(latest=True)
        case datetime():
            return pb.Position(publish_time=microseconds(start))
        case int() if start >= 0 and start is not True and start is not False:
            return pb.Position(offset=start)
        case _:
            raise Refused(f'start {start!r}: "earliest", "latest", an offset or a datetime')
