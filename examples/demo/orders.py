"""Orders: what is published.

Order ``n`` is the n-th message of its topic, so it must be at offset ``n``, whoever reads it and from
wherever: a message that is lost, repeated, changed or out of order is found by looking at it.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.demo.steps import StepFailed

TOPIC = "/default/orders"


def cents(number: int) -> int:
    return 100 + number * 7919 % 9900


def order(number: int) -> bytes:
    return b'{"order":%d,"cents":%d}' % (number, cents(number))


def orders(start: int, end: int) -> list[bytes]:
    return [order(number) for number in range(start, end)]


def total_cents(count: int) -> int:
    """Of the first ``count`` orders."""
    return sum(map(cents, range(count)))


def check_orders(offset: int, payloads: Sequence[bytes]) -> None:
    """These were read from ``offset`` on."""
    for number, payload in enumerate(payloads, offset):
        if payload != order(number):
            raise StepFailed(f"{order(number)!r} at offset {number}", repr(payload))
