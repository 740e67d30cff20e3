"""LinkTopicState: one topic of a link: what there is of it here and at the remote, and which of its
partitions may be copied because of that.

    described ─▶ verdict ─▶ copy, hold, or create and grow ─▶ described again ─▶ …

The verdict is the matrix's, the same that checks a policy before it is set. Creating is no exception to it:
what there is after that is described and compared like any other topic, also if a user has created it.

**A deleted topic stays deleted.** By the ids of the remote's topics it is noticed that one has gone, or that
another has taken its name. That is only possible if the ids are on record before anything is copied, so a
partition is not copied before the cluster here has acknowledged the report that has the id. Ids of topics
that are not copied into are not kept: an operator will delete those and create better ones.

Owned by the thread of the link. Clocks are parameters.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from sava.pipeline.options import TopicPartition, partition_name
from sava.pipeline.replicate.partitions import FIRST_DELAY_S, LONGEST_DELAY_S, PartitionState, Throttle
from sava.proto import replica_pb2, replication_pb2
from sava.replication.matrix import (
    CONNECTED,
    Here,
    KnownThere,
    LinkState,
    Settings,
    There,
    Verdict,
    decide,
)
from sava.tasks import Backoff

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""So often it is said in the log that something is not copied, and why."""


class Creation(NamedTuple):
    """To be made at the remote."""

    topic: str
    partitions: int
    reliable: bool
    grow: bool


def there(remote: str, shape: replica_pb2.TopicShape) -> There:
    return There(
        remote=remote,
        namespace_exists=shape.namespace_exists,
        exists=shape.exists,
        partitions=shape.partition_count,
        reliable=shape.reliable,
        missing=tuple(shape.missing),
        topic_ids=tuple(shape.topic_ids),
    )


class LinkTopicState:
    def __init__(
        self, listed: replication_pb2.LinkTopic, remote: str, *, throttle: Throttle, now: float
    ) -> None:
        """``throttle``: of the link."""
        self.topic = listed.topic
        self.remote = remote
        self._throttle = throttle
        self.listed = listed
        self.partitions: list[PartitionState] = []
        self._generation = listed.generation
        self._ids: dict[int, int] = {}
        """Of the topic there, by partition, as far as it was copied into."""
        self._recorded: dict[int, int] = {}
        self._is_tombstone = self._has_stone = False
        """It was deleted there; and that is on record."""
        self._there: There | None = None
        self._verdict: Verdict | None = None
        self._failure: tuple[LinkState, str] | None = None
        """Why it could not be created or grown."""
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.25)
        self._create_at = 0.0
        self._is_being_made = False
        self._retry_ms = 0
        self._is_kept = False
        self._said: dict[tuple[LinkState, str], float] = {}
        """What keeps it, and when that was last said in the log."""
        self.follow(listed, now)

    # -- what is wanted here -------------------------------------------------------------------

    def is_about(self, listed: replication_pb2.LinkTopic) -> bool:
        """Whether that is this topic, and not another one of the same name."""
        ids = [partition.topic_id for partition in self.partitions]
        return list(listed.topic_ids[: len(ids)]) == ids

    def is_same(self, reported: replication_pb2.LinkTopic) -> bool:
        """Whether that was reported of this topic; it may have had fewer partitions then."""
        ids = [partition.topic_id for partition in self.partitions]
        return list(reported.topic_ids) == ids[: len(reported.topic_ids)]

    def follow(self, listed: replication_pb2.LinkTopic, now: float) -> bool:
        """What the cluster says of it now; whether the remote should be looked at because of that."""
        before = self._generation, self.listed.partition_count
        is_changed = (listed.generation, listed.partition_count) != before
        self.listed = listed
        if listed.generation > self._generation:
            log.info("replication: begun again topic=%s remote=%s", self.topic, self.remote)
            self._generation = listed.generation
            self._ids, self._recorded = {}, {}
            self._is_tombstone = self._has_stone = False
            self._verdict = None
            self._backoff.reset()
            for partition in self.partitions:
                partition.renew()
        elif listed.generation == self._generation:
            self._recorded = _by_number(listed.remote_topic_ids) or self._recorded
            self._ids = {**_by_number(listed.remote_topic_ids), **self._ids}
            self._is_tombstone |= listed.is_tombstone
            self._has_stone |= listed.is_tombstone
        self._add_partitions(now)
        if listed.start_offsets:
            for partition, offset in zip(self.partitions, listed.start_offsets, strict=False):
                partition.start_at(offset)
        return is_changed

    def _add_partitions(self, now: float) -> None:
        last = {each.partition: each for each in self.listed.partitions}
        is_partitioned = self.listed.partition_count > 0
        for number in range(len(self.partitions), len(self.listed.topic_ids)):
            part = TopicPartition(self.topic, number)
            partition = PartitionState(
                partition_name(part, partitioned=is_partitioned),
                number,
                self.listed.topic_ids[number],
                remedy=f"`sava replication recreate {self.topic} --remote {self.remote}`",
                throttle=self._throttle,
                now=now,
            )
            if number < len(self.listed.begins):
                partition.recorded_begin = self.listed.begins[number]
            if number in last:
                partition.seed(last[number], is_same_target=bool(self._ids.get(number)))
            self.partitions.append(partition)

    @property
    def start_us(self) -> int | None:
        """Copying begins with what was published then; None: not by time."""
        start = self.listed.policy.start
        return int(start) if start.isdecimal() else None

    @property
    def starts_at_first(self) -> bool:
        """Copying begins with the oldest message there is."""
        return not self.listed.start_offsets and self.start_us is None

    # -- what there is at the remote -----------------------------------------------------------

    def describe(self, found: There, settings: Settings, *, retry_ms: int = 0) -> None:
        """By the remote's own word. ``retry_ms``: when it is asked again."""
        self._retry_ms = retry_ms
        here = Here(topic=self.topic, partitions=self.listed.partition_count, reliable=self.listed.reliable)
        width = max(self._ids, default=-1) + 1
        known = KnownThere(
            topic_ids=tuple(self._ids.get(number, 0) for number in range(width)),
            is_tombstone=self._is_tombstone,
            is_grown=bool(self.listed.grow_to),
        )
        self._there, self._verdict = found, decide(here, found, settings, known)
        if self._verdict.state is LinkState.REMOTE_DELETED:
            self._is_tombstone = True
        if not self._wants_change:
            self._failure = None
            self._backoff.reset()
            self._ids |= {number: found.topic_ids[number] for number in self._verdict.copied}
        self.settle()

    def unanswered(self, state: LinkState, reason: str, *, retry_ms: int) -> None:
        """The remote does not say what there is."""
        self._verdict = None
        for partition in self.partitions:
            partition.hold(
                LinkState.REMOTE_DELETED if self._is_tombstone else state, reason, retry_ms=retry_ms
            )

    @property
    def _wants_change(self) -> bool:
        verdict = self._verdict
        return verdict is not None and (verdict.create is not None or verdict.grow > 0)

    def creation(self, now: float) -> Creation | None:
        """What is to be made at the remote, now."""
        verdict = self._verdict
        if verdict is None or not self._wants_change or self._is_being_made or now < self._create_at:
            return None
        self._is_being_made = True
        self._create_at = now + self._backoff.next()  # if it is deleted at once
        partitions = verdict.grow if verdict.create is None else verdict.create
        return Creation(self.topic, partitions, self.listed.reliable, grow=verdict.grow > 0)

    def not_created(self, state: LinkState, reason: str, now: float, now_ms: int) -> None:
        self._is_being_made = False
        delay = self._backoff.next()
        self._create_at, self._retry_ms = now + delay, now_ms + round(delay * 1000)
        self._failure = (state, reason)
        self.settle()

    def created(self, creation: Creation) -> None:
        self._is_being_made = False
        log.info(
            "replication: %s topic=%s remote=%s partitions=%d",
            "grown" if creation.grow else "created",
            *(self.topic, self.remote, creation.partitions),
        )

    def due_in(self, now: float) -> float | None:
        """Seconds until ``creation`` may have something."""
        is_wanted = self._wants_change and not self._is_being_made
        return max(0.0, self._create_at - now) if is_wanted else None

    # -- which may be copied -------------------------------------------------------------------

    def settle(self) -> None:
        """Hold and admit partitions by what is known."""
        verdict, found = self._verdict, self._there
        if verdict is None or found is None:
            return
        # A topic that was deleted is not tried again however often it is looked at.
        retry_ms = self._retry_ms if verdict.state is not LinkState.REMOTE_DELETED else 0
        for partition in self.partitions:
            number = partition.number
            if number not in verdict.copied:
                partition.hold(verdict.state, verdict.reason, retry_ms=retry_ms)
            elif self._wants_change and not self._is_there(number, found):
                partition.hold(*(self._failure or (LinkState.STARTING, "")), retry_ms=self._retry_ms)
            elif self._recorded.get(number) != found.topic_ids[number]:
                partition.hold(LinkState.STARTING, "")
            else:
                partition.admit(found.topic_ids[number])

    @staticmethod
    def _is_there(number: int, found: There) -> bool:
        return found.exists and number < len(found.topic_ids) and number not in found.missing

    def recorded(self, reported: replication_pb2.LinkTopic) -> None:
        """The cluster here has written down what was reported of it."""
        if reported.generation == self._generation:
            self._recorded = _by_number(reported.remote_topic_ids)
            self._has_stone = reported.is_tombstone
            for partition, begin in zip(self.partitions, reported.begins, strict=False):
                partition.recorded_begin = begin
            self.settle()

    # -- what is listed --------------------------------------------------------------------------

    def report(self, now: float) -> replication_pb2.LinkTopic:
        ids = [self._ids.get(number, 0) for number in range(max(self._ids, default=-1) + 1)]
        return replication_pb2.LinkTopic(
            topic=self.topic,
            topic_ids=[partition.topic_id for partition in self.partitions],
            generation=self._generation,
            remote_topic_ids=ids,
            is_tombstone=self._is_tombstone,
            begins=[partition.due_begin for partition in self.partitions] if ids else (),
            partitions=[each for partition in self.partitions if (each := partition.report(now)) is not None],
        )

    @property
    def is_recorded(self) -> bool:
        """Nothing has to be written down before anything else."""
        return (
            self._recorded == self._ids
            and self._has_stone == self._is_tombstone
            and all(partition.is_recorded for partition in self.partitions)
        )

    def look(self, now: float) -> bool:
        """Whether a partition has another state than at the last look. Says in the log what is not
        copied."""
        changed = [partition for partition in self.partitions if partition.look(now)]
        kept: dict[tuple[LinkState, str], list[int]] = defaultdict(list)
        for partition in self.partitions:
            if partition.state not in (*CONNECTED, LinkState.STARTING):
                kept[partition.state, partition.reason].append(partition.number)
        for (state, reason), numbers in kept.items():
            if now - self._said.get((state, reason), -REPEAT_S) >= REPEAT_S:
                self._said[state, reason] = now
                log.error(
                    "replication: not copied topic=%s remote=%s partitions=%s state=%s reason=%s",
                    *(self.topic, self.remote, ",".join(map(str, numbers)), state.value, reason),
                )
        self._is_kept |= bool(kept)
        if self._is_kept and all(each.state in CONNECTED for each in self.partitions):
            self._is_kept = False
            log.info("replication: copied again topic=%s remote=%s", self.topic, self.remote)
        self._said = {key: at for key, at in self._said.items() if key in kept}
        return bool(changed)


def _by_number(ids: Sequence[int]) -> dict[int, int]:
    return {number: topic_id for number, topic_id in enumerate(ids) if topic_id}
