"""Watchers (I22): strictly growing revisions without gaps, or an explicit word that there is one.

A watcher follows one prefix at one node. When the node dies it goes on at another from the revision after its
last; when it is told ``Compacted`` it reads the range, takes that as its new state, and watches from the
revision after. All it was shown, batch by batch, is compared with the history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sava.metadata.errors import Compacted
from sava.metadata.watch import WatchBatch
from tests.sim.history import Violation
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World

PREFIXES = ("/k/", "/pair/", "/", "/k/0")


class Watcher:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = world.rng(f"watcher-{name}")
        self.prefix = self.rng.choice(PREFIXES)
        self.slow = "slowwatcher" in world.knobs.faults and self.rng.random() < 0.5
        self.seen = 0
        """Everything up to this revision was shown, or covered by a reload."""
        self.batches = 0
        self.gaps = 0
        self._node: SimNode | None = None
        self._life = 0
        self._subscription: Any = None
        self._scheduled = False

    def start(self) -> None:
        self.world.after(self.rng.randrange(1_000_000), self._attach)

    def _attach(self) -> None:
        nodes = [node for node in self.world.running() if node.replica is not None and not node.ghost]
        if not nodes:
            self.world.after(300_000, self._attach)
            return
        self._node = self.rng.choice(nodes)
        self._life = self._node.life
        assert self._node.replica is not None
        try:
            self._subscription = self._node.replica.hub.watch(self.prefix, self.seen + 1)
        except Compacted as gap:
            if gap.floor <= self.seen + 1:
                raise Violation(
                    "I22", f"watcher {self.name}: {self.seen + 1} is compacted, floor {gap.floor}"
                ) from gap
            self._reload()
            return
        self._subscription.on_ready = self._ready
        self._ready()

    @property
    def _is_attached(self) -> bool:
        return self._node is not None and self._node.alive and self._node.life == self._life

    def _ready(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            delay = self.rng.randrange(50_000, 900_000) if self.slow else self.rng.randrange(1, 2_000)
            self.world.after(delay, self._take)

    def _take(self) -> None:
        self._scheduled = False
        if self._subscription is None:
            return
        if not self._is_attached:
            self._leave()
            return
        try:
            while (batch := self._subscription.take()) is not None:
                self._see(batch)
        except Compacted:
            self._reload()
            return
        if self.rng.random() < 0.02:
            self._subscription.on_ready = None
            self._subscription.close()
            self._leave()
        elif not self._scheduled:
            # A dead node does not say goodbye: look again now and then.
            self._scheduled = True
            self.world.after(700_000, self._take)

    def _leave(self) -> None:
        self._subscription = None
        self.world.after(self.rng.randrange(1_000, 500_000), self._attach)

    def _reload(self) -> None:
        """Compacted: read the range at this node, and go on from its revision."""
        if not self._is_attached:
            self._leave()
            return
        assert self._node is not None
        assert self._node.replica is not None
        machine = self._node.replica.machine
        self.gaps += 1
        found, _ = machine.range(self.prefix)
        expected = self.world.history.prefix_at(self.prefix, machine.revision)
        if self.prefix.endswith("/") and found != expected:
            raise Violation(
                "I18", f"watcher {self.name}: range at {machine.revision} is {found}, not {expected}"
            )
        # A node that lags shows an older state than this watcher has seen; it must not go back.
        if machine.revision >= self.seen:
            self.seen = machine.revision
            self._subscription = None
            self._attach_here()
        else:
            self._leave()

    def _attach_here(self) -> None:
        assert self._node is not None
        assert self._node.replica is not None
        self._subscription = self._node.replica.hub.watch(self.prefix, self.seen + 1)
        self._subscription.on_ready = self._ready
        self._ready()

    def _see(self, batch: WatchBatch) -> None:
        self.batches += 1
        if batch.revision <= self.seen:
            raise Violation("I22", f"watcher {self.name} got revision {batch.revision} after {self.seen}")
        expected = self.world.history.between(self.prefix, self.seen + 1, batch.revision)
        if expected != [batch.events]:
            raise Violation(
                "I22",
                f"watcher {self.name} of {self.prefix} got {batch.events} after revision {self.seen}; the "
                "history has "
                f"{expected}",
            )
        self.seen = batch.revision

    def settle(self) -> None:
        """At the end, drained: nothing is missing."""
        if self._subscription is None or not self._is_attached:
            return
        try:
            while (batch := self._subscription.take()) is not None:
                self._see(batch)
        except Compacted:
            return
        assert self._node is not None
        assert self._node.replica is not None
        missing = self.world.history.between(self.prefix, self.seen + 1, self._node.replica.machine.revision)
        if missing:
            raise Violation(
                "I22",
                f"watcher {self.name} of {self.prefix} stands at {self.seen} and never got {missing[:2]}",
            )
