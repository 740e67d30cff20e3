"""Operator: changes the cluster while it is in trouble, as people do.

Adds learners, promotes them, removes members (the leader too), replaces one node by another in a single
change, hands leadership over, asks for snapshots; through a random node, with a deadline, and with no regard
for the weather. One rule it keeps, which the documentation tells every operator: when a member has lost its
disk, replace that member before touching the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sava.metadata.peer import Changed, ChangeMembership, LeaderRequest, Reply, TransferLeadership
from sava.raft.types import Membership, MembershipChange, NodeId
from tests.sim.knobs import OPERATOR_ACTIONS
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World

MS = 1000
MAX_MEMBERS = 7
ZOMBIE_MS = 4000


class Operator:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng("operator")
        self.stopped = False
        self._actions: dict[str, Callable[[Membership], None]] = {
            "add": self._add,
            "promote": self._promote,
            "remove": self._remove,
            "replace": self._replace,
            "transfer": self._transfer,
            "snapshot": self._snapshot,
        }
        self._spare: SimNode | None = None

    def start(self) -> None:
        self._later()

    def _later(self) -> None:
        mean = self.world.knobs.operator_ms * MS
        self.world.after(int(self.rng.expovariate(1 / mean)) + 100 * MS, self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        self._later()
        wanted = [name for name in OPERATOR_ACTIONS if name in self.world.knobs.faults]
        if self.repair():
            return
        membership = self.membership()
        if wanted and membership is not None:
            name = self.rng.choice(wanted)
            self.world.count(name)
            self._actions[name](membership)

    def membership(self) -> Membership | None:
        leader = self.world.leader()
        return leader.status.membership if leader is not None and leader.status is not None else None

    # -- asking ----------------------------------------------------------------------------------------------

    def _ask(self, request: LeaderRequest) -> None:
        nodes = self.world.running()
        if not nodes:
            return
        node = self.rng.choice(nodes)
        self.world.note("operator", node.name, request)

        def answered(reply: Reply | None) -> None:
            self.world.note("operator got", reply)
            if isinstance(reply, Changed):
                self.world.count("changes done")

        node.ask(request, answered, self.rng.choice([1000, 4000]))

    def _change(self, **change: object) -> None:
        self.world.change_until = self.world.now + 6_000 * MS
        self._ask(ChangeMembership(MembershipChange(**change)))  # type: ignore[arg-type]

    # -- actions ---------------------------------------------------------------------------------------------

    def _add(self, membership: Membership) -> None:
        if len(membership.members) < MAX_MEMBERS:
            node = self._spare_node(membership)
            self._change(add_learners=((node.id, f"sim:{node.id}"),))

    def _spare_node(self, membership: Membership) -> SimNode:
        """A machine that was prepared earlier and is still unused, or a new one."""
        spare = self._spare
        if spare is None or spare.gone or spare.removed or spare.id in membership.members:
            self._spare = spare = self.world.join()
        return spare

    def _promote(self, membership: Membership) -> None:
        if membership.learners:
            self._change(promote=(self.rng.choice(membership.learners),))

    def _remove(self, membership: Membership) -> None:
        if len(membership.voters) > 1 or membership.learners:
            self._remove_member(membership, self.rng.choice(membership.members))

    def _remove_member(self, membership: Membership, node: NodeId) -> None:
        if membership.voters == (node,):
            return
        self._change(remove=(node,), forced=self.rng.random() < 0.1 and len(membership.voters) > 3)
        self.world.after(ZOMBIE_MS * MS, self._retire, node)

    def _retire(self, node: NodeId) -> None:
        """A removed node is switched off at last, after it had time to be a nuisance."""
        committed = self.world.checks.committed.configurations
        membership = self.membership()
        known = self.world.nodes[node]
        if membership is None or known.removed:
            return
        if node not in membership.members and committed and not membership.is_joint:
            known.removed = True
            if known.alive and self.rng.random() < 0.7:
                known.crash(None)
                known.gone = True

    def _replace(self, membership: Membership) -> None:
        if membership.learners and membership.voters:
            new, old = self.rng.choice(membership.learners), self.rng.choice(membership.voters)
            self._change(promote=(new,), remove=(old,))
            self.world.after(ZOMBIE_MS * MS, self._retire, old)

    def _transfer(self, membership: Membership) -> None:
        self._ask(TransferLeadership(self.rng.choice([NodeId(0), *membership.members])))

    def _snapshot(self, membership: Membership) -> None:
        node = self.rng.choice(list(self.world.nodes.values()))
        replica = node.replica
        if replica is not None:
            node.post(lambda: replica.take_snapshot(lambda _: None))

    # -- repair ----------------------------------------------------------------------------------------------

    def repair(self) -> bool:
        """Replace a member whose disk is lost; True while there is one."""
        membership = self.membership()
        if membership is None:
            return False
        lost = [node for node in membership.members if self.world.nodes[node].gone]
        if not lost:
            return (
                any(node.gone and not node.removed for node in self.world.nodes.values())
                and membership.is_joint
            )
        if membership.is_joint:
            return True
        self.world.count("repair")
        self._change(remove=(lost[0],))
        return True
