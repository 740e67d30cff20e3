"""Lease holders: grant a lease, keep a key under it, stay alive for a while, then fall silent.

What is checked (S67): a lease whose keep-alive was acknowledged lives at least its TTL from the
moment the keep-alive was *sent*, whatever the leaders' clocks, pauses and elections do. The one thing that
may shorten it is a clock that runs fast, so the TTL is divided by the fastest rate any node may have. Late
expiry is allowed; never expiring is not, and is seen at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sava.metadata.commands import Done, LeaseExpire, LeaseGrant, LeaseResult, Put, Txn, TxnResult
from sava.metadata.machine.state_machine import Applied
from sava.metadata.peer import Alive, Committed, Failed, KeepAlive, LeaderRequest, Propose, Reply
from tests.sim.history import Violation
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World

MS = 1000


class Leases:
    """All leases of the world, and when each was last known to be alive."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive_from: dict[int, int] = {}
        self.ttl_ms: dict[int, int] = {}
        self.ended: set[int] = set()
        self.expired = 0
        world.on_applied.append(self._on_applied)

    def renewed(self, lease: int, ttl_ms: int, sent_at: int) -> None:
        self.ttl_ms[lease] = ttl_ms
        self.alive_from[lease] = max(self.alive_from.get(lease, 0), sent_at)

    def _on_applied(self, node: SimNode, index: int, proposal: Any, applied: Applied) -> None:
        command = proposal.command
        if not isinstance(command, LeaseExpire):
            return
        if not isinstance(applied.result, Done) or not applied.result.changed:
            return
        if command.lease in self.ended:
            return  # another replica applies it too
        self.ended.add(command.lease)
        self.expired += 1
        since = self.alive_from.get(command.lease)
        if since is None:
            return
        fastest = max(100, self.world.knobs.skew_percent[1])
        earliest = since + self.ttl_ms[command.lease] * MS * 100 // fastest
        if self.world.now < earliest:
            raise Violation(
                "S67",
                f"lease {command.lease} (ttl {self.ttl_ms[command.lease]} ms) was alive at {since / 1e6:.3f} "
                "and expired "
                f"at {self.world.now / 1e6:.3f}",
            )


class Holder:
    def __init__(self, world: World, leases: Leases, name: str) -> None:
        self.world = world
        self.leases = leases
        self.name = name
        self.rng = world.rng(f"holder-{name}")
        self.ttl_ms = self.rng.choice([600, 1500, 4000])
        self.stopped = False
        self._lease = 0
        self._beats = 0

    def start(self) -> None:
        self.world.after(self.rng.randrange(2000 * MS), self._begin)

    def _ask(self, request: LeaderRequest, done: Any) -> bool:
        nodes = self.world.running()
        if not nodes or self.stopped:
            return False
        node = self.rng.choice(nodes)
        sent = self.world.now
        node.ask(request, lambda reply: done(reply, sent), 1500)
        return True

    def _begin(self) -> None:
        if self.stopped:
            return
        if not self._ask(Propose(LeaseGrant(self.ttl_ms)), self._granted):
            self.world.after(500 * MS, self._begin)

    def _granted(self, reply: Reply | None, sent: int) -> None:
        if isinstance(reply, Committed) and isinstance(reply.result, LeaseResult):
            self._lease = reply.result.lease
            self.leases.renewed(self._lease, self.ttl_ms, sent)
            self._beats = self.rng.randrange(1, 12)
            self._ask(Propose(Txn(then=(Put(f"/leased/{self.name}", b"held", self._lease),))), self._put)
            self._beat_later()
        else:
            self.world.after(500 * MS, self._begin)

    def _put(self, reply: Reply | None, sent: int) -> None:
        if isinstance(reply, Committed) and not isinstance(reply.result, TxnResult):
            self._lease = 0  # the lease was gone already

    def _beat_later(self) -> None:
        self.world.after(self.ttl_ms * MS // 3, self._beat)

    def _beat(self) -> None:
        if self.stopped:
            return
        if self._beats <= 0 or not self._lease:
            self._lease = 0
            self.world.after(self.rng.randrange(3000) * MS, self._begin)
            return
        self._beats -= 1
        lease = self._lease

        def answered(reply: Reply | None, sent: int) -> None:
            if isinstance(reply, Alive):
                self.leases.renewed(lease, reply.ttl_ms, sent)
            elif isinstance(reply, Failed) and reply.code == "lease_not_found":
                if lease not in self.leases.ended:
                    raise Violation("S67", f"lease {lease} is said not to exist, and nobody ended it")
                self._lease = 0

        self._ask(KeepAlive(lease), answered)
        self._beat_later()
