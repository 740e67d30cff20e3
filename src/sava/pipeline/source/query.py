"""Topics: which partitions a query reads. They are looked up again now and then: topics grow, and new ones
match.

Query: what the driver knows of a running stream: its partitions, how far they reach, and where it stands.

Owned by the one thread in which Spark calls the reader; look-ups and progress reports run beside it.

What brokers say is merged, never forgotten: one that is down leaves the last known end, and the query goes on
with the other partitions.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from sava.client.errors import TopicUnknown
from sava.errors import CallerError, SavaError
from sava.pipeline.errors import CREATED_ANEW, DELETED, TOPIC_GONE, DataLost, SourceRefused
from sava.pipeline.link import Extent, Link
from sava.pipeline.options import Part, SourceOptions, TopicChoice, part_name
from sava.pipeline.source.planning import History, Piece, Share, admit, begins_at_end, resolve, shares

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


SHORT_WAIT_S: Final = 0.1
LONG_WAIT_S: Final = 2.0
PAUSE_S: Final = 0.05
"""When no broker can be reached, or there is no topic yet."""
BELIEVED_AFTER_S: Final = 15.0
"""A partition that ends earlier than before was created anew, or its former owner, which has not noticed yet
that it is one, has answered. Such an owner notices within this time."""
REPORT_EVERY_S: Final = 1.0


class Query:
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._link = Link.of(options.access)
        self._topics = Topics(self._link, options.topics)
        self._topics.look_up()
        self._history = History(self._link)
        self._beginning: dict[Part, int] | None = None
        self._is_beginning = begins_at_end(options.start)
        """Until the first batch of a stream that begins at the end of a topic."""
        self._extents: dict[Part, Extent] = {}
        self._shrunk: dict[Part, float] = {}
        """Since when a partition is said to end before where the query is."""
        self._target: Mapping[Part, int] | None = None
        """Where a query ends that reads what is there."""
        self._wait_s = SHORT_WAIT_S
        self._done: dict[Part, int] = {}
        self._reported: dict[Part, int] = {}
        self._report = Errand("report progress", self._report_progress, every_s=REPORT_EVERY_S)

    def beginning(self) -> dict[Part, int]:
        """The same for as long as the query runs: Spark asks for the first batch's end, and again for its
        beginning when it is planned. A message that comes in between has moved the end of the topic.

        A checkpoint holds ends of batches only, so a query that is killed before its first batch is done asks
        anew, and the end of the topic has moved on. Therefore a stream that begins there has a first batch
        without messages: its end is the beginning, and is kept."""
        if self._beginning is None:
            self._beginning = resolve(self._link, self._options.start, self._topics.names, "startingOffsets")
        return self._beginning

    def stop_at_present_end(self) -> None:
        names = self._topics.look_up()
        found = self._link.extents(list(names.values()))
        self._extents = {part: found[name] for part, name in names.items()}
        self._target = self.ends()

    def ends(self) -> dict[Part, int]:
        return {part: extent.end for part, extent in self._extents.items()}

    def committed(self) -> None:
        """A batch was done: there may be more soon, here or at another source of the same query."""
        self._wait_s = SHORT_WAIT_S

    # -- how far -----------------------------------------------------------------------------

    def advance(
        self, start: Mapping[Part, int], *, max_messages: int | None, max_bytes: int | None
    ) -> dict[Part, int]:
        """The end of the next batch; ``start`` when there is nothing. Everything before ``start`` is done."""
        self._done = dict(start)
        if self._target is None:
            self._topics.refresh()
            self._watch(start)
            ends = self.ends()
        else:
            ends = dict(self._target)
        if self._is_beginning and start == self._beginning:
            self._is_beginning = False
            return dict(start)
        begins = {part: self._begin(part, start, end) for part, end in ends.items()}
        names = self._topics.names
        admitted = admit(
            {part: end - begins[part] for part, end in ends.items()},
            max_messages=max_messages,
            max_bytes=max_bytes,
            message_bytes=lambda part: self._history.message_bytes(
                names[part], begins[part], ends[part], stored=self._extents[part].stored
            ),
        )
        self._report_soon(is_last=self._target is not None and not admitted)
        return {**start, **{part: begins[part] + count for part, count in admitted.items()}}

    def _begin(self, part: Part, start: Mapping[Part, int], end: int) -> int:
        """Where the next batch of a partition begins: new ones at what is kept."""
        begin = start.get(part)
        if begin is None:
            return self._extents[part].start
        if begin <= end:
            return begin
        if not (self._is_believed(part) if self._target is None else self._has_shrunk(part, begin)):
            return end
        return self._lost(part, begin, end, self._extents[part].start, CREATED_ANEW)

    def _watch(self, start: Mapping[Part, int]) -> None:
        """Until there is something beyond ``start``, or the patience is over."""
        names = self._topics.names
        parts = {name: part for part, name in names.items()}
        began = time.monotonic()
        beyond = {name: start.get(part, self._known_end(part)) for name, part in parts.items()}
        found = self._extents_beyond(beyond, start)
        has_more = False
        for name, extent in found.items():
            has_more |= extent.end > beyond[name]
            self._note(parts[name], extent, max(beyond[name], self._known_end(parts[name])))
        if not has_more:
            # An answer that says nothing may come at once.
            time.sleep(max(0.0, min(PAUSE_S, self._wait_s - (time.monotonic() - began))))
            self._wait_s = min(2 * self._wait_s, LONG_WAIT_S)

    def _extents_beyond(self, beyond: Mapping[str, int], start: Mapping[Part, int]) -> Mapping[str, Extent]:
        try:
            return self._link.wait_beyond(beyond, timeout_s=self._wait_s) if beyond else {}
        except TopicUnknown:
            for part in self._topics.forget_deleted():
                begin, known = start.get(part, 0), self._extents.pop(part, None)
                self._lost(part, begin, known.end if known is not None else begin, begin, TOPIC_GONE)
            return {}

    def _known_end(self, part: Part) -> int:
        known = self._extents.get(part)
        return known.end if known is not None else 0

    def _note(self, part: Part, extent: Extent, least: int) -> None:
        if extent.end >= least:
            self._shrunk.pop(part, None)
            self._extents[part] = extent
            return
        self._shrunk.setdefault(part, time.monotonic())
        if self._is_believed(part) or part not in self._extents:
            self._extents[part] = extent

    def _is_believed(self, part: Part) -> bool:
        since = self._shrunk.get(part)
        return since is not None and time.monotonic() - since > BELIEVED_AFTER_S

    def _has_shrunk(self, part: Part, begin: int) -> bool:
        """The same for a query that ends with what is there, and is asked once."""
        name = self._topics.names[part]
        deadline = time.monotonic() + BELIEVED_AFTER_S
        while True:
            self._extents[part] = self._link.extents([name])[name]
            if self._extents[part].end >= begin:
                return False
            if time.monotonic() > deadline:
                return True
            time.sleep(SHORT_WAIT_S)

    # -- what to read ------------------------------------------------------------------------

    def plan(self, start: Mapping[Part, int], end: Mapping[Part, int]) -> list[Share]:
        names = self._names(end)
        ranges = {part: (start.get(part), stop) for part, stop in end.items() if start.get(part) != stop}
        self._learn_extents([part for part in ranges if part in names])
        pieces: list[Piece] = []
        for part, (begin, stop) in ranges.items():
            if part not in names:
                self._lost(part, begin or 0, stop, stop, TOPIC_GONE)
                continue
            extent = self._extents[part]
            first = extent.start if begin is None else begin
            if first > stop and start == self._beginning:
                continue  # the first batch again, which ends where the stream began
            if first > stop:
                first = self._lost(part, first, stop, extent.start, CREATED_ANEW)
            elif first < extent.start:
                first = self._lost(part, first, min(extent.start, stop), extent.start, DELETED)
            if first < stop:
                stored = extent.stored if extent.end >= stop else None
                pieces += self._history.pieces(part, names[part], first, stop, stored=stored)
        return shares(pieces, self._history.store_url, min_partitions=self._options.min_partitions)

    def _names(self, parts: Mapping[Part, int]) -> Mapping[Part, str]:
        names = self._topics.names
        return names if parts.keys() <= names.keys() else self._topics.look_up()

    def _learn_extents(self, parts: list[Part]) -> None:
        """Of those that nothing is known of yet: after a restart Spark repeats the last batch first."""
        names = self._topics.names
        unknown = [part for part in parts if part not in self._extents]
        if unknown:
            found = self._link.extents([names[part] for part in unknown])
            self._extents.update((part, found[names[part]]) for part in unknown)

    def _lost(self, part: Part, start: int, end: int, kept: int, why: str) -> int:
        """Where to go on. Raises DataLost unless the user has said otherwise."""
        if self._options.fail_on_data_loss:
            raise DataLost(part, start, end, why)
        log.warning("source: %s: offsets %s to %s are skipped: %s", part, start, end, why)
        return kept

    # -- progress ----------------------------------------------------------------------------

    def _report_soon(self, *, is_last: bool) -> None:
        if not self._options.subscription or self._done == self._reported:
            return
        if is_last:
            # Spark ends the process with the query.
            self._report.finish(self._options.access.timeout_s)
        else:
            self._report.poke()

    def _report_progress(self) -> None:
        names = self._topics.names
        for part, offset in self._done.items():
            if self._reported.get(part) != offset and part in names:
                self._link.advance(names[part], self._options.subscription, offset)
                self._reported[part] = offset
