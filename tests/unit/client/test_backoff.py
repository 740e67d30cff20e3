"""How long a client waits before it tries again."""

from __future__ import annotations

import pytest

from sava.client.connection import FIRST_DELAY_S as FIRST_S
from sava.client.connection import LONGEST_DELAY_S as LONGEST_S
from sava.client.connection import ReconnectBackoff
from sava.client.errors import Unavailable


def test_pauses_grow_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    backoff = ReconnectBackoff()
    delays = [backoff.delay() for _ in range(10)]
    assert FIRST_S / 2 <= delays[0] <= FIRST_S
    assert LONGEST_S / 2 <= delays[-1] <= LONGEST_S
    backoff.reset()
    assert backoff.delay() <= FIRST_S


@pytest.mark.parametrize("code", ["topic_moved", "not_owner"])
def test_a_topic_that_has_moved_is_looked_up_at_once_and_then_seldom(code: str) -> None:
    backoff, moved = ReconnectBackoff(), Unavailable("it has moved", code)
    assert backoff.delay(moved) == 0.0
    assert backoff.delay(moved) >= FIRST_S
    backoff.reset()
    assert backoff.delay(moved) == 0.0


def test_other_failures_are_no_reason_to_hurry() -> None:
    assert ReconnectBackoff().delay(Unavailable("no leader", "unavailable")) > 0.0
