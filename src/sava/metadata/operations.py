"""Operations on the cluster itself: forming it (``bootstrap``), adding, promoting and removing nodes,
handing over leadership."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sava.errors import SavaError
from sava.metadata.bootstrap import IDENTIFY_TIMEOUT_S, bootstrap, check_address
from sava.metadata.errors import IdentityConflict, InvalidRequest
from sava.metadata.node import RaftNode
from sava.metadata.peer import Bootstrap, ChangeMembership, TransferLeadership, Transferred
from sava.raft.errors import MembershipBusy, MembershipRefused
from sava.raft.types import NO_NODE, Membership, MembershipChange, NodeId, SnapshotMeta

RETRY_S = 0.1
OPERATION_TIMEOUT_S = 30.0
"""Membership changes wait for a majority and, when promoting, for a learner that catches up."""


@dataclass(frozen=True, slots=True)
class Founded:
    cluster: str
    leader: NodeId
    voters: tuple[NodeId, ...]
    already: bool


@dataclass(frozen=True, slots=True)
class Added:
    node: NodeId
    address: str
    already: bool


class ClusterOperations:
    """Runs on any node; what only the leader may do is forwarded by the replica."""

    def __init__(self, node: RaftNode) -> None:
        self._node = node

    async def init(self, addresses: Sequence[str], *, timeout: float = OPERATION_TIMEOUT_S) -> Founded:
        already = await bootstrap(
            self._node.transport,
            self._node.info,
            addresses,
            voters_now=lambda: self.membership().voters,
            timeout=timeout,
        )
        await self._node.wait_until(
            lambda: self._leader() != NO_NODE, "a leader was elected", timeout=timeout
        )
        return Founded(self._node.info().cluster, self._leader(), self.membership().voters, already)

    async def add(self, address: str, *, timeout: float = OPERATION_TIMEOUT_S) -> Added:
        """Make the node at ``address`` a learner. Repeating it is harmless."""
        cluster = self._node.require_cluster()
        info = await self._node.transport.identify(check_address(address), timeout=IDENTIFY_TIMEOUT_S)
        if info.cluster and info.cluster != cluster:
            raise IdentityConflict(
                f"node {info.node} at {address} belongs to cluster {info.cluster}; "
                "wipe its data directory to add it here"
            )
        await self._node.barrier.wait(timeout)
        membership = self.membership()
        if info.node in membership.members:
            return Added(info.node, membership.address(info.node) or address, already=True)
        holder = next((node for node, taken in membership.addresses if taken == address), None)
        if holder is not None:
            raise InvalidRequest(
                f"{address} is the address of member {holder}; remove that node first if its disk is lost"
            )
        await self._node.transport.bootstrap(address, Bootstrap(cluster, Membership()), timeout=timeout)
        change = MembershipChange(add_learners=((info.node, address),))
        await self._node.ask(ChangeMembership(change), timeout=timeout)
        return Added(info.node, address, already=False)

    async def promote(
        self, node: NodeId, address: str, *, timeout: float = OPERATION_TIMEOUT_S
    ) -> tuple[NodeId, bool]:
        """Make a learner a voter; returns its id, and whether it was one already."""
        target = await self._member(node, address, timeout)
        if target in self.membership().voters:
            return target, True
        change = ChangeMembership(MembershipChange(promote=(target,)))
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await self._node.ask(change, timeout=left)
                return target, False
            except MembershipBusy:
                # Still catching up, or another change under way: had no effect, and a moment may help.
                if left < 2 * RETRY_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def remove(
        self,
        node: NodeId,
        address: str,
        *,
        force: bool,
        check: Callable[[NodeId], None] = lambda node: None,
        timeout: float = OPERATION_TIMEOUT_S,
    ) -> NodeId:
        """Returns once the node is out of a committed configuration; only then may its data be deleted.
        ``check`` raises if the node should stay for reasons of its own; it is not asked when forced."""
        target = await self._member(node, address, timeout)
        if not force:
            check(target)
        if not force and target in self.membership().voters:
            await self._check_rest(target)
        change = MembershipChange(remove=(target,), forced=force)
        await self._node.ask(ChangeMembership(change), timeout=timeout)
        return target

    async def _check_rest(self, leaving: NodeId) -> None:
        """Refuse when the voters that would remain are, as far as they answer now, no majority. The leader
        makes the same check by whom it heard lately; a node that died a moment ago passes there, and the
        change would then wait for it with the cluster standing still."""
        membership = self.membership()
        rest = [voter for voter in membership.voters if voter != leaving]
        answers = await asyncio.gather(*(self._answers(voter, membership) for voter in rest))
        if rest and 2 * sum(answers) <= len(rest):
            silent = [str(voter) for voter, answered in zip(rest, answers, strict=True) if not answered]
            raise MembershipRefused(
                f"without node {leaving}, {len(rest)} voters remain and node {', '.join(silent)} does "
                "not answer: no majority; bring it back or remove it first, or use --force"
            )

    async def _answers(self, voter: NodeId, membership: Membership) -> bool:
        address = membership.address(voter)
        if voter == self._node.info().node or address is None:
            return address is not None
        try:
            return (await self._node.transport.identify(address, timeout=IDENTIFY_TIMEOUT_S)).node == voter
        except SavaError:
            return False

    async def transfer(self, node: NodeId, address: str, *, timeout: float = OPERATION_TIMEOUT_S) -> NodeId:
        """Hand leadership to ``node``, or to the most up-to-date voter when neither id nor address is
        given. Asking for the one that leads already is done at once: a script may repeat the command."""
        target = await self._member(node, address, timeout) if node or address else NO_NODE
        if target and target == self._leader():
            return target
        reply = await self._node.ask(TransferLeadership(target), timeout=timeout)
        assert isinstance(reply, Transferred)
        return reply.to

    async def snapshot(self, *, timeout: float = OPERATION_TIMEOUT_S) -> SnapshotMeta:
        self._node.require_cluster()
        return await self._node.take_snapshot(timeout=timeout)

    def membership(self) -> Membership:
        core = self._node.core_status
        return core.membership if core is not None else Membership()

    def _leader(self) -> NodeId:
        core = self._node.core_status
        return core.leader if core is not None else NO_NODE

    async def _member(self, node: NodeId, address: str, timeout: float) -> NodeId:
        """The member that is meant. Read behind a barrier: this node's own view may be old."""
        self._node.require_cluster()
        await self._node.barrier.wait(timeout)
        membership = self.membership()
        if node:
            found = node if node in membership.members else None
        else:
            found = next((member for member, taken in membership.addresses if taken == address), None)
        if found is None:
            known = ", ".join(f"{member} at {taken}" for member, taken in membership.addresses)
            raise InvalidRequest(
                f"{node or address or 'no node'} is not a member of the cluster; members: {known}"
            )
        return found
