"""Bootstrap: how nodes with empty disks become one cluster, and never two.

The cluster id is derived from the ids of the first voters, and each node binds itself to one id for good. So
``bootstrap`` needs no coordinator and may be repeated, interrupted, or run twice at once: the same list names
the same cluster, and a list that differs names another one, which a bound node refuses. A node that lost its
disk has a new id and hence cannot be mistaken for the old one; no cluster is ever made because "my disk is
empty".

    bootstrap(a, b, c)   identify all → all answer, all distinct, each pristine or of *this* cluster → bind
    bootstrap(a, b)      a is bound to the cluster of {a, b, c} → refused, nothing changed

An operator runs it once (``sava cluster init``), or the brokers run it themselves from the ``seed_nodes`` of
their configuration. ``SeedBootstrap`` does that on every pristine seed until the node is bound. What keeps it
from making two clusters:

==================================  =========================================================================
danger                              rule
==================================  =========================================================================
a partition at the first start      all seeds must answer, not a majority: a part of them never suffices
lists that differ (two halves of a  every seed tells its list and its cluster's name; unless all are the same,
migration, a typing error)          no seed is bound. A node that has seeds accepts no other first voters, so
                                    this holds also against a bootstrap that began with an earlier list
a seed that lost its disk           it has a new id, and the others answer that they are bound to a cluster
                                    without it: it waits to be added, and says by which commands
a crash at any step                 binding is durable and idempotent; a seed that is not bound yet begins
                                    again, finds the same ids, and binds itself to the same cluster
a broker that is not a seed         it never bootstraps; it waits to be added
two secrets of one cluster          the first voter (the one with the least id) makes the secret. Of seeds it
                                    alone binds the others, and itself when all are bound
a wiped voter under its former id,  it is not bound to a cluster that has elected leaders: it may have voted
which its certificate fixes         there
==================================  =========================================================================

If all seeds lose their disks, the same list makes a new, empty cluster, because nothing is left that could
tell it from the first start.

The other beginning is an end: ``force_new_cluster`` makes one survivor of a lost majority
a cluster of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from sava.errors import CallerError, SavaError, shown
from sava.metadata.commands import decode_proposal
from sava.metadata.durable import checkpoint_records, write_checkpoint
from sava.metadata.errors import IdentityConflict, InvalidRequest, NotInitialized, Unavailable
from sava.metadata.identity import NodeState, cluster_id_of, open_state
from sava.metadata.machine.limits import DEFAULT_LIMITS, Limits
from sava.metadata.machine.state_machine import SNAPSHOT_FORMAT, StateMachine
from sava.metadata.peer import Bootstrap, NodeInfo, Transport
from sava.metadata.snapshots import save
from sava.raft.messages import decode_membership
from sava.raft.output import Checkpoint, Recovered
from sava.raft.types import NO_NODE, EntryKind, HardState, Membership, NodeId, SnapshotMeta
from sava.tasks import Backoff, cancelled, spawn
from sava.wal.disk import Disk
from sava.wal.log import LogOptions

log = logging.getLogger(__name__)

IDENTIFY_TIMEOUT_S: Final = 3.0
BIND_TIMEOUT_S: Final = 30.0
FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 2.0


def check_address(address: str) -> str:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{shown(address)} is not an address; give host:port of the node's Raft port")
    return address


async def bootstrap(
    transport: Transport,
    own: Callable[[], NodeInfo],
    addresses: Sequence[str],
    *,
    voters_now: Callable[[], Sequence[NodeId]] = lambda: (),
    check: Callable[[Mapping[str, NodeInfo]], None] = lambda infos: None,
    timeout: float = BIND_TIMEOUT_S,
) -> bool:
    """Bind the nodes at ``addresses`` to their cluster; whether they were bound to it already. ``own`` is the
    node that this runs on, ``voters_now`` those of the cluster that it is in, and ``check`` raises if the
    nodes must not become a cluster. Raises Unavailable, IdentityConflict, InvalidRequest."""
    infos = await identify(transport, own(), addresses)
    check(infos)
    members = tuple(sorted((info.node, address) for address, info in infos.items()))
    voters = tuple(node for node, _ in members)
    wanted = cluster_id_of(voters)
    clusters = {info.cluster for info in infos.values()}
    if clusters == {wanted} or (clusters == {own().cluster} and voters == tuple(voters_now())):
        return True
    for address, info in infos.items():
        if info.is_reticent:
            raise IdentityConflict(
                f"node {info.node} at {address} already belongs to a cluster, whose secret this broker "
                "does not know; if `sava cluster init` was interrupted, repeat it on that broker, and use "
                "add-node to grow a cluster"
            )
        if info.cluster not in ("", wanted):
            raise IdentityConflict(
                f"node {info.node} at {address} already belongs to cluster {info.cluster}, "
                "which was founded with another list of nodes; use add-node to grow a cluster"
            )
    _check_no_amnesia(infos)
    order = Bootstrap(wanted, Membership(voters=voters, addresses=members))
    pristine = [address for address, info in infos.items() if not info.cluster]

    async def bind(addresses: Sequence[str]) -> None:
        await asyncio.gather(*(transport.bootstrap(each, order, timeout=timeout) for each in addresses))

    # The first voter makes the cluster's secret, if it is not known yet; the others get it. This node itself
    # comes last: as long as it is not bound, it can begin again.
    own_node, first = own().node, voters[0]
    await bind([each for each in pristine if infos[each].node == first != own_node])
    await bind([each for each in pristine if infos[each].node not in (first, own_node)])
    await bind([each for each in pristine if infos[each].node == own_node])
    return False


def _check_no_amnesia(infos: Mapping[str, NodeInfo]) -> None:
    """A node that has lost its disk, and its votes with it, must not be bound again under its former id.
    Raises IdentityConflict."""
    if not any(info.has_history for info in infos.values()):
        return
    for address, info in infos.items():
        if info.is_fixed and not info.cluster:
            raise IdentityConflict(
                f"node {info.node} at {address} has an empty disk, and its cluster has elected leaders, "
                f"perhaps with its vote: remove node {info.node}, start the broker with a certificate that "
                "names another node id, and add it"
            )


async def identify(transport: Transport, own: NodeInfo, addresses: Sequence[str]) -> dict[str, NodeInfo]:
    """Who is at each address. All must answer, each must be another node, and one of them this one."""
    if not addresses:
        raise InvalidRequest("name at least one node")
    if len(set(addresses)) != len(addresses):
        raise InvalidRequest("an address is listed twice")
    asked = (transport.identify(check_address(each), timeout=IDENTIFY_TIMEOUT_S) for each in addresses)
    found = await asyncio.gather(*asked, return_exceptions=True)
    infos: dict[str, NodeInfo] = {}
    for address, info in zip(addresses, found, strict=True):
        if isinstance(info, BaseException):
            raise Unavailable(f"{info}; nothing was changed, start it and repeat") from info
        twin = next((other for other, known in infos.items() if known.node == info.node), None)
        if twin is not None:
            raise IdentityConflict(
                f"{twin} and {address} are both node {info.node}: "
                "one node listed twice, or a copied data directory"
            )
        infos[address] = info
    if all(info.node != own.node for info in infos.values()):
        raise InvalidRequest(f"the list does not name the node that was asked (node {own.node})")
    return infos


def check_seeds(own: NodeInfo, infos: Mapping[str, NodeInfo]) -> None:
    """Every seed has the same list and the same name of the cluster. Raises IdentityConflict."""
    for address, info in infos.items():
        if info.is_reticent:
            continue
        if set(info.seeds) != set(own.seeds):
            raise IdentityConflict(
                f"the seed at {address} has meta_store.seed_nodes {_listed(info.seeds)}, and this broker has "
                f"{_listed(own.seeds)}; give all of them the same list"
            )
        if info.cluster_name != own.cluster_name:
            raise IdentityConflict(
                f"the seed at {address} has cluster_name {info.cluster_name!r}, and this broker has "
                f"{own.cluster_name!r}; give all of them the same name"
            )


def check_first(own: NodeInfo, infos: Mapping[str, NodeInfo]) -> None:
    """This node is the one that binds the others, unless some belong elsewhere. Raises Unavailable."""
    for address, info in infos.items():
        if info.is_reticent and own.node in info.founders:
            raise Unavailable(
                f"the seed at {address} is bound to a cluster with this broker, which is bound next; if that "
                "lasts, a seed has lost its disk meanwhile: if the cluster was never used, empty the data "
                "directories of all seeds and start them again"
            )
    wanted = cluster_id_of(info.node for info in infos.values())
    if any(info.is_reticent or info.cluster not in ("", wanted) for info in infos.values()):
        return
    address, first = min(infos.items(), key=lambda each: each[1].node)
    if first.node != own.node:
        raise Unavailable(
            f"waiting for node {first.node} at {address}, the first of the seeds, to bind the others"
        )


def check_voters(own: NodeInfo, order: Bootstrap) -> None:
    """A node that has seeds becomes a founding voter beside them alone, or joins a cluster that is there.
    Raises IdentityConflict."""
    first = {address for _, address in order.membership.addresses}
    if own.seeds and first and first != set(own.seeds):
        raise IdentityConflict(
            f"node {own.node} is to form a cluster of its meta_store.seed_nodes {_listed(own.seeds)}, "
            f"and not of {_listed(first)}; use that list, or start it without seed_nodes"
        )


class SeedBootstrap:
    """Forms the cluster of the configured seeds. Owned by the event loop; ends when the node is bound."""

    def __init__(
        self,
        transport: Transport,
        own: Callable[[], NodeInfo],
        *,
        pause_s: float = FIRST_RETRY_S,
    ) -> None:
        self._transport = transport
        self._own = own
        self._backoff = Backoff(pause_s, LONGEST_RETRY_S)
        self._reason = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._own().seeds and not self._own().cluster:
            self._task = spawn(self.run(), name="bootstrap from seeds")

    async def close(self) -> None:
        await cancelled(self._task)

    async def run(self) -> None:
        seeds = self._own().seeds
        while not self._own().cluster:
            try:
                await bootstrap(
                    self._transport,
                    self._own,
                    seeds,
                    check=self._check,
                )
            except SavaError as error:
                await self._explain(error)
            # Seeds that start together must not stay in step: each would bind while the others ask.
            await self._backoff.pause()
        log.info("raft: formed from seeds cluster=%s seeds=%s", self._own().cluster, _listed(seeds))

    def _check(self, infos: Mapping[str, NodeInfo]) -> None:
        check_seeds(self._own(), infos)
        check_first(self._own(), infos)

    async def _explain(self, error: SavaError) -> None:
        """One line each time that the reason changes."""
        reason = str(error)
        if isinstance(error, IdentityConflict | InvalidRequest):
            reason = await self._way_out() or reason
        if reason != self._reason:
            self._reason = reason
            level = logging.INFO if isinstance(error, Unavailable) else logging.WARNING
            log.log(level, "raft: the cluster of the seeds is not formed reason=%s", reason)

    async def _way_out(self) -> str:
        """For a node that finds a cluster in which it has no place; empty if that is not what is wrong."""
        own = self._own()
        for seed in own.seeds:
            try:
                info = await self._transport.identify(seed, timeout=IDENTIFY_TIMEOUT_S)
            except SavaError:
                continue
            name = f"cluster {info.cluster}" if info.cluster else "a cluster"
            if (info.cluster or info.is_reticent) and own.node in info.founders:
                return (
                    f"the seed at {seed} has formed {name} with this broker and one that has "
                    "lost its disk since; if it was never used, empty the data directories of all seeds "
                    "and start them again, else run `sava cluster force-new-cluster` on that seed"
                )
            if info.cluster or info.is_reticent:
                return (
                    f"the seed at {seed} belongs to {name}, and this broker does not; "
                    f"add it: `sava cluster add-node --addr {own.address}`, then `promote-node`; if it has "
                    "lost its disk, `sava cluster remove-node` its former id first"
                )
        return ""


def _listed(addresses: Sequence[str] | set[str]) -> str:
    return ",".join(sorted(addresses)) or "(none)"


# -- a majority is lost --------------------------------------------------------------------------------------
#
# ``force_new_cluster``: one survivor of a lost majority becomes a cluster of its own. A last resort, offline.
#
# What it cannot know: entries that only the lost members held are gone, and entries of its own log that were
# never committed may now take effect. It reports both before it writes anything. What it makes sure of:
#
# * the new cluster has a new id, so a lost member that comes back cannot talk to it;
# * the term is one higher, the membership is this node alone;
# * the revision jumps by a million and all events before it are compacted, so that no watcher and no
#   compare-and-swap can take a revision of the lost future for one of the new present.
#
# Everything becomes effective with one durable record. Before it, only a snapshot file that no record names
# was added; after it, only files that no record names are left to delete.


REVISION_STEP = 1_000_000


class NotConfirmed(CallerError):
    """The operator saw what may be lost and said no. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class ForceReport:
    """What the operator sees, and must agree to."""

    node: NodeId
    old_cluster: str
    new_cluster: str
    missing_members: tuple[NodeId, ...]
    """They must be wiped; whatever they alone hold is lost."""
    known_commit: int
    """Everything up to this index of the log was certainly committed."""
    last_index: int
    """Entries after ``known_commit`` up to this one may never have been committed; they take effect now."""
    revision: int
    """The first revision of the new cluster lies beyond it."""

    @property
    def uncertain_entries(self) -> int:
        return self.last_index - self.known_commit

    def __str__(self) -> str:
        return (
            f"node {self.node} becomes cluster {self.new_cluster} of its own (was {self.old_cluster}); "
            f"{len(self.missing_members)} member(s) {self.missing_members} are given up and must be wiped; "
            f"what only they held is lost; {self.uncertain_entries} entries after {self.known_commit} were "
            f"perhaps never committed and take effect now; revisions continue after {self.revision}"
        )


def force_new_cluster(
    disk: Disk,
    *,
    address: str,
    rng: Random,
    confirm: Callable[[ForceReport], bool],
    limits: Limits = DEFAULT_LIMITS,
    options: LogOptions | None = None,
) -> ForceReport:
    """``disk`` is the data directory of a stopped node; ``address`` is where it will listen. ``confirm`` sees
    what may be lost. Whether another member still answers must be checked by the caller (it takes a
    network).

    Raises NotConfirmed, NotInitialized (there is nothing to recover), and what ``open_state`` raises."""
    state = open_state(disk, rng=rng, options=options)
    try:
        return _force(state, address, rng, confirm, limits)
    finally:
        state.log.close()
        state.release()


def _force(
    state: NodeState, address: str, rng: Random, confirm: Callable[[ForceReport], bool], limits: Limits
) -> ForceReport:
    bootstrap, recovered = state.recovered.bootstrap, state.recovered.core
    if bootstrap is None or recovered is None:
        raise NotInitialized(
            f"{state.disk.path} belongs to no cluster: start the node and run 'sava cluster init'"
        )
    machine, members = _replay(state, recovered, limits)
    machine.bump_revision(REVISION_STEP)
    last_index = recovered.entries[-1].index if recovered.entries else recovered.snapshot.index
    report = ForceReport(
        node=state.node,
        old_cluster=bootstrap.cluster,
        new_cluster=f"{rng.getrandbits(128):032x}",
        missing_members=tuple(node for node in members.members if node != state.node),
        known_commit=max(recovered.snapshot.index, min(recovered.hard_state.commit, last_index)),
        last_index=last_index,
        revision=machine.revision,
    )
    if not confirm(report):
        raise NotConfirmed("force-new-cluster was not confirmed; nothing was changed")
    _write(state, recovered, machine, report, address)
    return report


def _replay(state: NodeState, recovered: Recovered, limits: Limits) -> tuple[StateMachine, Membership]:
    """The state with *every* entry applied: one that was acknowledged may look uncommitted on this node, and
    must not be dropped."""
    snapshot = recovered.snapshot
    machine = (
        StateMachine.restore(state.snapshots.load(snapshot), limits)
        if snapshot.index
        else StateMachine(limits)
    )
    members = snapshot.membership
    for entry in recovered.entries:
        if entry.index <= snapshot.index:
            continue
        if entry.kind is EntryKind.COMMAND:
            machine.apply(decode_proposal(entry.data), entry.term)
        elif entry.kind is EntryKind.MEMBERSHIP:
            members = decode_membership(entry.data)
    return machine, members


def _write(
    state: NodeState, recovered: Recovered, machine: StateMachine, report: ForceReport, address: str
) -> None:
    term = recovered.hard_state.term + 1
    index = report.last_index + 1  # as if the force itself were an entry: no other snapshot has this name
    alone = Membership(voters=(state.node,), addresses=((state.node, address),))
    base = SnapshotMeta(index, term, alone, 0, b"", SNAPSHOT_FORMAT)
    snapshot = save(state.snapshots, base, machine.freeze().chunks())
    checkpoint = Checkpoint(HardState(term, NO_NODE, index), snapshot, (), term)
    write_checkpoint(state.log, checkpoint_records(Bootstrap(report.new_cluster, alone), checkpoint))
    state.snapshots.prune(snapshot)
