"""Copying as a driver would have it done, without one: sites, and what is copied between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

from msgspec.structs import replace

from sava.client.errors import ClientError
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.options import TopicPartition
from sava.pipeline.replicate import copying
from sava.pipeline.replicate.copying import copy, copy_together
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand, LinkEnds, TargetCluster
from sava.pipeline.source.planning import SegmentHistory
from sava.records import Message, Origin, RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from tests.patience import PATIENCE_S

T = TypeVar("T")


def eventually(ask: Callable[[], T]) -> T:
    """A broker that has just been started answers after some attempts."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except ClientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Site:
    """A cluster that runs, as its clients see it."""

    def __init__(self, name: str, access: ClusterAccess) -> None:
        self.name = name
        self.access = access
        self.cluster_id = eventually(TargetCluster.of(access).hello).cluster_id

    def close(self) -> None:
        TargetCluster.of(self.access).close()
        ClusterClient.of(self.access).close()

    @property
    def link(self) -> ClusterClient:
        return ClusterClient.of(self.access)

    def create(self, topic: str) -> int:
        """Its id."""
        target = TargetCluster.of(self.access)
        shape = eventually(lambda: target.ensure_topic(topic, partitions=0, cluster=self.name))
        return int(shape.topic_ids[0])

    def publish(self, topic: str, messages: list[Message]) -> None:
        self.link.publish(topic, iter([RecordBatch.from_messages(messages)]))

    def extent(self, topic: str) -> PartitionExtent:
        return self.link.extents([topic])[topic]

    def stored(self, topic: str) -> None:
        """Until everything is in segments."""
        deadline = time.monotonic() + PATIENCE_S
        while (extent := self.extent(topic)).stored < extent.end:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def messages(self, topic: str) -> list[Message]:
        extent = self.extent(topic)
        batches = self.link.read(topic, extent.start, extent.end)
        return [message for batch in batches for message in batch.messages()]


class Copier:
    """One link, one topic, planned anew in each round as a driver would."""

    def __init__(self, source: Site, target: Site, topic: str, *, forward: bool = False) -> None:
        self.source, self.target, self.topic = source, target, topic
        self.forward = forward
        self.topic_id, self.target_topic_id = source.create(topic), target.create(topic)
        self.ends = LinkEnds(
            source=source.access,
            source_name=source.name,
            source_id=source.cluster_id,
            target=target.access,
            target_name=target.name,
            target_id=target.cluster_id,
        )
        self.position = 0

    def errand(self, *, from_tail: bool = False, begin: int | None = 0) -> Errand:
        extent, history = self.source.extent(self.topic), SegmentHistory(self.source.link)
        start = min(self.position, extent.end)
        stored = start if from_tail else extent.stored
        pieces = history.pieces(TopicPartition(self.topic, 0), self.topic, start, extent.end, stored=stored)
        subject = self.source.link.partitions(self.topic).schema_subject
        return Errand(
            name=self.topic,
            topic_id=self.topic_id,
            target_topic_id=self.target_topic_id,
            subject=subject,
            begin=begin,
            end=extent.end,
            pieces=tuple(pieces),
            store_url=history.store_url,
            forward=self.forward,
        )

    def share(self, budget: float = 5.0, *, from_tail: bool = False) -> CopyShare:
        return CopyShare(ends=self.ends, errands=(self.errand(from_tail=from_tail),), budget_s=budget)

    def round(self, budget: float = 5.0, *, from_tail: bool = False) -> CopyOutcome:
        (outcome,) = copy(self.share(budget, from_tail=from_tail))
        self.position = outcome.position if outcome.is_known else self.position
        return outcome

    def finish(self, budget: float = 5.0, *, from_tail: bool = False) -> int:
        """Rounds until the end, whatever passes on the way; how many messages were appended."""
        deadline = time.monotonic() + 5 * PATIENCE_S
        appended = 0
        while self.position < self.source.extent(self.topic).end:
            outcome = self.round(budget, from_tail=from_tail)
            assert not outcome.code or outcome.may_pass, outcome
            assert time.monotonic() < deadline, outcome
            appended += outcome.messages
        return appended

    def expected(self, messages: list[Message]) -> list[Message]:
        """As they must be at the target, if all were published at the source from offset 0 on."""
        ours = {PATH: self.source.name, ORIGIN_TOPIC: origin_topic(self.source.cluster_id, self.topic_id)}
        return [
            replace(
                message,
                attributes={**message.attributes, **ours},
                origin=Origin(self.source.name, offset),
                offset=None,
                topic=None,
            )
            for offset, message in enumerate(messages)
        ]


class Several:
    """Topics of one link that have little to copy, in one share."""

    def __init__(self, source: Site, target: Site, topics: Sequence[str]) -> None:
        self.copiers = [Copier(source, target, topic) for topic in topics]
        self.together = 0
        """Errands that were not copied one by one."""

    def share(self, budget: float = 5.0) -> CopyShare:
        errands = tuple(
            copier.errand(from_tail=True, begin=None if copier.position else 0) for copier in self.copiers
        )
        return CopyShare(ends=self.copiers[0].ends, errands=errands, budget_s=budget, is_light=True)

    def round(self, budget: float = 5.0) -> list[CopyOutcome]:
        return self.copy(self.share(budget))

    def copy(self, share: CopyShare) -> list[CopyOutcome]:
        with mock.patch.object(copying, "copy_together", self._copied_together):
            outcomes = copy(share)
        for copier, outcome in zip(self.copiers, outcomes, strict=True):
            copier.position = outcome.position if outcome.is_known else copier.position
        return outcomes

    def _copied_together(self, ends: LinkEnds, errands: Sequence[Errand], *, until: float) -> Any:
        found = copy_together(ends, errands, until=until)
        self.together += len(found)
        return found

    def finish(self) -> None:
        """Rounds until the end, whatever passes on the way."""
        deadline = time.monotonic() + 60
        while any(each.position < each.source.extent(each.topic).end for each in self.copiers):
            outcomes = self.round()
            assert all(not outcome.code or outcome.may_pass for outcome in outcomes), outcomes
            assert time.monotonic() < deadline, outcomes


def bare(messages: list[Message]) -> list[Message]:
    """Without their place here."""
    return [replace(message, offset=None, topic=None) for message in messages]


def payloads(messages: list[Message]) -> list[str]:
    return [message.payload.decode() for message in messages]


def numbered(prefix: str, start: int, end: int, **attributes: str) -> list[Message]:
    """Some with keys, some with attributes of their own."""
    return [
        Message(
            f"{prefix}-{number}".encode(),
            f"k{number % 7}" if number % 3 else None,
            {**({"n": str(number)} if number % 5 == 0 else {}), **attributes},
            1_000_000 + number,
        )
        for number in range(start, end)
    ]
