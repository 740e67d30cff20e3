"""Which segment holds an offset, while segments come and go."""

from __future__ import annotations

from typing import cast

from sava.storage.catalog import Catalog
from sava.storage.tiered import KnownSegments
from sava.storage.types import Segment


def segment(start: int, end: int) -> Segment:
    return Segment(
        topic_id=1,
        start=start,
        end=end,
        epoch=1,
        key=f"{start}",
        size=1,
        crc32c=0,
        footer_size=1,
        footer_crc32c=0,
        min_publish_time=0,
        max_publish_time=0,
        created_ms=0,
    )


class Answers:
    """A catalog that changes between two questions."""

    def __init__(self, *answers: list[Segment]) -> None:
        self._answers = list(answers)
        self.questions = 0

    async def segments(self) -> list[Segment]:
        self.questions += 1
        return list(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])


def known(answers: Answers) -> KnownSegments:
    return KnownSegments(cast(Catalog, answers))


async def test_descriptors_are_read_once() -> None:
    answers = Answers([segment(0, 10), segment(10, 20)])
    segments = known(answers)
    for offset, start in ((0, 0), (9, 0), (10, 10), (19, 10)):
        found = await segments.find(offset)
        assert found is not None
        assert found.start == start
    assert answers.questions == 1


async def test_what_was_registered_while_they_were_read_is_found() -> None:
    answers = Answers([segment(0, 10)], [segment(0, 10), segment(10, 20)])
    found = await known(answers).find(15)
    assert found is not None
    assert found.start == 10


async def test_what_is_registered_later_is_added() -> None:
    answers = Answers([segment(0, 10)])
    segments = known(answers)
    await segments.all()
    segments.registered(segment(10, 30))
    found = await segments.find(29)
    assert found is not None
    assert found.end == 30
    assert answers.questions == 1


async def test_what_is_nowhere_is_not_found() -> None:
    segments = known(Answers([segment(10, 20)]))
    assert await segments.find(5) is None
    assert await segments.find(20) is None
    assert await known(Answers([])).find(0) is None
