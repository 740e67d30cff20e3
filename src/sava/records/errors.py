"""What can be wrong with a batch.

All of them are the fault of the caller that handed the bytes or values in, so all are ``CallerError``.
``records`` cannot know where bytes came from: a layer that reads them from its own disk turns
``BatchCorrupt`` into the ``HostError`` of that layer, so that no client is blamed for a broken disk."""

from __future__ import annotations

from sava.errors import CallerError


class BatchCorrupt(CallerError):
    """The bytes are not a batch: wrong magic or checksum, truncated, or columns that contradict each
    other."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"corrupt record batch: {detail}")
        self.detail = detail


class BatchTooLarge(CallerError):
    """A limit of the format is passed. Make several batches of it."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"record batch too large: {what} is {size}, the limit is {limit}")
        self.what = what
        self.size = size
        self.limit = limit


class UnsupportedBatch(CallerError):
    """A newer version of the format made the batch; what this version can check is well formed."""

    def __init__(self, what: str, value: int) -> None:
        super().__init__(f"record batch not supported by this version of Sava: {what} {value}")
        self.what = what
        self.value = value


class InvalidMessage(CallerError):
    """A value that the format cannot hold: wrong type, number out of range, text that is not Unicode, no
    payload."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"invalid message: {detail}")
        self.detail = detail


class OffsetOutside(CallerError):
    """The batch holds none of the offsets asked for."""

    def __init__(self, start: int, end: int, *, base_offset: int, next_offset: int) -> None:
        super().__init__(f"no offset of [{start}, {end}) is in a batch of [{base_offset}, {next_offset})")
        self.start = start
        self.end = end
        self.base_offset = base_offset
        self.next_offset = next_offset


class BatchUnassigned(CallerError):
    """No broker has taken the batch yet, so its messages have no offsets."""

    def __init__(self) -> None:
        super().__init__("the record batch has no offsets: no broker has assigned them")
