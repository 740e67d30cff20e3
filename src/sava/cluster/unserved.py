"""Topics that nobody serves, and for which the controller can do nothing at the moment: remembered so that
each is told of once, and that they can be counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sava.cluster.planning import Plan
from sava.topics.names import TopicName

log = logging.getLogger(__name__)


class OfflineTopics:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.orphans: set[TopicName] = set()
        """They wait until the journal of their owner was recovered, or for the owner to return."""
        self.unplaced: set[TopicName] = set()
        """There is no broker for them."""

    def forget(self, name: TopicName) -> None:
        """It is served, or about to be."""
        self.orphans.discard(name)
        self.unplaced.discard(name)

    def keep(self, names: Iterable[TopicName]) -> None:
        """No others exist."""
        names = set(names)
        self.orphans &= names
        self.unplaced &= names

    def note(self, plan: Plan) -> None:
        for decision in plan.decisions:
            self.forget(decision.name)
        for entry in plan.orphans:
            if entry.name not in self.orphans:
                log.warning(
                    "controller: a topic waits for the journal of its owner, which is gone "
                    "topic=%s owner=%d epoch=%d",
                    entry.name,
                    entry.record.owner,
                    entry.record.epoch,
                )
        for entry in plan.unplaced:
            if entry.name not in self.unplaced:
                log.warning("controller: there is no broker for a topic topic=%s", entry.name)
        self.orphans.update(entry.name for entry in plan.orphans)
        self.unplaced.update(entry.name for entry in plan.unplaced)
