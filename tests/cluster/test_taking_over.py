"""Many topics of a killed broker: all are served elsewhere soon, and in few entries of the metadata log."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.taking_over import take_over
from tests.support.long import IS_LONG

TOPICS = 1000 if IS_LONG else 100
SERVED_S = 5.0 if IS_LONG else 10.0
"""The short form runs beside other tests."""


async def test_the_topics_of_a_killed_broker_at_rest(tmp_path: Path) -> None:
    """Orphans, recovered, assigned, taken up, their storage claimed: five writes each, and each on its own
    conditions, in fewer entries than one for ten topics."""
    measured = await take_over(tmp_path, topics=TOPICS, tails=0)
    print(measured)
    assert measured.steps["taken"].operations >= TOPICS
    assert measured.entries <= TOPICS // 10 + 20
    assert measured.seconds < SERVED_S


async def test_the_topics_of_a_killed_broker_with_messages_in_its_journal(tmp_path: Path) -> None:
    """Each has a message that is on mirrors only: it becomes a segment, which is registered with the seal."""
    measured = await take_over(tmp_path, topics=TOPICS, tails=TOPICS)
    print(measured)
    assert measured.steps["descriptor"].operations == TOPICS
    assert measured.steps["storage sealed"].operations == TOPICS
    assert measured.entries <= TOPICS // 6 + 30
    assert measured.seconds < SERVED_S
