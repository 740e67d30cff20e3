"""LinkJob: one link at work.

Its own thread owns all state and never waits for a broker; whatever has to is done in threads beside it, each
with one kind of question, which hand over what they learned:

    control   what is to be copied (GetLink), and what has become of it (ReportLink)       here
    ends      how far the partitions reach, as soon as one has grown                       here
    asked     publish times, and offsets of times                                          here
    remote    who it is, what it has of the topics; topics are created and grown           at the remote
    acks      positions of replicated subscriptions                                        at both
    rounds    what is copied, as Spark jobs

There is no trigger and no interval: when a partition has grown, and is in no round, it is in the next one,
which begins at once. While rounds are under way the next one waits a moment, so that more come together.

**The end.** After ``stop`` nothing is planned; rounds that are under way come to their end, or are cancelled.
What may still happen after the end is harmless: a task that Spark could not stop appends at the source
position, or is refused; a topic that was being created is one that was to be created when it was decided.

The kind ``replicate``: a link to another cluster, made by policies.

remote:   the name of the remote
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sava.client.connection import Tls
from sava.client.errors import Unavailable
from sava.errors import SavaError
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.launch import brief
from sava.pipeline.replicate.acks import AckSync, SlotUpdater, SubscriptionName
from sava.pipeline.replicate.background import (
    DESCRIBE_S,
    AdminLinkControl,
    PeriodicThread,
    RemoteSecrets,
    RemoteVisitor,
    SourceWatcher,
    ends_of,
)
from sava.pipeline.replicate.partitions import LOOK_AGAIN, PartitionState, Throttle
from sava.pipeline.replicate.rounds import (
    CopyCandidate,
    CopyEngine,
    CopyRounds,
    RoundResult,
    choose,
    draft,
    ration,
)
from sava.pipeline.replicate.target import LinkEnds, TargetCluster
from sava.pipeline.replicate.topics import Creation, LinkTopicState, there
from sava.pipeline.runner.control import UNKNOWN_LAG
from sava.pipeline.runner.kinds import JobProgress, PipelineJob, PipelineKind, SettingsInvalid
from sava.proto import replica_pb2
from sava.proto import replication_pb2 as pb
from sava.replication.matrix import LinkState, Mismatch, Settings
from sava.security.secret_files import SecretFileRefused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

LINK_S: Final = 1.0
REPORT_S: Final = 1.0
SOON_S: Final = 0.2
"""Between reports, however much happens."""
SYNC_S: Final = 1.0
ASK_S: Final = 1.0
ADVANCE_S: Final = 5.0
READ_ACKS_S: Final = 10.0
ASKED: Final = 8
"""Questions in one go."""
GATHER_S: Final = 0.05
"""While a round is under way the next one begins so much later than the last."""
STEP_S: Final = 0.2
SHORTEST_STEP_S: Final = 0.01
LAST_REPORT_S: Final = 2.0
MAX_NEWS: Final = 256


class LinkJob(PipelineJob):
    def __init__(
        self,
        name: str,
        remote: str,
        runner: str,
        control: AdminLinkControl,
        engine: CopyEngine,
        source: ClusterAccess,
        remotes: RemoteSecrets | None = None,
    ) -> None:
        """Raises Refused: an address that is none."""
        self._name = name
        self._remote = remote
        self._runner = runner
        self._control = control
        self._engine = engine
        self._source_access = source
        self._secrets = remotes or RemoteSecrets()
        self._progress = JobProgress()
        self._end: str | None = None
        self._stop_wanted = threading.Event()
        self._stop_now = threading.Event()
        self._news: queue.Queue[Callable[[], None]] = queue.Queue(MAX_NEWS)
        self._ends: LinkEnds | None = None
        """None: nothing is known of the link yet."""
        self._settings = Settings(may_create=False, mismatch=Mismatch.PIP370)
        self._throttle = Throttle(0, time.monotonic())
        self._topics: dict[str, LinkTopicState] = {}
        self._under_way: dict[str, list[PartitionState]] = {}
        """By round."""
        self._failure: Exception | None = None
        self._cores = 1
        self._rows = self._rounds_done = self._errands_done = 0
        self._round_at = self._report_at = self._reported_at = 0.0
        self._report: pb.ReportLinkRequest | None = None
        """To be sent; None: it was."""
        self._link_at = 0.0
        self._replicated: Mapping[str, tuple[int, tuple[str, ...]]] = {}
        self._syncing: tuple[LinkEnds, AckSync] | None = None
        self._unsynced: Mapping[SubscriptionName, str] = {}
        self._source = ClusterClient.of(source)
        self._cursors = SlotUpdater(partial(self._source.advance_all, timeout_s=ADVANCE_S), remote)
        self._rounds = CopyRounds(
            name, engine, self._source, lambda done: self._post(partial(self._ended, done))
        )
        self._watching = SourceWatcher(self._source, lambda *found: self._post(partial(self._see, *found)))
        self._questions: Sequence[Callable[[], None]] = ()
        """Look-ups for the thread beside this one, which empties it."""
        self._visiting = RemoteVisitor(remote, TargetCluster.of, self._post, self)
        self._beats = {
            what: PeriodicThread(f"{what} of {name}", work, self._broken, ended)
            for what, work, ended in (
                ("control", self._talk, control.close),
                ("ends", self._watching.work, _nothing),
                ("asked", self._answer_questions, _nothing),
                ("remote", self._visiting.work, _nothing),
                ("acks", self._sync, self._end_sync),
            )
        }
        threading.Thread(target=self._run, name=f"pipeline {name}", daemon=True).start()

    # -- for the runner ------------------------------------------------------------------------

    @property
    def progress(self) -> JobProgress:
        return self._progress

    @property
    def end(self) -> str | None:
        return self._end

    def stop(self, *, now: bool) -> None:
        self._stop_wanted.set()
        if now:
            self._stop_now.set()

    # -- its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._cores = self._engine.cores
            for beat in self._beats.values():
                beat.start()
            self._work()
            end = ""
        except SavaError as error:
            end = str(error)
        except Exception as error:
            end = brief(error)
            log.exception("replication: the link has failed name=%s", self._name)
        self._wind_up()
        self._progress = self._progress._replace(rate=0.0)
        self._end = "" if self._stop_wanted.is_set() else end

    def _work(self) -> None:
        while not self._stop_wanted.is_set():
            self._hear(self._due_in())
            if self._failure is not None:
                raise self._failure
            if self._ends is not None:
                self._plan(self._ends)
                self._tell()

    def _wind_up(self) -> None:
        while self._rounds.is_any:
            if self._stop_now.is_set():
                self._rounds.stop()
            self._rounds.cancel_overdue(time.monotonic())
            self._hear(STEP_S)
        self._hear(0.0)
        if not self._stop_now.is_set() and self._failure is None:
            self._report_last()
        for beat in self._beats.values():
            beat.close()
        self._rounds.close()
        threading.Thread(target=self._cursors.close, name=f"end of {self._name}", daemon=True).start()

    def _post(self, news: Callable[[], None]) -> None:
        """From another thread. When the event loop no longer listens, the news is of no interest."""
        while self._end is None:
            try:
                self._news.put(news, timeout=STEP_S)
                return
            except queue.Full:
                continue

    def _hear(self, timeout_s: float) -> None:
        try:
            news = self._news.get(timeout=timeout_s) if timeout_s > 0 else self._news.get_nowait()
            while True:
                news()
                news = self._news.get_nowait()
        except queue.Empty:
            return

    def _broken(self, error: Exception) -> None:
        """A thread beside this one has met what it did not expect, or what will not pass."""

        def fail() -> None:
            self._failure = self._failure or error

        self._post(fail)

    @property
    def _partitions(self) -> Iterable[PartitionState]:
        return (partition for topic in self._topics.values() for partition in topic.partitions)

    # -- what is to be copied ------------------------------------------------------------------

    def _follow(self, link: pb.Link) -> None:
        now = time.monotonic()
        self._settings = Settings(may_create=link.may_create, mismatch=Mismatch(link.mismatch_policy))
        self._throttle.set(link.remote.max_rate, now)
        try:
            ends = ends_of(link, self._source_access, self._secrets)
        except SecretFileRefused:
            if self._ends is None:
                raise
            return  # a file that is being replaced; the link continues with what it has
        is_same = self._ends is not None and self._ends.target_id == ends.target_id
        self._ends = self._visiting.ends = ends
        before, self._topics = self._topics if is_same else {}, {}
        for listed in link.topics:
            topic = before.pop(listed.topic, None)
            if topic is not None and topic.is_about(listed):
                if listed.generation > topic.listed.generation:
                    for partition in topic.partitions:
                        self._cursors.begin_again(partition.name)
                if topic.follow(listed, now):
                    self._describe_soon()
            else:
                self._forget(topic)
                topic = LinkTopicState(listed, self._remote, throttle=self._throttle, now=now)
                self._describe_soon()
            self._topics[listed.topic] = topic
        for gone in before.values():
            self._forget(gone)
        self._hand_over()

    def _forget(self, topic: LinkTopicState | None) -> None:
        for partition in topic.partitions if topic is not None else ():
            self._cursors.forget(partition.name)

    def _hand_over(self) -> None:
        """To the other threads, what they have to look at."""
        self._watching.watched = {partition.name: partition for partition in self._partitions}
        self._visiting.topics = tuple(self._topics)
        self._replicated = {
            partition.name: (partition.topic_id, tuple(topic.listed.policy.subscriptions))
            for topic in self._topics.values()
            if topic.listed.policy.subscriptions
            for partition in topic.partitions
            if partition.is_paired
        }

    def _describe_soon(self) -> None:
        self._visiting.is_asked.set()
        self._beats["remote"].due.set()

    def _see(self, extents: Mapping[str, PartitionExtent], watched: Mapping[str, PartitionState]) -> None:
        now, now_us = time.monotonic(), time.time_ns() // 1000
        for name, extent in extents.items():
            watched[name].see(extent, now, now_us)

    def _note_unsynced(self, unsynced: Mapping[SubscriptionName, str]) -> None:
        for partition in self._partitions:
            partition.unsynced = {
                name.subscription: why
                for name, why in unsynced.items()
                if (name.partition, name.topic_id) == (partition.name, partition.topic_id)
            }

    # -- what there is at the remote -----------------------------------------------------------

    def described(self, shapes: Mapping[str, replica_pb2.TopicShape]) -> None:
        for name, topic in self._topics.items():
            if name in shapes:
                self._describe(topic, shapes[name])
        self._hand_over()

    def _describe(self, topic: LinkTopicState, shape: replica_pb2.TopicShape) -> None:
        retry_ms = _now_ms() + round(DESCRIBE_S * 1000)
        topic.describe(there(self._remote, shape), self._settings, retry_ms=retry_ms)

    def unanswered(self, state: LinkState, reason: str, retry_ms: int) -> None:
        for topic in self._topics.values():
            topic.unanswered(state, reason, retry_ms=retry_ms)
        self._hand_over()

    def made(self, creation: Creation, shape: replica_pb2.TopicShape) -> None:
        topic = self._topics.get(creation.topic)
        if topic is not None:
            topic.created(creation)
            self._describe(topic, shape)

    def not_made(self, creation: Creation, state: LinkState, reason: str) -> None:
        topic = self._topics.get(creation.topic)
        if topic is not None:
            topic.not_created(state, reason, time.monotonic(), _now_ms())

    # -- planning ------------------------------------------------------------------------------

    def _plan(self, ends: LinkEnds) -> None:
        now, now_ms = time.monotonic(), _now_ms()
        creations = [made for topic in self._topics.values() if (made := topic.creation(now)) is not None]
        if creations:
            self._visiting.make(creations)
            self._beats["remote"].due.set()
        self._question(now)
        weights = self._rounds.weights
        if weights and now - self._round_at < GATHER_S:
            return
        self._rounds.cancel_overdue(now)
        topics = {partition: topic for topic in self._topics.values() for partition in topic.partitions}
        candidates = [
            CopyCandidate(partition, step)
            for partition in topics
            if (step := partition.plan(now, now_ms)) is not None
        ]
        rounds = choose(candidates, weights, self._cores)
        for weight, chosen in ration(rounds, self._throttle, now):
            self._round_at = now
            drafts = [draft(each, topics[each.partition].listed) for each in chosen]
            for each in chosen:
                each.partition.begin_step(each.step, now)
            group = self._rounds.start(weight, drafts, ends)
            self._under_way[group] = [each.partition for each in chosen]

    def _ended(self, done: RoundResult) -> None:
        now, now_ms = time.monotonic(), _now_ms()
        self._rounds_done += 1
        for partition in self._under_way.pop(done.group, []):
            self._errands_done += 1
            outcome = done.outcomes.get(partition.name)
            if outcome is None:
                partition.break_down(done.error or "its task has said nothing of it", now, now_ms)
                continue
            counts = partition.note(outcome, now, now_ms)
            self._rows += outcome.messages
            if outcome.code in LOOK_AGAIN:
                self._describe_soon()
            if counts and outcome.is_known and self._watching.watched.get(partition.name) is partition:
                self._cursors.advance(partition.name, outcome.kept_position)

    def _question(self, now: float) -> None:
        if self._questions:
            return
        found: list[Callable[[], None]] = []
        for topic in self._topics.values():
            for partition in topic.partitions:
                if len(found) == ASKED:
                    break
                if partition.needs_begin and topic.start_us is not None:
                    found.append(partial(self._look_up_start, partition, topic.start_us))
                elif partition.needs_begin and topic.starts_at_first and partition.extent is not None:
                    partition.start_at(partition.extent.start)
                elif (offset := partition.wants_time(now)) is not None:
                    found.append(partial(self._look_up_time, partition, offset))
        if found:
            self._questions = found
            self._beats["asked"].due.set()

    def _due_in(self) -> float:
        now = time.monotonic()
        of_partitions = (partition.due_in(now) for partition in self._partitions)
        of_topics = (topic.due_in(now) for topic in self._topics.values())
        dues = [due for each in (of_partitions, of_topics) for due in each if due is not None]
        if ready := sum(partition.ready for partition in self._partitions):
            dues.append(self._throttle.due_in(ready, now))
        return max(min(dues, default=STEP_S), SHORTEST_STEP_S)

    # -- what is said --------------------------------------------------------------------------

    def _tell(self) -> None:
        now = time.monotonic()
        changed = [topic for topic in self._topics.values() if topic.look(now) or not topic.is_recorded]
        if changed:
            self._report_at = min(self._report_at, self._reported_at + SOON_S)
        if now >= self._report_at and self._topics and self._report is None:
            self._report_at, self._reported_at = now + REPORT_S, now
            self._report = self._reported(now)
            self._beats["control"].due.set()
        self._progress = self._seen(now)

    def _reported(self, now: float) -> pb.ReportLinkRequest:
        topics = [topic.report(now) for topic in self._topics.values()]
        return pb.ReportLinkRequest(remote=self._remote, runner=self._runner, topics=topics)

    def _was_reported(self, report: pb.ReportLinkRequest) -> None:
        for each in report.topics:
            topic = self._topics.get(each.topic)
            if topic is not None and topic.is_same(each):
                topic.recorded(each)

    def _report_last(self) -> None:
        now = time.monotonic()
        for topic in self._topics.values():
            topic.look(now)
        self._report = last = self._reported(now)
        self._beats["control"].due.set()
        while self._report is last and time.monotonic() < now + LAST_REPORT_S:
            self._hear(SHORTEST_STEP_S)

    def _seen(self, now: float) -> JobProgress:
        backlogs = [partition.backlog for partition in self._partitions]
        is_known = all(each is not None for each in backlogs)
        times = [each.oldest_us for each in self._partitions if each.backlog]
        overdue = self._rounds.overdue(now)
        behind_s = max(0.0, time.time() - min(times) / 1e6) if times else 0.0
        has_backlog = bool(overdue) or any(partition.is_wanting for partition in self._partitions)
        return JobProgress(
            is_running=True,
            has_worked=self._errands_done > 0 or not has_backlog,
            rows=self._rows,
            rate=sum(partition.rate.per_second(now)[0] for partition in self._partitions),
            batch=0 if overdue else self._rounds_done,
            lag_messages=sum(each or 0 for each in backlogs) if is_known else UNKNOWN_LAG,
            lag_seconds=behind_s if is_known and all(times) else UNKNOWN_LAG,
            has_backlog=has_backlog,
            # A round that does not end although it was cancelled keeps its partitions without end, whatever
            # the others do: only a new beginning of the whole link helps.
            pulse="overdue" if overdue else self._errands_done,
        )

    # -- beside --------------------------------------------------------------------------------

    def _talk(self) -> float:
        """What has become of it, and what to copy."""
        report = self._report
        try:
            if report is not None:
                self._control.report(report)
                self._report = None
                self._post(partial(self._was_reported, report))
            if time.monotonic() >= self._link_at:
                link = self._control.link(self._remote)
                self._link_at = time.monotonic() + LINK_S
                self._post(partial(self._follow, link))
        except Unavailable as error:
            log.info("replication: the cluster does not answer name=%s error=%s", self._name, error)
            self._report = None  # the next one knows more
            return LINK_S
        return max(0.0, self._link_at - time.monotonic())

    def _answer_questions(self) -> float:
        for look_up in self._questions:
            try:
                look_up()
            except SavaError as error:
                log.info("replication: could not look up an offset name=%s error=%s", self._name, error)
        self._questions = ()
        return ASK_S

    def _look_up_start(self, partition: PartitionState, publish_us: int) -> None:
        found = self._source.offset_at(partition.name, publish_us)
        self._post(partial(partition.start_at, found))

    def _look_up_time(self, partition: PartitionState, offset: int) -> None:
        for batch in self._source.read(partition.name, offset, offset + 1):
            self._post(partial(partition.age.learn, offset, batch.header.min_publish_time))

    def _sync(self) -> float:
        ends, partitions = self._ends, self._replicated
        if self._syncing is not None and self._syncing[0] != ends:
            self._end_sync()  # the remote has other addresses
        if self._syncing is None and ends is not None and partitions:
            read = partial(self._source.read_acks, timeout_s=READ_ACKS_S)
            made = AckSync(read, TargetCluster.of(ends.target).apply_acks, ends, self._cursors)
            self._syncing = (ends, made)
        if self._syncing is not None:
            self._syncing[1].sync(partitions)
            unsynced = self._syncing[1].failures
            if unsynced != self._unsynced:
                self._unsynced = unsynced
                self._post(partial(self._note_unsynced, unsynced))
        return SYNC_S

    def _end_sync(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing[1].pool.shutdown()  # when its calls have ended


def _nothing() -> None:
    return


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


SOURCE_S: Final = 5.0
"""Without a broker, until a question of the driver fails. It is asked again."""


class Replicate(PipelineKind):
    """``admin``: addresses of the admin port; ``service``: those of clients, as far as they are known. Both
    are asked for again and again: brokers come and go. ``access`` holds the runner's credentials at its own
    cluster, ``remotes`` those at others."""

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        service: Callable[[], str],
        *,
        runner: str,
        admin: Callable[[], str],
        tls: Tls | None,
        access: ClusterAccess,
        remotes: RemoteSecrets,
    ) -> None:
        self._spark = spark
        self._service = service
        self._runner = runner
        self._admin = admin
        self._tls = tls
        self._access = access
        self._remotes = remotes

    def start(self, name: str, settings: Mapping[str, Any], token: str) -> PipelineJob:
        """A policy has made the pipeline, so it acts with the runner's own rights."""
        remote = settings.get("remote")
        if not isinstance(remote, str) or not remote:
            raise SettingsInvalid("setting remote: the name of a remote is needed")
        service = self._service()
        if not service:
            raise Unavailable("it is not known yet where brokers are")
        return LinkJob(
            name,
            remote,
            self._runner,
            control=AdminLinkControl(
                self._admin(), tls=self._tls, token=self._access.bearer, client_addresses=self._service
            ),
            engine=CopyEngine(self._spark, name),
            source=replace(self._access, service=service, timeout_s=SOURCE_S),
            remotes=self._remotes,
        )
