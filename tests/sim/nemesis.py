"""Nemesis: the faults that come from outside, each class a process of its own with its own chance and its own
clock.

A class strikes at exponentially distributed times, acts for a while and takes it back. Everything ends at
``heal``. Faults that destroy a disk for good (``wipe``, ``bitflip``) keep to the one limit that the protocol
itself has: at most one voter at a time may have forgotten what it promised, and it must be replaced before
the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sava.raft.types import NodeId
from tests.sim.disk import CrashPolicy
from tests.sim.knobs import DISK_FAULTS, EVIDENCE_FAULTS, NETWORK_FAULTS, PROCESS_FAULTS
from tests.sim.net import Link
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World

MS = 1000
SECOND = 1_000_000

RARE = {"powerloss": 4, "wipe": 3, "bitflip": 3, "doublestart": 4, "longcrash": 2, "clockjump": 2}
"""These strike so many times less often than the others."""

BY_CHANCE = ("loss", "delay", "reorder", "duplicate", "replay", "misdeliver", "corrupt", "skew")
"""Classes that the network or the node draws for each message; no process strikes for them."""


class Nemesis:
    def __init__(self, world: World) -> None:
        self.world = world
        self.stopped = False
        self._strikes: dict[str, Callable[[], None]] = {
            "partition": self._partition,
            "oneway": self._one_way,
            "bridge": self._bridge,
            "badlink": self._bad_link,
            "slowlink": self._slow_link,
            "swizzle": self._swizzle,
            "crash": self._crash,
            "longcrash": self._long_crash,
            "diskcrash": self._disk_crash,
            "powerloss": self._power_loss,
            "pause": self._pause,
            "stall": self._stall,
            "clockjump": self._clock_jump,
            "doublestart": self._double_start,
            "falsealarm": self._false_alarm,
            "slowdisk": self._slow_disk,
            "syncerror": self._sync_error,
            "diskfull": self._disk_full,
            "bitflip": self._bit_flip,
            "wipe": self._wipe,
        }
        self._rngs = {name: world.rng(f"fault-{name}") for name in self._strikes}
        self._rng = self._rngs["crash"]

    def start(self) -> None:
        for name in NETWORK_FAULTS + PROCESS_FAULTS + DISK_FAULTS + EVIDENCE_FAULTS:
            if name in self.world.knobs.faults and name not in BY_CHANCE:
                self._later(name)

    def _later(self, name: str) -> None:
        mean = self.world.knobs.tempo * MS * RARE.get(name, 1)
        self.world.after(int(self._rngs[name].expovariate(1 / mean)) + 1, self._strike, name)

    def _strike(self, name: str) -> None:
        if self.stopped:
            return
        self._rng = self._rngs[name]
        self.world.count(name)
        self.world.note(f"fault {name}")
        self._strikes[name]()
        self._later(name)

    def _a_while(self, low_ms: int, high_ms: int) -> int:
        return self._rng.randint(low_ms, high_ms) * MS

    def _anyone(self) -> SimNode | None:
        nodes = self.world.running()
        # The leader is the most interesting victim.
        leader = self.world.leader()
        if leader is not None and leader.alive and self._rng.random() < 0.3:
            return leader
        return self._rng.choice(nodes) if nodes else None

    # -- network ---------------------------------------------------------------------------------------------

    def _ids(self) -> list[NodeId]:
        ids = sorted(self.world.nodes)
        self._rng.shuffle(ids)
        return ids

    def _cut(self, links: Sequence[Link], low_ms: int, high_ms: int) -> None:
        self.world.net.block(links)
        self.world.after(self._a_while(low_ms, high_ms), self._mend, links)

    def _mend(self, links: Sequence[Link]) -> None:
        if not self.world.healing:
            self.world.net.unblock(links)

    def _partition(self) -> None:
        ids = self._ids()
        leader = self.world.leader()
        if leader is not None and self._rng.random() < 0.4:
            # The leader in the smaller half: it goes on for a while, as does its successor.
            ids.sort(key=lambda node: node != leader.id)
            minority = (len(ids) - 1) // 2
            self._cut(both_ways(ids[: max(1, minority)], ids[max(1, minority) :]), 500, 5000)
            return
        cut = self._rng.randint(1, max(1, len(ids) - 1))
        self._cut(both_ways(ids[:cut], ids[cut:]), 300, 5000)

    def _one_way(self) -> None:
        ids = self._ids()
        cut = self._rng.randint(1, max(1, len(ids) - 1))
        self._cut([(a, b) for a in ids[:cut] for b in ids[cut:]], 300, 5000)

    def _bridge(self) -> None:
        """Two halves that see each other only through one node (the Cloudflare outage of 2020 had this
        shape)."""
        ids = self._ids()
        middle = len(ids) // 2
        self._cut(both_ways(ids[:middle], ids[middle + 1 :]), 500, 6000)

    def _links(self) -> list[Link]:
        ids = self._ids()
        return [(a, b) for a in ids for b in ids if a != b]

    def _bad_link(self) -> None:
        links = self._links()
        if links:
            link = self._rng.choice(links)
            self.world.net.loss[link] = self._rng.randint(20, 95)
            self.world.after(self._a_while(500, 6000), lambda: self.world.net.loss.pop(link, None))

    def _slow_link(self) -> None:
        links = self._links()
        if links:
            link = self._rng.choice(links)
            self.world.net.slow[link] = self._a_while(20, 1500)
            self.world.after(self._a_while(500, 6000), lambda: self.world.net.slow.pop(link, None))

    def _swizzle(self) -> None:
        """Stop some links one by one, restore them in another order."""
        links = self._links()
        chosen = self._rng.sample(links, self._rng.randint(0, len(links)))
        for link in chosen:
            start = self._a_while(0, 1500)
            self.world.after(start, self._clog, link, self._a_while(1500, 4000) - start)

    def _clog(self, link: Link, duration: int) -> None:
        if not self.world.healing:
            self.world.net.block([link])
            self.world.after(duration, self._mend, [link])

    # -- processes -------------------------------------------------------------------------------------------

    def _kill(self, node: SimNode, low_ms: int, high_ms: int) -> None:
        node.crash(self._rng.choice([None, CrashPolicy.ANY, CrashPolicy.ANY, CrashPolicy.LOSE]))
        self.world.after(self._a_while(low_ms, high_ms), node.start)

    def _crash(self) -> None:
        node = self._anyone()
        if node is not None:
            self._kill(node, 10, 1500)

    def _long_crash(self) -> None:
        node = self._anyone()
        if node is not None:
            self._kill(node, 4000, 12_000)

    def _disk_crash(self) -> None:
        node = self._anyone()
        if node is not None:
            node.crash_after = self._rng.randrange(12)

    def _power_loss(self) -> None:
        """Everything at once, unsynced data gone."""
        policy = self._rng.choice([CrashPolicy.LOSE, CrashPolicy.ANY])
        for node in self.world.running():
            node.crash(policy)
            self.world.after(self._a_while(50, 2000), node.start)

    def _pause(self) -> None:
        node = self._anyone()
        if node is not None:
            node.freeze(self._a_while(500, 6000))

    def _stall(self) -> None:
        node = self._anyone()
        if node is not None:
            node.stall(self._a_while(50, 2500))

    def _clock_jump(self) -> None:
        node = self._anyone()
        if node is not None:
            node.wall_offset_ms += self._rng.choice([3_600_000, -3_600_000, 60_000, -60_000])

    def _double_start(self) -> None:
        """A second process on a copy of the disk. It has the original's id and another address, so it can
        speak but hears nothing but the complaint (were it to hear votes too, no protocol could save the
        cluster)."""
        node = self._anyone()
        if node is None or self.world.ghosts:
            return
        ghost = SimNode(self.world, node.id, disk=node.disk.clone(self._rng), ghost=True)
        ghost.ledger = copy.deepcopy(node.ledger)
        ghost.expect_failure = node.had_ghost = True
        self.world.ghosts.append(ghost)
        ghost.start()
        self.world.after(self._a_while(1000, 5000), self._end_ghost, ghost)

    def _end_ghost(self, ghost: SimNode) -> None:
        if ghost in self.world.ghosts:
            self.world.ghosts.remove(ghost)
            ghost.crash(None)

    def _false_alarm(self) -> None:
        """Some nodes, or all, get evidence that the process of their leader is gone. It mostly is not; after
        a crash it may be true."""
        chance = self._rng.choice([0.3, 1.0])
        for node in self.world.running():
            if self._rng.random() < chance:
                node.alarm()

    # -- disks -----------------------------------------------------------------------------------------------

    def _slow_disk(self) -> None:
        node = self._anyone()
        if node is not None:
            node.extra_disk_us = self._a_while(20, 800)
            self.world.after(self._a_while(1000, 6000), self._fast_disk, node)

    def _fast_disk(self, node: SimNode) -> None:
        node.extra_disk_us = 0

    def _sync_error(self) -> None:
        node = self._anyone()
        if node is not None:
            node.expect_failure = True
            node.disk.fail_next(self._rng.choice(["sync", "sync", "write", "sync_dir"]))

    def _disk_full(self) -> None:
        node = self._anyone()
        if node is not None:
            node.disk.set_capacity(node.disk.used + self._rng.randrange(400))
            self.world.after(self._a_while(300, 4000), self._make_room, node)

    def _make_room(self, node: SimNode) -> None:
        node.disk.set_capacity(None)

    def _expendable(self) -> SimNode | None:
        """A voter whose disk may be lost now (see the module's docstring)."""
        leader = self.world.leader()
        if leader is None or leader.status is None or self.world.now < self.world.change_until:
            return None
        membership = leader.status.membership
        settled = not membership.is_joint and leader.status.membership_index <= leader.status.commit
        if not settled or len(membership.voters) < 3:
            return None
        if any(
            node.gone or node.rotten for node in self.world.nodes.values() if node.id in membership.members
        ):
            return None
        victim = self.world.nodes[self._rng.choice(membership.voters)]
        return victim if victim.alive else None

    def _wipe(self) -> None:
        node = self._expendable()
        if node is not None:
            node.lose()

    def _bit_flip(self) -> None:
        """Rot in what had been synced and proven so. The node must refuse to start with it."""
        node = self._expendable()
        if node is None or node.writer is None:
            return
        found = node.rot(self._rng)
        if found:
            node.rotten = True
            self._kill(node, 100, 1000)


def both_ways(left: Sequence[NodeId], right: Sequence[NodeId]) -> list[Link]:
    return [link for a in left for b in right for link in ((a, b), (b, a))]
