"""Replicated subscriptions and the replication slot: what the target learns, and what the source may delete.

**Acks.** What is acknowledged at the source is acknowledged at the target, message by message.

    source   ReadAcks: new acks by origin                                (``sava.topics.origin_acks``)
    target   ApplyAcks: looks the messages up in its own log, and acks them

Only news travels. The driver remembers the acks that it has sent as offsets of the source (``known``), and
the source looks at nothing else: a subscription that lags a million messages costs as much as one at the end.
The target records the offset up to which it knows everything (``told``) together with the acks, so that a new
driver need not repeat them; if the subscription there is deleted, the record goes with it, and the driver
sees that. Acks of messages that the target does not have yet come back (``left``); the driver sends them
again with the next news, or after a pause.

Acks are only ever added, at both ends. So links in both directions, and several drivers at once, converge:
what is acked anywhere is acked everywhere. A message that a consumer has not acked stays unacked at both
ends, also if messages behind it are acked.

**The slot.** Retention at the source keeps what is not below the link's cursor (its leader makes and removes
it, see ``sava.replication.slots``). Two things hold it: messages that the target may still need, and
messages whose acks it may still need where subscriptions are replicated, since acks of a copy are read off
the copy. A late cursor only keeps a little more for a little longer. So a thread sends the changed offsets
once a second and repeats what fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from sava.client.errors import ClientError
from sava.client.subscribe_stream import coalesced
from sava.pipeline.replicate.target import LinkEnds
from sava.proto import replica_pb2 as pb
from sava.storage.keys import is_replication_slot, replication_slot
from sava.tasks import Backoff

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
AGAIN_S: Final = 60.0
"""Without changes everything is sent again after this time: the cursor may have been removed and made
again."""
MISSING: Final = "subscription_unknown"
"""The leader has not made the cursor yet, or has removed it."""


Advance = Callable[[str, Mapping[str, int]], dict[str, ClientError]]


class SlotUpdater:
    """Moves the link's cursor. Any thread may call; its own thread sends, until ``close``."""

    def __init__(self, advance: Advance, remote: str, *, every_s: float = EVERY_S) -> None:
        """``advance``: ``ClusterClient.advance_all``."""
        self._advance = advance
        self._remote = remote
        self._every_s = every_s
        self._guard = threading.Lock()
        self._copied: dict[str, int] = {}
        self._holds: dict[str, dict[str, int]] = {}
        self._sent: dict[str, int] = {}
        self._failing: dict[str, str] = {}
        self._changed = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def advance(self, name: str, offset: int) -> None:
        """The target holds everything of the partition before the offset. Returns at once."""
        with self._guard:
            if offset <= self._copied.get(name, 0):
                return
            self._copied[name] = offset
            self._wake()

    def hold(self, name: str, subscription: str, offset: int | None) -> None:
        """The target may not know the subscription's acks from this offset on. None releases the hold."""
        with self._guard:
            holds = self._holds.setdefault(name, {})
            if offset is None:
                holds.pop(subscription, None)
            else:
                holds[subscription] = offset
            self._wake()

    def begin_again(self, name: str) -> None:
        """The partition is copied again: what the target held does not count."""
        with self._guard:
            for known in (self._copied, self._sent):
                known.pop(name, None)

    def forget(self, name: str) -> None:
        """The partition is no longer copied; another one may have its name."""
        with self._guard:
            for known in (self._copied, self._holds, self._sent, self._failing):
                known.pop(name, None)

    def close(self) -> None:
        """Stop. The next driver sends what was not sent."""
        self._is_closed.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        self._changed.set()
        if self._thread is None and not self._is_closed.is_set():
            self._thread = threading.Thread(target=self._run, name=f"cursors {self._remote}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            if not self._changed.wait(AGAIN_S):
                with self._guard:
                    self._sent.clear()
            self._changed.clear()
            if self._is_closed.is_set():
                return
            if not self.send():
                self._changed.set()  # once more
            self._is_closed.wait(self._every_s)

    def send(self) -> bool:
        """Send what has changed. Returns whether nothing is left."""
        with self._guard:
            due = {
                name: offset
                for name, copied in self._copied.items()
                if (offset := min((copied, *self._holds.get(name, {}).values()))) > self._sent.get(name, 0)
            }
        if not due:
            return True
        try:
            failed = self._advance(replication_slot(self._remote), due)
        except ClientError as error:  # the link is closed
            failed = dict.fromkeys(due, error)
        with self._guard:
            for name, offset in due.items():
                if name not in failed:
                    self._failing.pop(name, None)
                    if name in self._copied:
                        self._sent[name] = offset
                elif self._failing.get(name) != (reason := str(failed[name])):
                    self._failing[name] = reason
                    level = logging.INFO if failed[name].code == MISSING else logging.WARNING
                    log.log(
                        level,
                        "replication: slot not advanced topic=%s remote=%s error=%s",
                        name,
                        self._remote,
                        reason,
                    )
        return not failed


AT_A_TIME: Final = 8
BUDGET_S: Final = 5.0
"""After this time no other partition starts; those that waited come first in the next call."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
IDLE_S: Final = 3.0
"""The longest interval between requests for a subscription without news."""
EVERYTHING: Final = (0, 1 << 62)

Range = tuple[int, int]
Origin = tuple[str, str]


class SubscriptionName(NamedTuple):
    """One subscription of one partition. A partition that was created again has another id."""

    partition: str
    topic_id: int
    subscription: str


@dataclass(slots=True)
class _State:
    known: list[Range] | None = None
    """The acks that were sent, as offsets of the source. None until the target was asked."""
    told: int = 0
    """The offset up to which the target reports to know everything."""
    left: dict[Origin, list[Range]] = field(default_factory=dict)
    due: float = 0.0
    failed_again: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=0))
    idle_s: float = 0.0
    left_due: float = 0.0
    left_again: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=0))
    reason: str = ""


class AckSync:
    """Replicates the acks of one link. One thread at a time calls ``sync``."""

    def __init__(
        self,
        read: Callable[[pb.ReadAcksRequest], pb.ReadAcksResponse],
        apply: Callable[[pb.ApplyAcksRequest], pb.ApplyAcksResponse],
        ends: LinkEnds,
        cursors: SlotUpdater | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read`` and ``apply``: ``read_acks`` of the source's client, ``apply_acks`` of the target's.
        ``cursors`` is the slot of the same link; it holds messages whose acks were not sent."""
        self._read = read
        self._apply_acks = apply
        self._ends = ends
        self._cursors = cursors
        self._clock = clock
        self._states: dict[SubscriptionName, _State] = {}
        self.pool = ThreadPoolExecutor(AT_A_TIME, "acks")
        self.sent = 0
        """The number of calls with acks."""

    @property
    def failures(self) -> dict[SubscriptionName, str]:
        """The subscriptions whose last sync failed, with the reason. The next calls retry them."""
        return {name: state.reason for name, state in self._states.items() if state.reason}

    def sync(self, partitions: Mapping[str, tuple[int, Sequence[str]]]) -> None:
        """Bring the target up to date for each partition (its id and its subscriptions). Later calls retry
        failures. Takes a few seconds at most, plus one call to either cluster."""
        wanted = {
            SubscriptionName(partition, topic_id, subscription)
            for partition, (topic_id, subscriptions) in partitions.items()
            for subscription in subscriptions
            if not is_replication_slot(subscription)
        }
        for name in self._states.keys() - wanted:
            del self._states[name]
            self._hold(name, None)
        for name in wanted - self._states.keys():
            self._states[name] = _State()
            self._hold(name, 0)
        now = self._clock()
        due = sorted((state.due, name) for name, state in self._states.items() if state.due <= now)
        for work in [self.pool.submit(self._bring, name, now + BUDGET_S) for _, name in due]:
            work.result()

    def _bring(self, name: SubscriptionName, deadline: float) -> None:
        state = self._states[name]
        try:
            while self._clock() < deadline and self._step(name, state):
                pass
        except ClientError as error:
            state.due = self._clock() + state.failed_again.next()
            if str(error) != state.reason:
                state.reason = str(error)
                log.warning(
                    "replication: acks not copied, retrying topic=%s subscription=%s remote=%s error=%s",
                    name.partition,
                    name.subscription,
                    self._ends.target_name,
                    error,
                )
        else:
            state.reason = ""
            state.failed_again.reset()

    def _step(self, name: SubscriptionName, state: _State) -> bool:
        """Send the news once. Returns whether there may be more."""
        known = [EVERYTHING] if state.known is None else state.known
        request = pb.ReadAcksRequest(
            topic=name.partition, subscription=name.subscription, known=chain.from_iterable(known)
        )
        found = self._read(request)
        if not found.exists or found.topic_id != name.topic_id:
            self._states[name] = _State(due=self._clock() + IDLE_S)
            self._hold(name, None)  # the subscription has no acks
            return False
        if state.known is None:
            state.told = self._apply(name, state, found).told
            state.known = [(0, state.told)] if state.told else []
            self._said(name, state)
            return True
        is_left_due = bool(state.left) and self._clock() >= state.left_due
        if not found.covered and not is_left_due:
            self._rest(state)
            return False
        applied = self._apply(name, state, found)
        if applied.told < state.told:
            log.info(
                "replication: sending acks again, the remote lost them topic=%s subscription=%s remote=%s",
                name.partition,
                name.subscription,
                self._ends.target_name,
            )
            state.known, state.told, state.left = [(0, applied.told)], applied.told, {}
            self._said(name, state)
            return True
        state.told = applied.told
        state.known = joined((*state.known, *_pairs(found.covered)))
        self._keep_left(state, applied)
        self._said(name, state)
        state.idle_s = state.due = 0.0
        return found.more

    def _apply(
        self, name: SubscriptionName, state: _State, found: pb.ReadAcksResponse
    ) -> pb.ApplyAcksResponse:
        acks = dict(state.left)
        for each in found.acks:
            origin = each.cluster_name, each.topic
            ranges = ((0, each.cursor), *_pairs(each.ranges))
            acks[origin] = joined((*acks.get(origin, ()), *ranges))
        known = joined((*(state.known or ()), *_pairs(found.covered)))
        if acks:
            self.sent += 1
        return self._apply_acks(
            pb.ApplyAcksRequest(
                topic=name.partition,
                subscription=name.subscription,
                source=self._ends.source_of(name.partition, name.topic_id),
                acks=[
                    pb.OriginAcks(cluster_name=cluster, topic=topic, ranges=chain.from_iterable(ranges))
                    for (cluster, topic), ranges in acks.items()
                ],
                type=found.type,
                told=_prefix(known),
                since=state.told,
                owner=found.owner,
            )
        )

    def _keep_left(self, state: _State, applied: pb.ApplyAcksResponse) -> None:
        left = {
            (each.cluster_name, each.topic): joined(((0, each.cursor), *_pairs(each.ranges)))
            for each in applied.left
        }
        if left != state.left:
            state.left_again.reset()
        state.left, state.left_due = left, self._clock() + state.left_again.next()

    def _rest(self, state: _State) -> None:
        """No news: ask less often the longer that lasts."""
        state.idle_s = min(1.5 * state.idle_s + 0.2, IDLE_S)
        state.due = self._clock() + state.idle_s

    def _said(self, name: SubscriptionName, state: _State) -> None:
        self._hold(name, _prefix(state.known or ()))

    def _hold(self, name: SubscriptionName, offset: int | None) -> None:
        if self._cursors is not None:
            self._cursors.hold(name.partition, name.subscription, offset)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The union of ranges, in order, without empty and adjacent ones."""
    return coalesced(each for each in ranges if each[0] < each[1])


def _prefix(ranges: Sequence[Range]) -> int:
    """The end of the first range if it starts at 0, otherwise 0."""
    return ranges[0][1] if ranges and not ranges[0][0] else 0


def _pairs(flat: Sequence[int]) -> Iterable[Range]:
    return zip(flat[::2], flat[1::2], strict=True)
