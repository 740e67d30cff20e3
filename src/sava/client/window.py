"""Window: the batches of a producer that were sent and have no receipt yet, and what becomes of them when a
stream ends and the next one opens.

The broker says on opening which sequence it expects next. That number cuts the window in two:

    window          20..29 | 30..39 | 40..49        the broker expects 40
                    known    known    not known

What is known is sent again all the same, because its receipt, with the offset, never came; the broker
recognises it. What is not known is sent as if for the first time. If the last stream ended because a batch
was refused, it is the one at the cut: batches are taken in order, so everything before it was taken and
nothing behind it. It leaves the window, and those behind it are numbered anew, since sequences must follow
one another.

A number that is no boundary of the window means that the broker has forgotten this producer, or has heard
another of the same name. Whether the sent batches are in the topic cannot be told any more, and sending them
again could double them: they fail with OutcomeUnknown.

Pure: no I/O, no clock. Owned by the lane of one partition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sava.client.errors import ClientError, DuplicateForgotten, OutcomeUnknown
from sava.client.pending import Pending

MAX_IN_FLIGHT: Final = 16
"""As many batches of a producer as a broker recognises when they are repeated."""

UNKNOWN_OFFSET: Final = -1
"""The offset of messages that are in the topic, exactly once, at a place that the broker no longer
remembers."""

_LOST_TRACK: Final = OutcomeUnknown(
    "the broker no longer knows which batches of this producer it has: these may be stored or not"
)


class Window:
    def __init__(
        self,
        *,
        succeed: Callable[[Pending, int], None],
        fail: Callable[[Pending, ClientError], None],
    ) -> None:
        self.batches: deque[Pending] = deque()
        self.producer_id = 0
        self.next_sequence = 0
        self._expected = 0
        """What the broker said when the stream opened."""
        self._succeed = succeed
        self._fail = fail

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_full(self) -> bool:
        return len(self.batches) >= MAX_IN_FLIGHT

    def is_known(self, batch: Pending) -> bool:
        """Whether the broker had the batch when the stream opened."""
        return batch.next_sequence <= self._expected

    def push(self, batch: Pending) -> None:
        """The next batch; it has a sequence now."""
        batch.number(self.next_sequence)
        self.next_sequence = batch.next_sequence
        self.batches.append(batch)

    def drop_last(self) -> None:
        """Take back a batch that was pushed and not sent."""
        self.next_sequence = self.batches.pop().base_sequence

    def receipt(self, base_sequence: int, base_offset: int) -> None:
        """A batch is durable. Those before it are too: batches are durable in order."""
        while self.batches and self.batches[0].base_sequence <= base_sequence:
            batch = self.batches.popleft()
            self._succeed(batch, base_offset if batch.base_sequence == base_sequence else UNKNOWN_OFFSET)

    def refuse_all(self) -> None:
        """The stream ended because the topic has gone elsewhere. Batches are answered in their order, so what
        has no receipt was not taken, and can go to the next broker even where no sequences tell them
        apart."""
        for batch in self.batches:
            batch.was_sent = False

    def resume(
        self, *, producer_id: int, expected: int, reliable: bool, ended_with: ClientError | None
    ) -> None:
        """A stream is open again. ``ended_with`` is what the last one ended with, if that was about a
        batch."""
        sent = [batch for batch in self.batches if batch.was_sent]
        unsent = [batch for batch in self.batches if not batch.was_sent]
        known: list[Pending] = []
        if sent and (not reliable or producer_id != self.producer_id or not _is_boundary(expected, sent)):
            self._give_up(sent, ended_with if not reliable else None)
        else:
            known = [batch for batch in sent if batch.next_sequence <= expected]
            unsent = [batch for batch in sent if batch.next_sequence > expected] + unsent
            if isinstance(ended_with, DuplicateForgotten):
                known = self._settle_forgotten(known)
            elif ended_with is not None and unsent and unsent[0].was_sent:
                self._fail(unsent.pop(0), ended_with)
        # A batch whose time is up stays in the window only to find out whether its sequence is taken.
        known = [batch for batch in known if not batch.is_settled]
        unsent = [batch for batch in unsent if not batch.is_settled]
        for batch in unsent:
            batch.was_sent = False
            if producer_id != self.producer_id:
                batch.data = None
        self.producer_id, self.next_sequence, self._expected = producer_id, expected, expected
        self.batches = deque(known)
        for batch in unsent:
            self.push(batch)

    def _give_up(self, sent: list[Pending], refusal: ClientError | None) -> None:
        for index, batch in enumerate(sent):
            # Without sequences to compare, answers in order tell that the first one was refused.
            self._fail(batch, refusal if refusal is not None and index == 0 else _LOST_TRACK)

    def _settle_forgotten(self, known: list[Pending]) -> list[Pending]:
        """The last batch is what a broker remembers longest, so only the others lose their offsets by one
        such answer."""
        forgotten, kept = (known[:-1], known[-1:]) if len(known) > 1 else (known, [])
        for batch in forgotten:
            self._succeed(batch, UNKNOWN_OFFSET)
        return kept


def _is_boundary(sequence: int, batches: list[Pending]) -> bool:
    return sequence == batches[0].base_sequence or any(sequence == batch.next_sequence for batch in batches)
