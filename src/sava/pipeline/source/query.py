"""The readers of the source, as Spark calls them, and the state of a running stream on the driver.

A ``Query`` has the partitions of a stream, their ends, and its position.

One thread owns it, the one in which Spark calls the reader; topic look-ups and progress reports run in
threads beside it. Topics are looked up again every few seconds: partitions are added, and new topics match a
pattern.

The query merges the answers of brokers and keeps the last known end of a partition whose broker is down, so
that the other partitions continue.

A ``BatchReader`` reads a range of offsets that is fixed when Spark plans the query.

Spark makes two ``StreamReader``s. One lives on the driver, in a process of its own, for as long as the query:
it answers for offsets and partitions and keeps a ``Query``. Executors get the other one for its ``read``
only.

Spark asks for the latest offset a hundred times a second when nothing comes. So the answer waits until there
are messages, or until a timeout. The timeout grows while nothing happens and is short after a batch: with
several sources in a query each one waits while the others have messages. Spark stops a query without regard
to that wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sava.client.errors import TopicUnknown
from sava.errors import CallerError, SavaError
from sava.pipeline.cluster import ClusterClient, PartitionExtent
from sava.pipeline.errors import CREATED_AGAIN, DELETED, TOPIC_GONE, DataLost, SourceRefused
from sava.pipeline.options import (
    Positions,
    SourceOptions,
    TopicChoice,
    TopicPartition,
    partition_name,
    to_offsets,
    to_positions,
)
from sava.pipeline.source.columns import Choice, Conditions
from sava.pipeline.source.planning import (
    Piece,
    ReadTask,
    SegmentHistory,
    admit,
    begins_at_end,
    read_tasks,
    resolve,
)
from sava.pipeline.source.reading import TaskReader
from sava.schemas.bounds import Pattern

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

log = logging.getLogger(__name__)

REFRESH_S: Final = 3.0


class BackgroundTask:
    """Work in a thread beside the query: one run at a time, at most every ``every_s``. A failure does not
    stop the query; the next run tries again."""

    def __init__(self, what: str, work: Callable[[], object], *, every_s: float) -> None:
        self._what = what
        self._work = work
        self._every_s = every_s
        self._due = 0.0
        self._running: threading.Thread | None = None

    def poke(self) -> None:
        """Start a run if it is due."""
        if time.monotonic() >= self._due and (self._running is None or not self._running.is_alive()):
            self._due = time.monotonic() + self._every_s
            self._running = threading.Thread(target=self._run, name=f"sava {self._what}", daemon=True)
            self._running.start()

    def finish(self, timeout_s: float) -> None:
        """Start a run now and wait for its end, at most ``timeout_s``."""
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
            # The next run will be refused too: the user has to act.
            log.warning("source: cannot %s: %s", self._what, error)
        except SavaError as error:
            log.info("source: cannot %s: %s", self._what, error)


class QueryTopics:
    """The partitions that one query reads."""

    def __init__(self, cluster: ClusterClient, choice: TopicChoice) -> None:
        self._cluster = cluster
        self._choice = choice
        self._names: Mapping[TopicPartition, str] = {}
        self.refreshing = BackgroundTask("look up topics", self.look_up, every_s=REFRESH_S)

    @property
    def names(self) -> Mapping[TopicPartition, str]:
        """The partitions and their names at the brokers."""
        return self._names

    def look_up(self) -> Mapping[TopicPartition, str]:
        """Raises TopicUnknown, SourceRefused, Unavailable."""
        names = self._matching() if self._choice.pattern else self._named()
        # A partition stays: a query that has read from it decides what its deletion means.
        self._names = {**self._names, **names}
        return self._names

    def forget_deleted(self) -> list[TopicPartition]:
        """Remove the partitions of deleted topics, and return them."""
        gone = []
        for topic in dict.fromkeys(part.topic for part in self._names):
            try:
                self._cluster.partitions(topic)
            except TopicUnknown:
                gone += [part for part in self._names if part.topic == topic]
        self._names = {part: name for part, name in self._names.items() if part not in gone}
        return gone

    def subjects(self) -> dict[str, str]:
        """The schema subject of each topic; empty for none."""
        topics = dict.fromkeys(part.topic for part in self.look_up())
        return {topic: self._cluster.partitions(topic).schema_subject for topic in topics}

    def _named(self) -> dict[TopicPartition, str]:
        names: dict[TopicPartition, str] = {}
        for topic in self._choice.names:
            try:
                found = self._cluster.partitions(topic)
            except TopicUnknown:
                if any(part.topic == topic for part in self._names):
                    continue
                raise SourceRefused(f"there is no topic {topic}: create it, or name another one") from None
            if not found.reliable:
                raise SourceRefused(f"topic {topic} is non-reliable: its messages are not kept for reading")
            for number, name in enumerate(found.names):
                names[TopicPartition(topic, number)] = name
        return names

    def _matching(self) -> dict[TopicPartition, str]:
        pattern = Pattern(self._choice.pattern)
        names: dict[TopicPartition, str] = {}
        for listed in self._cluster.topics():
            if listed.reliable and pattern.matches(listed.topic):
                for number in range(listed.partition_count or 1):
                    part = TopicPartition(listed.topic, number)
                    names[part] = partition_name(part, partitioned=listed.partition_count > 0)
        return names


SHORT_WAIT_S: Final = 0.1
LONG_WAIT_S: Final = 2.0
PAUSE_S: Final = 0.05
"""The pause when no broker answers, or no topic exists yet."""
BELIEVED_AFTER_S: Final = 15.0
"""A partition that ends earlier than before was created again, or a former owner answered that has not
noticed the new one. A former owner notices within this time."""
REPORT_EVERY_S: Final = 1.0


class Query:
    """A streaming query on the driver."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster = ClusterClient.of(options.access)
        self._topics = QueryTopics(self._cluster, options.topics)
        self._topics.look_up()
        self._history = SegmentHistory(self._cluster)
        self._beginning: dict[TopicPartition, int] | None = None
        self._is_beginning = begins_at_end(options.start)
        """True before the first batch of a stream that starts at the end of a topic."""
        self._extents: dict[TopicPartition, PartitionExtent] = {}
        self._shrunk: dict[TopicPartition, float] = {}
        """Since when a broker reports an end before the query's position."""
        self._target: Mapping[TopicPartition, int] | None = None
        """The end of a query that reads only what exists at its start."""
        self._wait_s = SHORT_WAIT_S
        self._done: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}
        self._report = BackgroundTask("report progress", self._report_progress, every_s=REPORT_EVERY_S)

    def beginning(self) -> dict[TopicPartition, int]:
        """The start of the stream, the same for as long as the query runs. Spark asks for it when it asks for
        the first batch's end, and again when it plans that batch; a message in between moves the end of the
        topic.

        A checkpoint holds only ends of batches. A query that is killed before its first batch is done asks
        again after the restart, when the end of the topic has moved. Therefore a stream that starts at the
        end has a first batch without messages: its end is the start, and Spark keeps it."""
        if self._beginning is None:
            self._beginning = resolve(
                self._cluster, self._options.start, self._topics.names, "startingOffsets"
            )
        return self._beginning

    def stop_at_present_end(self) -> None:
        names = self._topics.look_up()
        found = self._cluster.extents(list(names.values()))
        self._extents = {part: found[name] for part, name in names.items()}
        self._target = self.ends()

    def ends(self) -> dict[TopicPartition, int]:
        return {part: extent.end for part, extent in self._extents.items()}

    def committed(self) -> None:
        """A batch is done: more may come soon, here or at another source of the same query."""
        self._wait_s = SHORT_WAIT_S

    # -- how far -----------------------------------------------------------------------------

    def advance(
        self, start: Mapping[TopicPartition, int], *, max_messages: int | None, max_bytes: int | None
    ) -> dict[TopicPartition, int]:
        """The end of the next batch, or ``start`` if there are no messages. Everything before ``start`` is
        done."""
        self._done = dict(start)
        if self._target is None:
            self._topics.refreshing.poke()
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

    def _begin(self, part: TopicPartition, start: Mapping[TopicPartition, int], end: int) -> int:
        """The start of a partition's next batch; a new partition starts at its first retained offset."""
        begin = start.get(part)
        if begin is None:
            return self._extents[part].start
        if begin <= end:
            return begin
        if not (self._is_believed(part) if self._target is None else self._has_shrunk(part, begin)):
            return end
        return self._lost(part, begin, end, self._extents[part].start, CREATED_AGAIN)

    def _watch(self, start: Mapping[TopicPartition, int]) -> None:
        """Wait until there are messages beyond ``start``, or the timeout is over."""
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
            # An answer without news may come at once; do not spin.
            time.sleep(max(0.0, min(PAUSE_S, self._wait_s - (time.monotonic() - began))))
            self._wait_s = min(2 * self._wait_s, LONG_WAIT_S)

    def _extents_beyond(
        self, beyond: Mapping[str, int], start: Mapping[TopicPartition, int]
    ) -> Mapping[str, PartitionExtent]:
        try:
            return self._cluster.wait_beyond(beyond, timeout_s=self._wait_s) if beyond else {}
        except TopicUnknown:
            for part in self._topics.forget_deleted():
                begin, known = start.get(part, 0), self._extents.pop(part, None)
                self._lost(part, begin, known.end if known is not None else begin, begin, TOPIC_GONE)
            return {}

    def _known_end(self, part: TopicPartition) -> int:
        known = self._extents.get(part)
        return known.end if known is not None else 0

    def _note(self, part: TopicPartition, extent: PartitionExtent, least: int) -> None:
        if extent.end >= least:
            self._shrunk.pop(part, None)
            self._extents[part] = extent
            return
        self._shrunk.setdefault(part, time.monotonic())
        if self._is_believed(part) or part not in self._extents:
            self._extents[part] = extent

    def _is_believed(self, part: TopicPartition) -> bool:
        since = self._shrunk.get(part)
        return since is not None and time.monotonic() - since > BELIEVED_AFTER_S

    def _has_shrunk(self, part: TopicPartition, begin: int) -> bool:
        """``_is_believed`` for a query that reads only what exists, which is asked once."""
        name = self._topics.names[part]
        deadline = time.monotonic() + BELIEVED_AFTER_S
        while True:
            self._extents[part] = self._cluster.extents([name])[name]
            if self._extents[part].end >= begin:
                return False
            if time.monotonic() > deadline:
                return True
            time.sleep(SHORT_WAIT_S)

    # -- what to read ------------------------------------------------------------------------

    def plan(self, start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> list[ReadTask]:
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
                continue  # the first batch again: it ends at the start of the stream
            if first > stop:
                first = self._lost(part, first, stop, extent.start, CREATED_AGAIN)
            elif first < extent.start:
                first = self._lost(part, first, min(extent.start, stop), extent.start, DELETED)
            if first < stop:
                stored = extent.stored if extent.end >= stop else None
                pieces += self._history.pieces(part, names[part], first, stop, stored=stored)
        return read_tasks(pieces, self._history.store_url, min_partitions=self._options.min_partitions)

    def _names(self, parts: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, str]:
        names = self._topics.names
        return names if parts.keys() <= names.keys() else self._topics.look_up()

    def _learn_extents(self, parts: list[TopicPartition]) -> None:
        """Ask for unknown extents: after a restart Spark first repeats the last batch."""
        names = self._topics.names
        unknown = [part for part in parts if part not in self._extents]
        if unknown:
            found = self._cluster.extents([names[part] for part in unknown])
            self._extents.update((part, found[names[part]]) for part in unknown)

    def _lost(self, part: TopicPartition, start: int, end: int, kept: int, why: str) -> int:
        """The offset to continue at. Raises DataLost unless the user has disabled that."""
        if self._options.fail_on_data_loss:
            raise DataLost(part, start, end, why)
        log.warning("source: %s: offsets %s to %s are skipped: %s", part, start, end, why)
        return kept

    # -- progress ----------------------------------------------------------------------------

    def _report_soon(self, *, is_last: bool) -> None:
        if not self._options.subscription or self._done == self._reported:
            return
        if is_last:
            # Spark ends the process together with the query.
            self._report.finish(self._options.access.timeout_s)
        else:
            self._report.poke()

    def _report_progress(self) -> None:
        names = self._topics.names
        for part, offset in self._done.items():
            if self._reported.get(part) != offset and part in names:
                self._cluster.advance(names[part], self._options.subscription, offset)
                self._reported[part] = offset


class BatchReader(DataSourceReader):
    """A range of offsets as a table. Spark pickles it before ``partitions``: it holds only values."""

    def __init__(self, options: SourceOptions, choice: Choice, decoder: Decoder | None) -> None:
        self._options = options
        self._choice = choice
        self._decoder = decoder
        self._conditions = Conditions()

    def partitions(self) -> list[InputPartition]:
        options, conditions = self._options, self._conditions
        cluster = ClusterClient.of(options.access)
        names = QueryTopics(cluster, options.topics).look_up()
        starts = resolve(cluster, options.start, names, "startingOffsets")
        ends = resolve(cluster, options.end, names, "endingOffsets")
        extents = cluster.extents(list(names.values()))
        history = SegmentHistory(cluster)
        pieces: list[Piece] = []
        for part, name in names.items():
            if not conditions.accept(part):
                continue
            start, end = max(starts[part], conditions.offset.start), min(ends[part], conditions.offset.end)
            start = self._kept(part, start, end, extents[name].start)
            if start < end:
                pieces += history.pieces(part, name, start, end, times=conditions.times)
        # Spark makes one task of an empty list, with a partition of its own.
        return [*read_tasks(pieces, history.store_url, min_partitions=options.min_partitions)] or [
            ReadTask((), "")
        ]

    def _kept(self, part: TopicPartition, start: int, end: int, kept: int) -> int:
        """The first offset to read. Only offsets that the user gave by number can be lost."""
        if start >= kept or start >= end:
            return start
        lost = min(kept, end)
        if not isinstance(self._options.start, Mapping):
            return kept
        if self._options.fail_on_data_loss:
            raise DataLost(part, start, lost, DELETED)
        log.warning("source: %s: offsets %s to %s are skipped: %s", part, start, lost, DELETED)
        return kept

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ReadTask)
        reader = TaskReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
            times=self._conditions.times,
        )
        return reader.read(partition)


class FilteringReader(BatchReader):
    """A BatchReader with filters. It is a class of its own because Spark refuses a reader with
    ``pushFilters`` unless ``spark.sql.python.filterPushdown.enabled`` is set."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._conditions, left = self._conditions.push(filters)
        return left


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Topics as an unbounded table."""

    def __init__(self, options: SourceOptions, choice: Choice, decoder: Decoder | None) -> None:
        self._options = options
        self._choice = choice
        self._decoder = decoder
        self._started: Query | None = None

    @property
    def _query(self) -> Query:
        if self._started is None:
            self._started = Query(self._options)
        return self._started

    # -- on the driver ---------------------------------------------------------------------

    def initialOffset(self) -> Positions:  # noqa: N802
        return to_positions(self._query.beginning())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._query.stop_at_present_end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark passes one limit to ``latestOffset``; the options hold the other."""
        options = self._options
        if options.max_messages is not None:
            return ReadMaxRows(options.max_messages)
        return ReadMaxBytes(options.max_bytes) if options.max_bytes is not None else ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Mapping[str, int]], limit: ReadLimit) -> Positions:  # noqa: N802
        max_messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if not isinstance(limit, ReadAllAvailable):
            max_bytes = max_bytes or self._options.max_bytes
        return to_positions(
            self._query.advance(to_offsets(start), max_messages=max_messages, max_bytes=max_bytes)
        )

    def reportLatestOffset(self) -> Positions | None:  # noqa: N802
        return to_positions(self._query.ends()) or None

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        return [*self._query.plan(to_offsets(start), to_offsets(end))]

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        self._query.committed()

    # -- on executors ----------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ReadTask)
        reader = TaskReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
        )
        return reader.read(partition)
