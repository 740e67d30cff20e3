"""Planning: which broker a topic should go to, and what the controller makes of what it sees. No clock, no
store: a moment in, decisions out. Only ``write_decisions``, at the end, writes them down.

**Placement.** Among the brokers that are there, are active and see the same segments, the topic goes to the
one with the least load. Loads are estimates, so those within a tenth of the least count as equal; of equals
the one with the fewest topics gets it, and of those they take turns in the order of their ids. Whatever is
placed counts from then on: a thousand topics that are placed in one go are spread like a thousand that come
one by one. A topic does not go back to where it comes from as long as there is another broker.

**Decisions.**

====================  =============================================================  ==============
a topic that is       and                                                            gets the step
====================  =============================================================  ==============
unassigned, sealed    there is a broker for it, and its last failure is long ago     ``assign``
assigned, moving      its owner is not registered                                    ``orphan``
moving                its owner had its time and did not finish                      ``roll_back``
orphan                everything of it is in segments                                ``recover``
====================  =============================================================  ==============

Everything else is in order, or another broker's to do. A decision carries the conditions that it rests on:
the ownership and the topic's record are those that were seen, the broker that gets the topic is still there
and still active, the owner that is thought to be gone is not there. They are checked where decisions are
ordered, in the log; what this node sees may be behind and can at worst waste a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.cluster import records
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.cluster.view import ClusterView, TopicEntry
from sava.metadata.commands import Compare, KeyValue, Put
from sava.metadata.records import RecordCorrupt, absent, encode, unchanged
from sava.metadata.store import LocalView, MetadataStore
from sava.storage.types import TopicState
from sava.topics import ownership, specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership, OwnershipState

ALMOST_EQUAL: Final = 1.1


class Candidate(NamedTuple):
    """A broker that may get topics, and the conditions under which that is still so."""

    registration: Registration
    conditions: tuple[Compare, ...]

    @property
    def broker(self) -> int:
        return self.registration.broker

    def sees(self, store_id: str) -> bool:
        """Whether it can read the segments that exist; without segments every broker can."""
        return not store_id or self.registration.store_id == store_id


def candidates(brokers: Mapping[int, Registration], local: LocalView) -> dict[int, Candidate]:
    """The active ones, by id. A record and its revision are read together: a condition on a newer revision
    than that of the mode, or registration, that was looked at would hold for a broker that is being drained,
    or is about to stop."""
    found = {}
    for broker in sorted(brokers):
        mode, registered = (
            local.get(records.mode_key(broker)),
            local.get(records.registration_key(broker)),
        )
        registration = _registration(registered)
        if registration is None or registered is None or (mode is not None and not _is_active(mode)):
            continue
        found[broker] = Candidate(
            registration,
            (
                unchanged(records.registration_key(broker), registered.mod_revision),
                unchanged(records.mode_key(broker), mode.mod_revision if mode is not None else 0),
            ),
        )
    return found


def _registration(kv: KeyValue | None) -> Registration | None:
    """None: it is not there, cannot be read, or says that the broker leaves."""
    try:
        found = specs.decode(kv, Registration) if kv is not None else None
    except RecordCorrupt:
        return None
    return found if found is not None and not found.is_leaving else None


def _is_active(kv: KeyValue) -> bool:
    """A mode that cannot be read is not the default one."""
    try:
        return specs.decode(kv, BrokerMode).mode is Mode.ACTIVE
    except RecordCorrupt:
        return False


def store_of(entry: TopicEntry, brokers: Mapping[int, Registration]) -> str:
    """Which object store a topic that is being served needs; empty: none, or it is not known."""
    if not entry.spec.reliable:
        return ""
    serving = brokers.get(entry.record.owner)
    return entry.record.store_id or (serving.store_id if serving is not None else "")


class Placement:
    """Counts what it places; good for one moment's brokers and loads."""

    def __init__(
        self,
        candidates: Mapping[int, Candidate],
        counts: Mapping[int, int],
        loads: Mapping[int, float],
        *,
        last: int = 0,
    ) -> None:
        self.candidates = candidates
        self.last = last
        """Whose turn it was last."""
        self._counts = {broker: counts.get(broker, 0) for broker in candidates}
        self._loads = {broker: loads.get(broker, 0.0) for broker in candidates}
        self._each = sum(self._loads.values()) / max(sum(self._counts.values()), 1) or 1.0

    def choose(
        self, *, store_id: str = "", target: int = 0, leaves: int = 0, may_return: bool = True
    ) -> Candidate | None:
        """None: there is no broker for it. ``target`` gets it if it can; ``leaves`` only if no other can
        and it ``may_return``."""
        fitting = [each for each in self.candidates.values() if each.sees(store_id)]
        others = [each for each in fitting if each.broker != leaves]
        if not others and may_return:
            others = fitting
        wanted = [each for each in others if each.broker == target]
        if not others:
            return None
        chosen = wanted[0] if wanted else self._least(others)
        self._counts[chosen.broker] += 1
        self._loads[chosen.broker] += self._each
        return chosen

    def _least(self, fitting: Iterable[Candidate]) -> Candidate:
        fitting = list(fitting)
        least = min(self._loads[each.broker] for each in fitting)
        chosen = min(
            (each for each in fitting if self._loads[each.broker] <= least * ALMOST_EQUAL),
            key=lambda each: (self._counts[each.broker], each.broker <= self.last, each.broker),
        )
        self.last = chosen.broker
        return chosen


# -- decisions ---------------------------------------------------------------------------------

FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 30.0
ROLL_BACK_GRACE_S: Final = 10.0
"""Beyond its time, in which the owner of a topic takes a move back by itself."""
ORPHAN_LOOK_S: Final = 0.1
"""How soon an orphan is looked at again whose journal is being recovered: it is served as soon as its tail is
in segments, and that is written to a key without a watch."""
ORPHAN_LONG_S: Final = 60.0
ORPHAN_LATER_S: Final = 2.0
"""How soon one that has waited long: for a broker that may never come back."""

_S = OwnershipState


class Decision(NamedTuple):
    """A step for a topic, and what must hold for it besides that its records are those that were seen."""

    entry: TopicEntry
    step: str
    record: Ownership
    conditions: tuple[Compare, ...] = ()

    @property
    def name(self) -> TopicName:
        return self.entry.name

    @property
    def compare(self) -> tuple[Compare, ...]:
        return (
            unchanged(specs.ownership_key(self.name), self.entry.revision),
            unchanged(specs.spec_key(self.name), self.entry.spec_revision),
            *self.conditions,
        )


def decide(entry: TopicEntry, step: str, conditions: tuple[Compare, ...] = (), **changes: object) -> Decision:
    """Raises WrongState."""
    return Decision(entry, step, ownership.after(step, entry.name, entry.record, **changes), conditions)


class Sightings:
    """Since when records have been as they are, by this node's own clock: clocks of others may be wrong."""

    def __init__(self) -> None:
        self._seen: dict[TopicName, tuple[int, float]] = {}

    def since(self, entry: TopicEntry, now: float) -> float:
        revision, since = self._seen.get(entry.name, (-1, 0.0))
        if revision != entry.revision:
            since = now
            self._seen[entry.name] = entry.revision, now
        return since

    def keep(self, names: Iterable[TopicName]) -> None:
        """Forget all others."""
        self._seen = {name: self._seen[name] for name in names if name in self._seen}


@dataclass(frozen=True, slots=True)
class Scene:
    """A moment of the cluster."""

    now: float
    brokers: Mapping[int, Registration]
    placement: Placement
    sightings: Sightings
    state_of: Callable[[TopicEntry], TopicState | None]
    """What storage has of a topic; None: it was never opened."""
    is_deleting: Callable[[TopicName], bool]


@dataclass(slots=True)
class Plan:
    decisions: list[Decision] = field(default_factory=list)
    waits: dict[TopicName, float] = field(default_factory=dict)
    """Topics to look at again, and when."""
    unplaced: list[TopicEntry] = field(default_factory=list)
    """There is no broker for them."""
    orphans: list[TopicEntry] = field(default_factory=list)
    """Their ends are not in segments yet: in journals of disks that are gone."""


def is_settled(entry: TopicEntry, brokers: Mapping[int, Registration]) -> bool:
    """Most topics are, most of the time."""
    return entry.record.state is _S.ASSIGNED and entry.record.owner in brokers


def plan(entries: Iterable[TopicEntry], scene: Scene) -> Plan:
    plan = Plan()
    for entry in entries:
        match entry.record.state:
            case _S.UNASSIGNED | _S.SEALED:
                _assign(entry, scene, plan)
            case _S.ASSIGNED | _S.MOVING if entry.record.owner not in scene.brokers:
                gone = absent(records.registration_key(entry.record.owner))
                plan.decisions.append(decide(entry, "orphan", (gone,)))
            case _S.MOVING:
                _watch_move(entry, scene, plan)
            case _S.ORPHAN:
                _recover(entry, scene, plan)
    return plan


def wait_after(failures: int) -> float:
    """Seconds until a topic that could not be served is assigned again."""
    return min(FIRST_WAIT_S * 2 ** min(failures - 1, 16), LONGEST_WAIT_S) if failures else 0.0


def _assign(entry: TopicEntry, scene: Scene, plan: Plan) -> None:
    record = entry.record
    if scene.is_deleting(entry.name):
        return
    if record.failures:
        due = scene.sightings.since(entry, scene.now) + wait_after(record.failures)
        if due > scene.now:
            plan.waits[entry.name] = due
            return
    chosen = scene.placement.choose(
        store_id=record.store_id if entry.spec.reliable and scene.state_of(entry) is not None else "",
        target=record.target,
        leaves=record.from_broker,
    )
    if chosen is None:
        plan.unplaced.append(entry)
        return
    plan.decisions.append(
        decide(
            entry,
            "assign",
            chosen.conditions,
            owner=chosen.broker,
            store_id=chosen.registration.store_id,
            reason=record.reason or "create",
        )
    )


def _watch_move(entry: TopicEntry, scene: Scene, plan: Plan) -> None:
    record = entry.record
    allowed = record.timeout_ms / 1000 + ROLL_BACK_GRACE_S
    due = scene.sightings.since(entry, scene.now) + allowed
    if due > scene.now:
        plan.waits[entry.name] = due
        return
    error = f"broker {record.owner} did not hand it over within {allowed:g} s"
    plan.decisions.append(decide(entry, "roll_back", error=error))


def _recover(entry: TopicEntry, scene: Scene, plan: Plan) -> None:
    end = 0
    if entry.spec.reliable:
        state = scene.state_of(entry)
        if state is not None and not state.is_settled:
            plan.orphans.append(entry)
            is_new = scene.now - scene.sightings.since(entry, scene.now) < ORPHAN_LONG_S
            plan.waits[entry.name] = scene.now + (ORPHAN_LOOK_S if is_new else ORPHAN_LATER_S)
            return
        end = state.end if state is not None else 0
    plan.decisions.append(
        decide(entry, "recover", end=end, from_broker=entry.record.owner, reason="failover", failures=0)
    )


# -- writing decisions down --------------------------------------------------------------------
#
# Each decision is a transaction of its own; those of one moment share entries (``metadata.batching``). A
# topic that changed meanwhile refuses its own and no other: it is decided again, from what it has become.

SHOWN_S: Final = 1.0


async def write_decisions(
    view: ClusterView, store: MetadataStore, decisions: Sequence[Decision], *, term: int
) -> list[Decision]:
    """Those that took effect, as soon as the view shows them: the next pass must not decide the same again.
    Raises Deposed, Unavailable, OutcomeUnknown."""

    async def write(decision: Decision) -> bool:
        put = Put(specs.ownership_key(decision.name), encode(decision.record))
        result = await store.txn(decision.compare, (put,), fence_term=term, batched=True)
        return result.succeeded

    tried = await asyncio.gather(*map(write, decisions), return_exceptions=True)
    done = [decision for decision, is_done in zip(decisions, tried, strict=True) if is_done is True]
    if done:
        seen = done[-1].entry

        def is_shown() -> bool:
            entry = view.entry(seen.name)
            before = (seen.revision, seen.spec_revision)
            return entry is None or (entry.revision, entry.spec_revision) != before

        with suppress(TimeoutError):
            await view.wait(is_shown, timeout=SHOWN_S, about=seen.name)
    for failure in tried:
        if isinstance(failure, BaseException):
            raise failure
    return done
