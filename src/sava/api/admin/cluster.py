"""The services ``Cluster``, ``Meta`` and ``Doctor`` of the admin port: the Raft group (membership,
leadership, snapshots, status), the metadata store that it keeps, and what this broker says of its own health.

Translations and nothing else: what a call of ``Meta`` means is in ``metadata.store``, what can go wrong in
``metadata.errors``; what follows from an examination, and from those of other brokers, is for ``sava doctor``
to find.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, Final

import sava
from sava.api.admin.brokers import CONFIRM_S, unconfirmed
from sava.api.messages import to_message
from sava.api.metrics.broker import Disks
from sava.cluster.records import Mode
from sava.cluster.view import ClusterView
from sava.config import Config
from sava.errors import CallerError, SavaError
from sava.metadata import commands as c
from sava.metadata.errors import InvalidRequest, Unavailable
from sava.metadata.node import RaftNode
from sava.metadata.replica.replica import ReplicaStatus
from sava.metadata.store import DEFAULT_TIMEOUT_S, OPERATION_TIMEOUT_S, ClusterOperations, MetadataStore
from sava.peers.error_mapping import remaining
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc
from sava.proto import doctor_pb2 as doctor_pb
from sava.proto import doctor_pb2_grpc as doctor_rpc
from sava.raft.core import PeerStatus, Status
from sava.raft.types import MembershipRefused, NodeId
from sava.security.store import PREFIX as SECURITY
from sava.security.store import is_reserved
from sava.storage.broker_storage import BrokerStorage
from sava.storage.objectstore import ObjectStore, Probed, probe

# ruff: noqa: N802 (gRPC names the methods)


class ClusterService(rpc.ClusterServicer):
    def __init__(self, node: RaftNode, view: ClusterView, cluster_name: str) -> None:
        self._node = node
        self._view = view
        self._cluster_name = cluster_name
        self._operations = ClusterOperations(node)

    async def Init(self, request: pb.InitRequest, context: Any) -> pb.InitResponse:
        founded = await self._operations.init(
            tuple(request.nodes), timeout=remaining(context, OPERATION_TIMEOUT_S)
        )
        return pb.InitResponse(
            already_initialized=founded.already,
            cluster_id=founded.cluster,
            leader_id=founded.leader,
            voters=founded.voters,
        )

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        status = self._node.status
        response = pb.StatusResponse(
            self_node_id=status.node,
            raft_addr=self._node.info().address,
            cluster_id=status.cluster,
            cluster_name=self._cluster_name,
            role="waiting",
            membership_state=membership_state(status),
            revision=status.revision,
            keys=status.keys,
            total_bytes=status.total_bytes,
            snapshot_index=status.snapshot_index,
            version=sava.__version__,
        )
        if status.core is None:
            return response
        if request.confirm:
            response.unconfirmed = await unconfirmed(self._node, remaining(context, CONFIRM_S))
        # After the question: the answer to it may have changed who leads.
        response.MergeFrom(core_status(self._node.status.core or status.core))
        return response

    async def AddNode(self, request: pb.AddNodeRequest, context: Any) -> pb.AddNodeResponse:
        added = await self._operations.add(request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S))
        return pb.AddNodeResponse(node_id=added.node, raft_addr=added.address, already_member=added.already)

    async def PromoteNode(self, request: pb.PromoteNodeRequest, context: Any) -> pb.PromoteNodeResponse:
        node, already = await self._operations.promote(
            NodeId(request.node_id), request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S)
        )
        return pb.PromoteNodeResponse(node_id=node, already_voter=already)

    async def RemoveNode(self, request: pb.RemoveNodeRequest, context: Any) -> pb.RemoveNodeResponse:
        node = await self._operations.remove(
            NodeId(request.node_id),
            request.addr,
            force=request.force,
            check=partial(check_leaving, self._view),
            timeout=remaining(context, OPERATION_TIMEOUT_S),
        )
        return pb.RemoveNodeResponse(node_id=node)

    async def TransferLeader(
        self, request: pb.TransferLeaderRequest, context: Any
    ) -> pb.TransferLeaderResponse:
        leader = await self._operations.transfer(
            NodeId(request.node_id), request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S)
        )
        return pb.TransferLeaderResponse(leader_id=leader)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        meta = await self._operations.snapshot(timeout=remaining(context, OPERATION_TIMEOUT_S))
        return pb.SnapshotResponse(
            node_id=self._node.info().node, index=meta.index, term=meta.term, size=meta.size
        )


def check_leaving(view: ClusterView, node: NodeId) -> None:
    """Raise MembershipRefused while the node serves topics, or may get some: what it alone knows of them
    would go with it."""
    if not view.is_ready:
        raise Unavailable("this broker does not know yet which topics the node has")
    owned = sorted(entry.name for entry in view.owned_by(node))
    way_out = f"run `sava brokers drain {node}` first, or use --force"
    if owned:
        raise MembershipRefused(
            f"node {node} still has {len(owned)} topic(s), such as {owned[0]}; {way_out} and lose what only "
            "this node knows of them"
        )
    if node in view.brokers and view.mode(node).mode is not Mode.DRAINED:
        raise MembershipRefused(
            f"node {node} is a broker that is {view.mode(node).mode.value} and may get topics; {way_out}"
        )


def membership_state(status: ReplicaStatus) -> str:
    if status.removed:
        return "removed"
    if status.core is None:
        return "waiting"
    return "joint" if status.core.membership.is_joint else "stable"


def core_status(core: Status) -> pb.StatusResponse:
    membership = core.membership
    progress = {peer.node: peer for peer in core.peers}
    return pb.StatusResponse(
        leader_id=core.leader,
        current_term=core.term,
        last_applied=core.applied,
        voters=membership.voters,
        learners=membership.learners,
        role=core.role.value,
        commit=core.commit,
        last_index=core.last_index,
        first_index=core.first_index,
        transferring_to_id=core.transferring_to,
        members=[
            member_status(node, membership.address(node) or "", _role(core, node), progress.get(node))
            for node in membership.members
        ],
    )


def member_status(node: NodeId, address: str, role: str, peer: PeerStatus | None) -> pb.MemberStatus:
    member = pb.MemberStatus(node_id=node, raft_addr=address, role=role)
    if peer is not None:
        member.match = peer.match
        member.progress = peer.state
        member.recently_active = peer.recently_active
    return member


def _role(core: Status, node: NodeId) -> str:
    if node in core.membership.voters:
        return "voter"
    return "learner" if node in core.membership.learners else "outgoing"


# -- the metadata store ----------------------------------------------------------------------------


def key_value(kv: c.KeyValue | None) -> pb.KeyValue | None:
    return None if kv is None else to_message(pb.KeyValue, kv)


def key_values(kvs: Iterable[c.KeyValue]) -> list[pb.KeyValue]:
    return [to_message(pb.KeyValue, kv) for kv in kvs]


def event(change: c.Event) -> pb.Event:
    return to_message(pb.Event, change, kv=key_value(change.kv), prev=key_value(change.prev))


def operation(message: pb.Operation) -> c.Operation:
    match message.WhichOneof("operation"):
        case "put":
            return c.Put(message.put.key, message.put.value, message.put.lease)
        case "delete":
            return c.Delete(message.delete.key)
        case "delete_prefix":
            return c.DeletePrefix(message.delete_prefix.prefix)
        case "allocate_id":
            return c.AllocateId(message.allocate_id.key, message.allocate_id.count or 1)
        case "get":
            return c.Get(message.get.key)
        case _:
            raise InvalidRequest("a transaction holds an operation of a kind that this version does not know")


def operation_result(result: c.OperationResult) -> pb.OperationResult:
    match result:
        case c.PutResult(prev=prev):
            return pb.OperationResult(prev=key_values([prev] if prev else []))
        case c.DeleteResult(prev=deleted):
            return pb.OperationResult(prev=key_values(deleted))
        case c.AllocateResult(first=first):
            return pb.OperationResult(first_id=first)
        case c.GetResult(kv=kv):
            return pb.OperationResult(kv=key_value(kv))


def compare(message: pb.Compare) -> c.Compare:
    try:
        target, relation = c.Target(message.target), c.Relation(message.relation)
    except ValueError:
        raise InvalidRequest(
            "a transaction holds a comparison of a kind that this version does not know"
        ) from None
    return c.Compare(message.key, target, relation, message.operand)


class KeyReserved(CallerError):
    """A key below ``/security/``: what is there has commands of its own."""


def _unreserved(text: str, *, is_range: bool = False) -> None:
    """Roles and bindings are not changed key by key, nor read by those who may read other keys. Raises
    KeyReserved."""
    if text.startswith(SECURITY):
        raise KeyReserved(
            f"{text[:200]!a} holds roles, bindings or quotas, which `sava auth` shows and changes"
        )
    if is_reserved(text, is_range=is_range):
        raise KeyReserved(f"{text!a} covers {SECURITY}, which `sava auth` shows; name a prefix beside it")


def _unreserved_txn(request: pb.TxnRequest) -> None:
    """Raises KeyReserved."""
    for comparison in request.compare:
        _unreserved(comparison.key)
    for each in (*request.then, *request.otherwise):
        kind = each.WhichOneof("operation")
        if kind == "delete_prefix":
            _unreserved(each.delete_prefix.prefix, is_range=True)
        elif kind is not None:
            _unreserved(getattr(each, kind).key)


class MetaService(rpc.MetaServicer):
    """The keys of the metadata store, but for those of ``sava.security.store``."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        _unreserved(request.key)
        kv = await self._store.get(
            request.key,
            linearizable=not request.local,
            min_revision=request.min_revision,
            timeout=remaining(context, DEFAULT_TIMEOUT_S),
        )
        return pb.GetResponse(kv=key_value(kv), revision=self._store.local.revision)

    async def Range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        _unreserved(request.prefix, is_range=True)
        result = await self._store.range(
            request.prefix,
            limit=request.limit,
            start_after=request.start_after,
            linearizable=not request.local,
            min_revision=request.min_revision,
            timeout=remaining(context, DEFAULT_TIMEOUT_S),
        )
        return pb.RangeResponse(kvs=key_values(result.kvs), revision=result.revision, more=result.more)

    async def Put(self, request: pb.PutRequest, context: Any) -> pb.PutResponse:
        _unreserved(request.key)
        conditions = []
        if request.if_absent:
            conditions.append(c.Compare(request.key, c.Target.VERSION, c.Relation.EQUAL, 0))
        if request.HasField("if_mod_revision"):
            conditions.append(
                c.Compare(request.key, c.Target.MOD_REVISION, c.Relation.EQUAL, request.if_mod_revision)
            )
        then = (c.Put(request.key, request.value, request.lease),)
        result = await self._store.txn(
            conditions, then, (c.Get(request.key),), timeout=remaining(context, DEFAULT_TIMEOUT_S)
        )
        outcome = result.results[0]
        prev = outcome.kv if isinstance(outcome, c.GetResult) else getattr(outcome, "prev", None)
        return pb.PutResponse(succeeded=result.succeeded, revision=result.revision, prev=key_value(prev))

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        _unreserved(request.key, is_range=request.prefix)
        delete = self._store.delete_prefix if request.prefix else self._store.delete
        result = await delete(request.key, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        (outcome,) = result.results
        assert isinstance(outcome, c.DeleteResult)
        return pb.DeleteResponse(revision=result.revision, prev=key_values(outcome.prev))

    async def Txn(self, request: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        _unreserved_txn(request)
        result = await self._store.txn(
            [compare(message) for message in request.compare],
            [operation(message) for message in request.then],
            [operation(message) for message in request.otherwise],
            timeout=remaining(context, DEFAULT_TIMEOUT_S),
        )
        results = [operation_result(outcome) for outcome in result.results]
        return pb.TxnResponse(succeeded=result.succeeded, revision=result.revision, results=results)

    async def AllocateId(self, request: pb.AllocateIdRequest, context: Any) -> pb.AllocateIdResponse:
        _unreserved(request.key)
        first = await self._store.allocate_id(
            request.key, count=request.count or 1, timeout=remaining(context, DEFAULT_TIMEOUT_S)
        )
        return pb.AllocateIdResponse(first_id=first)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        """Flow control is gRPC's: while the reader does not read, ``yield`` waits, the watcher's bounded
        queue fills, and the watch ends with Compacted instead of growing."""
        _unreserved(request.prefix, is_range=True)
        established = self._store.local.revision
        watch = self._store.watch(request.prefix, from_revision=request.from_revision)
        try:
            first = request.from_revision - 1 if request.from_revision else established
            yield pb.WatchResponse(revision=first)
            async for batch in watch:
                yield pb.WatchResponse(
                    revision=batch.revision, events=[event(change) for change in batch.events]
                )
        finally:
            watch.close()

    async def GrantLease(self, request: pb.GrantLeaseRequest, context: Any) -> pb.GrantLeaseResponse:
        lease = await self._store.grant_lease(request.ttl_ms, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        return pb.GrantLeaseResponse(lease=lease)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveResponse:
        ttl_ms = await self._store.keep_alive(request.lease, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        return pb.KeepAliveResponse(ttl_ms=ttl_ms)

    async def RevokeLease(self, request: pb.RevokeLeaseRequest, context: Any) -> pb.RevokeLeaseResponse:
        await self._store.revoke_lease(request.lease, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        return pb.RevokeLeaseResponse()


# -- this broker's health --------------------------------------------------------------------------


PROBE_S: Final = 3.0
"""For each call to the object store. Brokers themselves are more patient; an operator who asks is not."""
ATTEMPTS: Final = 2


class DoctorService(doctor_rpc.DoctorServicer):
    def __init__(
        self,
        config: Config,
        disks: Disks,
        storage: BrokerStorage,
        ready: Callable[[], tuple[bool, str]],
        *,
        broker: int,
    ) -> None:
        self._config = config
        self._disks = disks
        self._storage = storage
        self._ready = ready
        self._broker = broker

    async def Examine(self, request: doctor_pb.ExamineRequest, context: Any) -> doctor_pb.Examination:
        disks = await self._disks.look()
        probed = await self._probe() if request.probe_store else None
        ready, reason = self._ready()
        return doctor_pb.Examination(
            broker_id=self._broker,
            version=sava.__version__,
            ready=ready,
            ready_reason=reason,
            disks=[to_message(doctor_pb.DiskRoom, room, path=str(room.path)) for room in disks],
            store=probed,
            journal_held_bytes=self._storage.journal.held_bytes,
            leftover_topic_ids=self._storage.leftovers,
            clock=time.time_ns() // 1000,
        )

    async def _probe(self) -> doctor_pb.StoreProbe:
        url = self._config.storage.url
        try:
            found = await probe(ObjectStore.open(url, timeout_s=PROBE_S, attempts=ATTEMPTS))
        except SavaError as error:
            found = Probed(error=str(error))
        return to_message(doctor_pb.StoreProbe, found, url=url, reachable=found.is_reachable)
