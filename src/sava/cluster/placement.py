"""Placement: which broker a topic should go to.

Among the brokers that are there, are active and see the same segments, the one with the least load. Loads are
estimates, so those within a tenth of the least count as equal; of equals the one with the fewest topics gets
it, and of those they take turns in the order of their ids. Whatever is placed counts from then on: a thousand
topics that are placed in one go are spread like a thousand that come one by one.

Where a topic comes from is where it should not go back to, as long as there is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from sava.cluster import records
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.cluster.view import TopicEntry
from sava.metadata.commands import Compare, KeyValue
from sava.metadata.records import unchanged
from sava.metadata.store import LocalView
from sava.topics import specs
from sava.topics.specs import RecordCorrupt

ALMOST_EQUAL: Final = 1.1


class Candidate(NamedTuple):
    """A broker that may get topics, and the conditions under which that is still so."""

    registration: Registration
    conditions: tuple[Compare, ...]

    @property
    def broker(self) -> int:
        return self.registration.broker

    def sees(self, store_id: str) -> bool:
        """Whether it can read segments that are there; anybody can read none."""
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
        """None: there is no broker for it. ``target`` gets it if it can; ``leaves`` only if nobody else can
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
