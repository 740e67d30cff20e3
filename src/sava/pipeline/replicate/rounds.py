"""Rounds: what is copied together, as one Spark job each, several at a time.

A job costs some 50 ms whatever it does, and its outcomes come together, when the last of its tasks has ended.
So partitions that have little to copy share a round, and do not share one with those that would keep them
waiting:

    light     little to copy: many in one round, which ends soon
    heavy     history: a round lasts as long as the budget; one core is left to the others
    suspect   the last errand failed, maybe after a long time

At most MAX_ROUNDS are under way, one of them heavy and one suspect. A round has no more errands than can be
done in its time; who was not copied for the longest time comes first. A partition is in one round at a time;
the planner sees to that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from sava.client.errors import Closed
from sava.errors import CallerError, SavaError
from sava.pipeline.cluster import ClusterClient
from sava.pipeline.errors import SourceFailed, at_source
from sava.pipeline.launch import brief
from sava.pipeline.options import TopicPartition
from sava.pipeline.replicate.partitions import CopyStep, PartitionState, Throttle
from sava.pipeline.replicate.target import (
    CopyOutcome,
    CopyShare,
    EncodedRange,
    Errand,
    LinkEnds,
    TargetCluster,
)
from sava.pipeline.source.planning import WORTH_A_TASK, Piece, SegmentHistory
from sava.proto.replication_pb2 import LinkTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

BUDGET_S: Final = 1.0
MAX_ROUNDS: Final = 4
OVERDUE_S: Final = 45.0
"""An errand ends some ten seconds after its budget, whatever happens. A round that takes so much longer has
lost a task."""
SKIP_S: Final = 8.0


LIGHT_BYTES: Final = 32 << 20
LIGHT_ERRANDS: Final = 100
"""Of one round: one by one, a task does some hundred of them in a second, if the machine has nothing else to
do; together several hundred."""
HEAVY_ERRANDS: Final = 4
"""Of one task."""
SUSPECT_ERRANDS: Final = 8
"""Of one round; a task does that many side by side, so that those that wait for an answer keep no other from
being tried."""


class Weight(Enum):
    LIGHT = "light"
    HEAVY = "heavy"
    SUSPECT = "suspect"

    def tasks(self, cores: int) -> int:
        """At most, for one round."""
        return cores if self is Weight.LIGHT else max(1, cores - 1)


class CopyCandidate(NamedTuple):
    """A partition that could be copied now."""

    partition: PartitionState
    step: CopyStep

    @property
    def weight(self) -> Weight:
        if self.partition.is_suspect or self.partition.is_alone or self.step.skips:
            return Weight.SUSPECT
        return Weight.HEAVY if self.step.is_heavy else Weight.LIGHT


def choose(
    candidates: Sequence[CopyCandidate], under_way: Sequence[Weight], cores: int
) -> list[tuple[Weight, list[CopyCandidate]]]:
    """The rounds to begin now."""
    waiting = sorted(candidates, key=lambda each: each.partition.began_at)
    light = [each for each in waiting if each.weight is Weight.LIGHT]
    heavy = [each for each in waiting if each.weight is Weight.HEAVY]
    suspect = [each for each in waiting if each.weight is Weight.SUSPECT]
    alone = [each for each in suspect if each.partition.is_alone]
    rounds = [
        (Weight.LIGHT, _worth(light, LIGHT_BYTES)[:LIGHT_ERRANDS]),
        (Weight.HEAVY, heavy[: HEAVY_ERRANDS * Weight.HEAVY.tasks(cores)]),
        (Weight.SUSPECT, alone[:1] or suspect[:SUSPECT_ERRANDS]),
    ]
    most = {Weight.LIGHT: MAX_ROUNDS - 2, Weight.HEAVY: 1, Weight.SUSPECT: 1}
    return [
        (weight, chosen) for weight, chosen in rounds if chosen and under_way.count(weight) < most[weight]
    ]


def ration(
    rounds: Sequence[tuple[Weight, list[CopyCandidate]]], throttle: Throttle, now: float
) -> list[tuple[Weight, list[CopyCandidate]]]:
    """The same within the rate of the link, which all partitions share, whatever they have to copy."""
    chosen = [each for _, candidates in rounds for each in candidates if each.step.messages]
    chosen.sort(key=lambda each: each.partition.began_at)
    wanted = [each.step.messages for each in chosen]
    of = dict(zip((each.partition for each in chosen), throttle.portions(wanted, now), strict=True))
    rationed = [
        (
            weight,
            [
                each._replace(step=each.step.cut(of[each.partition])) if each.partition in of else each
                for each in candidates
                if of.get(each.partition, 1)  # what only asks needs none
            ],
        )
        for weight, candidates in rounds
    ]
    return [(weight, candidates) for weight, candidates in rationed if candidates]


def _worth(candidates: Sequence[CopyCandidate], size: int) -> list[CopyCandidate]:
    """The first of them, up to ``size`` bytes."""
    sizes = accumulate(each.step.weight for each in candidates)
    return [each for each, upto in zip(candidates, sizes, strict=True) if upto - each.step.weight < size]


def share_out(
    errands: Sequence[Errand], ends: LinkEnds, *, tasks: int, budget_s: float, is_light: bool = False
) -> list[CopyShare]:
    """Shares of about equal weight, as few as are worth a task."""
    weights = {errand.name: sum(piece.weight for piece in errand.pieces) for errand in errands}
    count = max(1, min(tasks, len(errands), int(sum(weights.values()) / WORTH_A_TASK)))
    loads: list[tuple[float, list[Errand]]] = [(0.0, []) for _ in range(count)]
    for errand in sorted(errands, key=lambda errand: -weights[errand.name]):
        least = min(range(count), key=lambda number: loads[number][0])
        load, given = loads[least]
        loads[least] = (load + weights[errand.name], [*given, errand])
    return [
        CopyShare(ends=ends, errands=tuple(given), budget_s=budget_s, is_light=is_light)
        for _, given in loads
        if given
    ]


class CopyEngine:
    """Runs shares as the tasks of a Spark job. Any thread may call."""

    def __init__(self, spark: Callable[[], SparkSession], pool: str) -> None:
        """``pool``: of Spark's scheduler; links share the cores evenly with queries."""
        self._spark = spark
        self._pool = pool

    @property
    def cores(self) -> int:
        return max(1, self._spark().sparkContext.defaultParallelism)

    def run(self, group: str, shares: Sequence[CopyShare]) -> list[CopyOutcome]:
        """Returns when all are done. Raises whatever goes wrong with any."""
        context = self._spark().sparkContext
        context.setJobGroup(group, f"sava {self._pool}", interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", self._pool)
        return context.parallelize(shares, len(shares)).mapPartitions(_copied).collect()

    def cancel(self, group: str) -> None:
        """The caller that waits for it gets an error soon. A task may continue for a moment, or as long as
        its machine is cut off: what it still appends continues at the source position, or is refused."""
        self._spark().sparkContext.cancelJobGroup(group)


def _copied(shares: Iterable[CopyShare]) -> Iterator[CopyOutcome]:
    """On executors."""
    from sava.pipeline.replicate.copying import copy

    for share in shares:
        yield from copy(share)


class Drafted(NamedTuple):
    """An errand of a round, before it is known where its messages are."""

    errand: Errand
    part: TopicPartition
    step: CopyStep
    stored: int


def draft(candidate: CopyCandidate, topic: LinkTopic) -> Drafted:
    partition, step = candidate
    errand = Errand(
        name=partition.name,
        topic_id=partition.topic_id,
        target_topic_id=partition.target_topic_id,
        subject=topic.schema_subject,
        begin=None if partition.was_seen else partition.begin,
        end=step.end,
        pieces=(),
        store_url="",
        forward=topic.policy.forward,
    )
    stored = partition.extent.stored if partition.extent is not None else 0
    return Drafted(errand, TopicPartition(topic.topic, partition.number), step, stored)


class RoundResult(NamedTuple):
    """What has become of a round."""

    group: str
    outcomes: Mapping[str, CopyOutcome]
    error: str
    """Empty: it has come to its end."""


class CopyRounds:
    """Those of one link. ``start`` and what tells of them are for one thread; ``done`` is called by others,
    once for each round."""

    def __init__(
        self,
        name: str,
        engine: CopyEngine,
        source: ClusterClient,
        done: Callable[[RoundResult], None],
        *,
        budget_s: float = BUDGET_S,
    ) -> None:
        self._name = name
        self._engine = engine
        self._done = done
        self._budget_s = budget_s
        self._source = source
        self._history = SegmentHistory(source)
        self._number = 0
        self._under_way: dict[str, tuple[Weight, float]] = {}
        """By group: the weight, and when it began."""
        self._given_up: set[str] = set()
        self._at_work: set[str] = set()
        """Those that the engine has."""
        self._is_stopped = False
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_ROUNDS, thread_name_prefix=f"round of {name}")

    @property
    def weights(self) -> list[Weight]:
        with self._guard:
            return [weight for weight, _ in self._under_way.values()]

    @property
    def is_any(self) -> bool:
        """Whether something is, or will be, under way."""
        with self._guard:
            return bool(self._at_work if self._is_stopped else self._under_way)

    def overdue(self, now: float) -> list[str]:
        """Rounds that should have ended long ago."""
        with self._guard:
            return [group for group, (_, began) in self._under_way.items() if now - began > OVERDUE_S]

    def cancel_overdue(self, now: float) -> None:
        overdue = [group for group in self.overdue(now) if group not in self._given_up]
        if overdue:
            log.error(
                "replication: %d rounds do not end, and are cancelled name=%s", len(overdue), self._name
            )
            self._given_up.update(overdue)
            self._cancel(overdue)

    def start(self, weight: Weight, drafts: Sequence[Drafted], ends: LinkEnds) -> str:
        self._number += 1
        group = f"{self._name}-{id(self):x}-{self._number}"
        with self._guard:
            self._under_way[group] = (weight, time.monotonic())
        self._pool.submit(self._run, group, weight, drafts, ends)
        return group

    def stop(self) -> None:
        """Cancel all; they still have to end. Those that wait for the source to say where messages are come
        to nothing, and are not waited for: it may be the source that cannot be reached."""
        with self._guard:
            self._is_stopped = True
            groups = list(self._at_work)
        self._cancel(groups)

    def _cancel(self, groups: Iterable[str]) -> None:
        for group in groups:
            try:
                self._engine.cancel(group)
            except Exception:
                # Either it ends, which is seen, or it does not, which is seen as well.
                log.exception("replication: a round is not cancelled name=%s group=%s", self._name, group)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- in a thread of the pool ---------------------------------------------------------------

    def _run(self, group: str, weight: Weight, drafts: Sequence[Drafted], ends: LinkEnds) -> None:
        outcomes: dict[str, CopyOutcome] = {}
        error = ""
        try:
            errands = [errand for draft in drafts if (errand := self._errand(draft, ends, outcomes))]
            if errands:
                shares = share_out(
                    errands,
                    ends,
                    tasks=weight.tasks(self._engine.cores),
                    budget_s=self._budget_s,
                    is_light=weight is Weight.LIGHT,
                )
                outcomes |= {each.name: each for each in self._given(group, shares)}
        except SavaError as failure:
            error = str(failure)
        except Exception as failure:
            # An executor that was lost, a worker that was killed: whatever it is, other rounds continue.
            log.warning("replication: a round has failed name=%s", self._name, exc_info=True)
            error = brief(failure)
        self._done(RoundResult(group, outcomes, error))
        with self._guard:
            del self._under_way[group]
            self._at_work.discard(group)

    def _given(self, group: str, shares: Sequence[CopyShare]) -> list[CopyOutcome]:
        with self._guard:
            if self._is_stopped:
                raise Closed("the link is stopped")
            self._at_work.add(group)
        return self._engine.run(group, shares)

    def _errand(self, draft: Drafted, ends: LinkEnds, outcomes: dict[str, CopyOutcome]) -> Errand | None:
        """None: it is done, or cannot be."""
        errand, step = draft.errand, draft.step
        try:
            if step.skips:
                outcomes[errand.name] = skip(self._source, errand, ends, step.start)
                return None
            if not step.is_heavy:
                tail = Piece(draft.part, errand.name, step.start, step.end, None, step.message_bytes)
                return replace(errand, pieces=(tail,) if step.start < step.end else ())
            with at_source():
                pieces = self._history.pieces(
                    draft.part, errand.name, step.start, step.end, stored=draft.stored
                )
            return replace(errand, pieces=tuple(pieces), store_url=self._history.store_url)
        except SourceFailed as error:
            code, may_pass, reason = error.code, error.may_pass, str(error)
        except SavaError as error:
            may_pass = not isinstance(error, CallerError)
            code, reason = "unavailable" if may_pass else "failed", str(error)
        outcomes[errand.name] = CopyOutcome(name=errand.name, code=code, reason=reason, may_pass=may_pass)
        return None


def skip(link: ClusterClient, errand: Errand, ends: LinkEnds, start: int) -> CopyOutcome:
    """Let the copy continue with the first message that is kept: an operator has agreed to continue without
    those that are not. One that has not begun is to begin there: then the outcome says where."""
    with at_source():
        end = link.extents([errand.name])[errand.name].start
    until = time.monotonic() + SKIP_S
    stream = TargetCluster.of(ends.target).append_stream(
        errand.name, ends.source_of(errand.name, errand.topic_id)
    )
    try:
        opened = stream.open(until=until, end_by=until)
        is_there = opened.topic_id == errand.target_topic_id and opened.position == start < end
        if opened.is_known and is_there:
            log.warning("replication: skipped topic=%s from=%d to=%d", errand.name, start, end)
            stream.put(EncodedRange(start, end, False, b"", (), 0), until=until)
            stream.settle(until=until)
        progress = stream.progress
        if not progress.is_known:
            return CopyOutcome(name=errand.name, position=max(start, end))
        return CopyOutcome(
            name=errand.name,
            is_known=progress.is_known,
            position=progress.position,
            kept_position=progress.kept_position,
        )
    finally:
        stream.close()
