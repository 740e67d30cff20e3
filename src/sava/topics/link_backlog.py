"""What a topic keeps for the clusters that it is copied to. Pure.

A remote that is down keeps everything from retention that it has not got. One that never comes back would
keep it until the store is full, so there may be a limit: beyond it the oldest messages go as if nobody
waited for them, and the link, when it goes on, finds that they are gone and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sava.storage.types import Segment


def kept_from(
    consumers: int | None, links: Iterable[int], segments: Sequence[Segment], max_bytes: int | None
) -> int | None:
    """The first offset that must stay: of ``consumers`` without limit, of ``links`` (their cursors) as far as
    the segments from there on have at most so many bytes. None: nothing must."""
    lowest = min(links, default=None)
    if lowest is not None and max_bytes is not None:
        lowest = max(lowest, _first_within(segments, max_bytes))
    return min((each for each in (consumers, lowest) if each is not None), default=None)


def _first_within(segments: Sequence[Segment], max_bytes: int) -> int:
    """Where the last segments begin that have so many bytes together."""
    first, size = segments[-1].end if segments else 0, 0
    for segment in reversed(segments):
        size += segment.size
        if size > max_bytes:
            break
        first = segment.start
    return first
