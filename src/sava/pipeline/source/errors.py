"""What the source refuses, each in one line."""

from __future__ import annotations

from sava.errors import CallerError
from sava.pipeline.positions import Part


class DataLost(CallerError):
    """Messages that the query has not read are gone. Not skipped unless the user has said so."""

    def __init__(self, part: Part, start: int, end: int, why: str) -> None:
        super().__init__(
            f"topic {part.topic}, partition {part.number}: offsets {start} to {end} cannot be read any more: "
            f"{why}. Set the option failOnDataLoss to false to go on with what is left, or begin anew with "
            "another checkpoint (and keep messages longer than the query may be behind)"
        )
        self.part, self.start, self.end = part, start, end


class TopicReplaced(CallerError):
    """The topic was deleted and created again since its messages were planned."""

    def __init__(self, name: str, wanted: int, found: int) -> None:
        super().__init__(f"{name} is another topic by now: its id is {found}, and was {wanted}")
        self.name, self.wanted, self.found = name, wanted, found


class SourceRefused(CallerError):
    """A query that cannot begin."""


DELETED = "they were deleted before they were read (retention)"
CREATED_ANEW = "the topic ends before them, so it was deleted and created again"
TOPIC_GONE = "the topic was deleted"
