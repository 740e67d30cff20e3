"""Topics: which partitions a query reads. They are looked up again now and then: topics grow, and new ones
match."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from sava.client.errors import TopicUnknown
from sava.errors import CallerError, SavaError
from sava.pipeline.link import Link
from sava.pipeline.options import TopicChoice
from sava.pipeline.positions import Part, part_name
from sava.pipeline.source.errors import SourceRefused

log = logging.getLogger(__name__)

REFRESH_S: Final = 3.0


class Errand:
    """Work beside the query: at most one at a time and not more often than ``every_s``. That it fails is no
    reason for the query to stop; it will be tried again."""

    def __init__(self, what: str, work: Callable[[], object], *, every_s: float) -> None:
        self._what = what
        self._work = work
        self._every_s = every_s
        self._due = 0.0
        self._running: threading.Thread | None = None

    def poke(self) -> None:
        """Begin if it is due."""
        if time.monotonic() >= self._due and (self._running is None or not self._running.is_alive()):
            self._due = time.monotonic() + self._every_s
            self._running = threading.Thread(target=self._run, name=f"sava {self._what}", daemon=True)
            self._running.start()

    def finish(self, timeout_s: float) -> None:
        """Do it now, whether it is due or not, and wait for it a little."""
        if self._running is not None:
            self._running.join(timeout_s)
        self._due = 0.0
        self.poke()
        if self._running is not None:
            self._running.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        except CallerError as error:
            # It will be refused again, and somebody has to know.
            log.warning("source: cannot %s: %s", self._what, error)
        except SavaError as error:
            log.info("source: cannot %s: %s", self._what, error)


class Topics:
    """Of one query, on the driver."""

    def __init__(self, link: Link, choice: TopicChoice) -> None:
        self._link = link
        self._choice = choice
        self._names: Mapping[Part, str] = {}
        self._refresh = Errand("look up topics", self.look_up, every_s=REFRESH_S)

    @property
    def names(self) -> Mapping[Part, str]:
        """The partitions, and what brokers call them."""
        return self._names

    def look_up(self) -> Mapping[Part, str]:
        """Raises TopicUnknown, SourceRefused, Unavailable."""
        names = self._matching() if self._choice.pattern else self._named()
        # A partition stays: a query that has read from it decides itself what its end means.
        self._names = {**self._names, **names}
        return self._names

    def refresh(self) -> None:
        """Soon, and beside the query."""
        self._refresh.poke()

    def forget_deleted(self) -> list[Part]:
        """Partitions of topics that do not exist any more; they are not read from now on."""
        gone = []
        for topic in dict.fromkeys(part.topic for part in self._names):
            try:
                self._link.parts(topic)
            except TopicUnknown:
                gone += [part for part in self._names if part.topic == topic]
        self._names = {part: name for part, name in self._names.items() if part not in gone}
        return gone

    def subjects(self) -> dict[str, str]:
        """The schema that each topic follows; empty for none."""
        topics = dict.fromkeys(part.topic for part in self.look_up())
        return {topic: self._link.parts(topic).schema_subject for topic in topics}

    def _named(self) -> dict[Part, str]:
        names: dict[Part, str] = {}
        for topic in self._choice.names:
            try:
                found = self._link.parts(topic)
            except TopicUnknown:
                if any(part.topic == topic for part in self._names):
                    continue
                raise SourceRefused(f"there is no topic {topic}: create it, or name another one") from None
            if not found.reliable:
                raise SourceRefused(f"topic {topic} is non-reliable: its messages are not kept for reading")
            for number, name in enumerate(found.names):
                names[Part(topic, number)] = name
        return names

    def _matching(self) -> dict[Part, str]:
        pattern = re.compile(self._choice.pattern)
        names: dict[Part, str] = {}
        for listed in self._link.topics():
            if listed.reliable and pattern.fullmatch(listed.topic):
                for number in range(listed.partition_count or 1):
                    part = Part(listed.topic, number)
                    names[part] = part_name(part, partitioned=listed.partition_count > 0)
        return names
