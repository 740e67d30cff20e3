"""Errors of the pipeline that several of its modules raise.

Spark shows the text of an error at the end of its own report, so each is one line with the way out. Both
clusters of a replication link raise the same client errors: code that calls the source cluster does so inside
``at_source``, so that its failures are not reported as failures of the remote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sava.client.errors import Denied
from sava.errors import CallerError, Outcome, RetryableError, SavaError
from sava.pipeline.options import TopicPartition


class DataLost(CallerError):
    """Retention has deleted messages that the query has not read. They are skipped only if the user says
    so."""

    def __init__(self, part: TopicPartition, start: int, end: int, why: str) -> None:
        super().__init__(
            f"topic {part.topic}, partition {part.number}: offsets {start} to {end} cannot be read any more: "
            f"{why}. Set the option failOnDataLoss to false to continue with what is left, or start with "
            "a new checkpoint (and retain messages longer than the query may lag)"
        )
        self.part, self.start, self.end = part, start, end


class TopicReplaced(CallerError):
    """The topic was deleted and created again after its messages were planned."""

    def __init__(self, name: str, wanted: int, found: int) -> None:
        super().__init__(f"{name} is another topic by now: its id is {found}, and was {wanted}")
        self.name, self.wanted, self.found = name, wanted, found


class SourceRefused(CallerError):
    """The query cannot start: a topic does not fit, or messages do not have the columns that it asks for."""


DELETED = "they were deleted before they were read (retention)"
CREATED_AGAIN = "the topic ends before them, so it was deleted and created again"
TOPIC_GONE = "the topic was deleted"


class WriteRefused(CallerError):
    """The sink cannot write these rows; a retry cannot help."""


class SourceFailed(SavaError):
    """The source cluster does not answer, or denies access to its own runner."""

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
