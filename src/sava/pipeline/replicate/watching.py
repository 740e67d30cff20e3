"""Beside a link, at the cluster that sends: how far partitions reach, and what their messages' times are.

Each is the work of one beat. What to look at is handed over as one value, what was found is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from sava.client.errors import Closed, TopicUnknown
from sava.errors import SavaError
from sava.pipeline.link import Extent, Link
from sava.pipeline.positions import Part, part_name
from sava.pipeline.replicate.partitions import PartitionState

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
"""Have something done by the thread of the link."""

WATCH_S: Final = 1.0
PAUSE_S: Final = 0.01
"""Between answers, and a little for each partition: a topic that grows all the time is not asked all the
time."""
IDLE_S: Final = 0.2
GONE_S: Final = 2.0
"""A partition that a broker does not know is asked for again after that."""
ASK_S: Final = 1.0


class Watching:
    """The ends of partitions, as soon as one of them has grown."""

    def __init__(
        self, link: Link, tell: Callable[[Mapping[str, Extent], Mapping[str, PartitionState]], None]
    ) -> None:
        self.watched: Mapping[str, PartitionState] = {}
        """By name. Set by the thread of the link."""
        self._link = link
        self._tell = tell
        self._ends: dict[str, int] = {}
        self._gone: dict[str, float] = {}

    def work(self) -> float:
        now = time.monotonic()
        watched = self.watched
        self._gone = {name: at for name, at in self._gone.items() if now - at < GONE_S}
        beyond = {name: self._ends.get(name, -1) for name in watched if name not in self._gone}
        if not beyond:
            return IDLE_S
        try:
            found = self._link.wait_beyond(beyond, timeout_s=WATCH_S)
        except TopicUnknown:
            self._look_for_gone(beyond)
            return IDLE_S
        except Closed:
            return WATCH_S  # the process ends
        except SavaError as error:
            log.warning("replication: ends are not known error=%s", error)
            return WATCH_S
        self._ends = {name: end for name, end in self._ends.items() if name in watched}
        self._ends |= {name: extent.end for name, extent in found.items()}
        self._tell(found, watched)
        return PAUSE_S + len(beyond) / 10_000

    def _look_for_gone(self, names: Mapping[str, int]) -> None:
        """Which do not exist any more. That they are not wanted either, the cluster says soon."""
        try:
            listed = self._link.topics()
        except SavaError as error:
            log.info("replication: topics are not known error=%s", error)
            return
        there_are = {
            part_name(Part(each.topic, number), partitioned=each.partition_count > 0)
            for each in listed
            for number in range(each.partition_count or 1)
        }
        now = time.monotonic()
        for name in names:
            if name not in there_are:
                self._gone[name] = now
                self._ends.pop(name, None)


class Question(NamedTuple):
    """About a partition: when an offset was published; or, if ``publish_us`` is given, which one was then."""

    partition: PartitionState
    offset: int = 0
    publish_us: int | None = None


class Asking:
    """Questions about single messages, a few at a time."""

    def __init__(self, link: Link, post: Post) -> None:
        self.questions: Sequence[Question] = ()
        """Set by the thread of the link when there are none."""
        self._link = link
        self._post = post

    def work(self) -> float:
        for question in self.questions:
            try:
                self._answer(question)
            except SavaError as error:
                log.info("replication: not known topic=%s error=%s", question.partition.name, error)
        self.questions = ()
        return ASK_S

    def _answer(self, question: Question) -> None:
        partition, offset = question.partition, question.offset
        if question.publish_us is not None:
            found = self._link.offset_at(partition.name, question.publish_us)
            self._post(partial(partition.start_at, found))
            return
        for batch in self._link.read(partition.name, offset, offset + 1):
            self._post(partial(partition.note_time, offset, batch.header.min_publish_time))
