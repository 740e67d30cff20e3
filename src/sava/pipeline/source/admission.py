"""Admission: how much of what is there goes into one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sava.pipeline.positions import Part


def admit(
    available: Mapping[Part, int],
    *,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    message_bytes: Callable[[Part], float] = lambda part: 1.0,
) -> dict[Part, int]:
    """How many messages of each partition. Limits are shared out by what is available, and every partition
    that has something gets at least one message: none starves behind a large one, and none stands still
    because a message is larger than the limit."""
    admitted = {part: count for part, count in available.items() if count > 0}
    if max_messages is not None:
        admitted = prorate(admitted, max_messages)
    if max_bytes is not None:
        sizes = {part: max(message_bytes(part), 1.0) for part in admitted}
        wanted = {part: max(1, int(count * sizes[part])) for part, count in admitted.items()}
        shares = prorate(wanted, max_bytes)
        admitted = {
            part: count
            if shares[part] == wanted[part]
            else max(1, min(count, int(shares[part] / sizes[part])))
            for part, count in admitted.items()
        }
    return admitted


def prorate(wanted: Mapping[Part, int], limit: int) -> dict[Part, int]:
    """Parts of ``limit`` in proportion to what is wanted, each at least 1; together not more, unless there
    are more partitions than that."""
    total = sum(wanted.values())
    if total <= limit:
        return dict(wanted)
    shares = {part: max(1, count * limit // total) for part, count in wanted.items()}
    left = limit - sum(shares.values())
    for part in sorted(shares, key=lambda part: (-shares[part], part)):
        # Rounding left something over, or what is too small for a share of its own was rounded up.
        change = min(left, 1, wanted[part] - shares[part]) if left > 0 else max(left, 1 - shares[part])
        shares[part] += change
        left -= change
    return shares
