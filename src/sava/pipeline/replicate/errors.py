"""Whose fault it is: what fails at the cluster that sends is not told as a failure of the remote.

Both clusters are asked by the same client, and raise the same errors. Whoever asks the one that sends says so
(``at_source``); what comes otherwise is the remote's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sava.client.errors import Denied
from sava.errors import Outcome, RetryableError, SavaError


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
