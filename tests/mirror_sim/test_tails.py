"""The rules by which the simulator lets topics go on."""

from __future__ import annotations

import pytest

from sava.ledger.protocol.record import TailBroken
from tests.mirror_sim.tails import Frame, tail_of


def test_a_tail_begins_at_the_segments_and_has_no_hole() -> None:
    frames = [Frame(7, 2, 0, 5, 0), Frame(8, 1, 0, 9, 10), Frame(7, 2, 5, 6, 20), Frame(7, 2, 6, 8, 30)]
    assert [frame.position for frame in tail_of(frames, 7, 2, 5)] == [20, 30]
    with pytest.raises(TailBroken):
        tail_of([frames[0], frames[3]], 7, 2, 0)
