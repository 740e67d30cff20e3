"""What the source refuses, each in one line.

What the sink refuses. Spark shows the text at the end of its own report, so each is one line with the
way out.

Whose fault it is: what fails at the cluster that sends is not told as a failure of the remote.

Both clusters are asked by the same client, and raise the same errors. Whoever asks the one that sends says so
(``at_source``); what comes otherwise is the remote's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sava.client.errors import Denied
from sava.errors import CallerError, Outcome, RetryableError, SavaError
from sava.pipeline.options import Part


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


class WriteRefused(CallerError):
    """The rows, or the way they are to be written, are wrong; repeating it cannot help."""


class SourceFailed(SavaError):
    """The cluster that sends does not answer, or does not let its own runner in."""

    outcome = Outcome.NOT_DONE

    def __init__(self, code: str, reason: str, *, may_pass: bool) -> None:
        super().__init__(reason)
        self.code = code
        self.may_pass = may_pass


@contextmanager
def at_source() -> Iterator[None]:
    """Raises SourceFailed."""
    try:
        yield
    except Denied as error:
        raise SourceFailed("source_denied", f"this cluster denies it: {error}", may_pass=False) from error
    except RetryableError as error:
        raise SourceFailed(
            "source_unavailable", f"this cluster does not answer: {error}", may_pass=True
        ) from error
