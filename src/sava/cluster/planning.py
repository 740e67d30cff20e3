"""Planning: what the controller makes of what it sees. No clock, no store: a moment in, decisions out.

====================  =============================================================  ==============
a topic that is       and                                                            gets the step
====================  =============================================================  ==============
unassigned, sealed    there is a broker for it, and its last failure is long ago     ``assign``
assigned, moving      its owner is not registered                                    ``orphan``
moving                its owner had its time and did not finish                      ``roll_back``
orphan                everything of it is in segments                                ``recover``
====================  =============================================================  ==============

Everything else is in order, or somebody else's to do. A decision carries the conditions that it rests on: the
ownership and the topic's record are those that were seen, the broker that gets the topic is still there and
still active, the owner that is thought to be gone is not there. They are checked where decisions are ordered,
in the log; what this node sees may be behind and can at worst waste a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.cluster import records
from sava.cluster.placement import Placement
from sava.cluster.records import Registration
from sava.cluster.view import TopicEntry
from sava.metadata.commands import Compare, Put
from sava.metadata.records import absent, unchanged
from sava.storage.types import TopicState
from sava.topics import ownership, specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership, OwnershipState

FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 30.0
ROLL_BACK_GRACE_S: Final = 10.0
"""Beyond its time, in which the owner of a topic takes a move back by itself."""
ORPHAN_LOOK_S: Final = 0.1
"""How soon an orphan is looked at again whose journal is being recovered: it is served as soon as its tail is
in segments, and that is written where nobody watches."""
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
    def seen(self) -> tuple[Compare, ...]:
        """That its records are those that were seen."""
        return (
            unchanged(specs.ownership_key(self.name), self.entry.revision),
            unchanged(specs.spec_key(self.name), self.entry.spec_revision),
        )

    @property
    def compare(self) -> tuple[Compare, ...]:
        return (*self.seen, *self.conditions)

    @property
    def put(self) -> Put:
        return Put(specs.ownership_key(self.name), specs.encode(self.record))


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
