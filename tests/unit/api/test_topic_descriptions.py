"""Topics and positions, as messages say them."""

from __future__ import annotations

import pytest

from sava.api.admin.descriptions import position, start_message
from sava.topics.specs import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtTime,
    Position,
)


@pytest.mark.parametrize("start", [EARLIEST, LATEST, AtOffset(0), AtOffset(7), AtTime(0), AtTime(7)], ids=str)
def test_a_position_is_understood_as_it_was_meant(start: Position) -> None:
    assert position(start_message(start)) == start
