"""Staged writes: messages that a decision has given to the topic, taken from the object store.

They were decided upon as a whole (``sava.cluster.writers``), and the broker that decided may be dead, so any
number of brokers may ask for the same ones any number of times. The topic's memory of producers says how much
of them is here already:

    asked    run 7: 300 messages; nothing of run 7 is known     ─▶ frames 0..199, then 200..299
    crash    behind the first frame; the journal remembers run 7 up to 200
    asked    by another broker, of the next owner                ─▶ 200..299
    asked    a third time                                       ─▶ nothing

Only whole batches are put into frames, so wherever a run broke off, a batch ends there; and the next broker
need not cut frames as the one before did.

**Measured once.** Limits and schema are asked before the decision. A topic that has become stricter since
does not refuse what was promised: the other topics of the batch have theirs. What paces and fences publishing
(rate, hand-over, ownership) is asked for each frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.errors import CallerError, SavaError
from sava.records import BatchTooLarge, RecordBatch
from sava.storage import staging
from sava.storage.errors import StagedInvalid
from sava.storage.objectstore import ObjectStore
from sava.storage.producers import RUN
from sava.storage.staging import Section
from sava.storage.topic_log import TopicLog
from sava.tasks import SingleFlight
from sava.topics.errors import TopicMismatch
from sava.topics.publishing import Publisher, largest_payload

SLOTS: Final = 8
"""Each needs a piece of a section, the frame that is made of it, and its parts in between: some 30 MB."""


class Run(NamedTuple):
    """What a batch of a writer has for one topic."""

    producer_id: int
    ordinal: int
    """Its number among the writer's batches; from 1 on."""
    sections: Sequence[Section]

    @property
    def start(self) -> int:
        """Its first sequence."""
        return self.ordinal * RUN

    @property
    def messages(self) -> int:
        return sum(section.messages for section in self.sections)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where staged messages are, and how many topics of this broker may have some of them in memory."""

    objects: ObjectStore
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))


class StagedWrites:
    """Of one topic; owned by the event loop."""

    def __init__(self, publisher: Publisher, log: TopicLog | None) -> None:
        self._publisher = publisher
        self._log = log
        self._runs: SingleFlight[tuple[int, int], None] = SingleFlight()
        """Two that publish the same run at once would both find its next frame missing."""

    async def check(self, stage: Stage, sections: Sequence[Section]) -> None:
        if self._log is None:
            raise TopicMismatch(
                f"topic {self._publisher.topic} is not reliable: what it does not keep cannot be there "
                "exactly once; write to it at least once, or to a reliable topic"
            )
        for section in sections:
            self._publisher.check_largest(section.largest)
        schema = self._publisher.schema_check()
        if schema is None:
            return
        async with stage.slots, aclosing(staging.read_batches(stage.objects, sections)) as batches:
            async for batch in batches:
                await asyncio.to_thread(_verify, batch, batch.header.body_size)
                await schema.check(batch)

    async def publish(self, stage: Stage, run: Run) -> None:
        key = run.producer_id, run.ordinal
        await self._runs.run(key, lambda: self._publish(stage, run))

    async def close(self, error: SavaError) -> None:
        """Callers that wait get the error; what was accepted resolves."""
        await self._runs.stop(error)

    async def _publish(self, stage: Stage, run: Run) -> None:
        assert self._log is not None
        done = max(self._log.next_sequence(run.producer_id) - run.start, 0)
        if done >= run.messages:
            return  # of this run, or of a later one, which was begun when this one was complete
        largest = max(section.largest for section in run.sections)
        frames = staging.read_frames(stage.objects, run.sections, skip=done)
        async with stage.slots, aclosing(frames) as groups:
            async for group in groups:
                for frame in await asyncio.to_thread(_frames, group, run, done, largest):
                    # One at a time: a second one behind a refused first would be a gap, and hide the reason.
                    await asyncio.shield(await self._publisher.begin_checked(frame))
                    done += len(frame)


def _frames(group: Sequence[RecordBatch], run: Run, done: int, largest: int) -> list[RecordBatch]:
    """The batches of a group, verified and stamped, as one; as several if no batch can hold them all."""
    for batch in group:
        _verify(batch, largest)
    return _joined(group, run.producer_id, run.start + done)


def _verify(batch: RecordBatch, largest: int) -> None:
    try:
        batch.verify()
    except CallerError as error:
        raise StagedInvalid(f"a staged batch cannot be read: {error}") from error
    if batch.header.body_size > largest and largest_payload(batch) > largest:
        raise StagedInvalid(f"a staged payload is larger than the {largest} bytes that were announced")


def _joined(group: Sequence[RecordBatch], producer_id: int, sequence: int) -> list[RecordBatch]:
    try:
        return [RecordBatch.joined(group, producer_id=producer_id, base_sequence=sequence)]
    except BatchTooLarge:
        if len(group) == 1:
            raise
    middle = len(group) // 2
    first, rest = group[:middle], group[middle:]
    return [
        *_joined(first, producer_id, sequence),
        *_joined(rest, producer_id, sequence + sum(map(len, first))),
    ]
