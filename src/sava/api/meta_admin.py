"""The ``Meta`` service of the admin port: the metadata store, for operators and tests.

A translation and nothing else: what a call means is in ``metadata.store``, what can go wrong in
``metadata.errors``.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from sava.errors import SavaError
from sava.metadata import commands as c
from sava.metadata.errors import InvalidRequest
from sava.metadata.store import DEFAULT_TIMEOUT_S, MetadataStore
from sava.peers import error_mapping
from sava.peers.error_mapping import remaining
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc


def key_value(kv: c.KeyValue | None) -> pb.KeyValue | None:
    if kv is None:
        return None
    return pb.KeyValue(
        key=kv.key,
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease=kv.lease,
    )


def key_values(kvs: Iterable[c.KeyValue]) -> list[pb.KeyValue]:
    return [converted for kv in kvs if (converted := key_value(kv)) is not None]


def event(change: c.Event) -> pb.Event:
    return pb.Event(
        revision=change.revision, key=change.key, kv=key_value(change.kv), prev=key_value(change.prev)
    )


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


class MetaService(rpc.MetaServicer):
    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        async with error_mapping.told(context):
            kv = await self._store.get(
                request.key,
                linearizable=not request.local,
                min_revision=request.min_revision,
                timeout=remaining(context, DEFAULT_TIMEOUT_S),
            )
        return pb.GetResponse(kv=key_value(kv), revision=self._store.local.revision)

    async def Range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        async with error_mapping.told(context):
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
        conditions = []
        if request.if_absent:
            conditions.append(c.Compare(request.key, c.Target.VERSION, c.Relation.EQUAL, 0))
        if request.HasField("if_mod_revision"):
            conditions.append(
                c.Compare(request.key, c.Target.MOD_REVISION, c.Relation.EQUAL, request.if_mod_revision)
            )
        then = (c.Put(request.key, request.value, request.lease),)
        async with error_mapping.told(context):
            result = await self._store.txn(
                conditions, then, (c.Get(request.key),), timeout=remaining(context, DEFAULT_TIMEOUT_S)
            )
        outcome = result.results[0]
        prev = outcome.kv if isinstance(outcome, c.GetResult) else getattr(outcome, "prev", None)
        return pb.PutResponse(succeeded=result.succeeded, revision=result.revision, prev=key_value(prev))

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        delete = self._store.delete_prefix if request.prefix else self._store.delete
        async with error_mapping.told(context):
            result = await delete(request.key, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        (outcome,) = result.results
        assert isinstance(outcome, c.DeleteResult)
        return pb.DeleteResponse(revision=result.revision, prev=key_values(outcome.prev))

    async def Txn(self, request: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        async with error_mapping.told(context):
            result = await self._store.txn(
                [compare(message) for message in request.compare],
                [operation(message) for message in request.then],
                [operation(message) for message in request.otherwise],
                timeout=remaining(context, DEFAULT_TIMEOUT_S),
            )
        results = [operation_result(outcome) for outcome in result.results]
        return pb.TxnResponse(succeeded=result.succeeded, revision=result.revision, results=results)

    async def AllocateId(self, request: pb.AllocateIdRequest, context: Any) -> pb.AllocateIdResponse:
        async with error_mapping.told(context):
            first = await self._store.allocate_id(
                request.key, count=request.count or 1, timeout=remaining(context, DEFAULT_TIMEOUT_S)
            )
        return pb.AllocateIdResponse(first_id=first)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        """Flow control is gRPC's: while the reader does not read, ``yield`` waits, the watcher's bounded
        queue fills, and the watch ends with Compacted instead of growing."""
        try:
            established = self._store.local.revision
            watch = self._store.watch(request.prefix, from_revision=request.from_revision)
        except SavaError as error:
            await error_mapping.refuse(context, error)
        try:
            first = request.from_revision - 1 if request.from_revision else established
            yield pb.WatchResponse(revision=first)
            async for batch in watch:
                yield pb.WatchResponse(
                    revision=batch.revision, events=[event(change) for change in batch.events]
                )
        except SavaError as error:
            await error_mapping.refuse(context, error)
        finally:
            watch.close()

    async def GrantLease(self, request: pb.GrantLeaseRequest, context: Any) -> pb.GrantLeaseResponse:
        async with error_mapping.told(context):
            lease = await self._store.grant_lease(
                request.ttl_ms, timeout=remaining(context, DEFAULT_TIMEOUT_S)
            )
        return pb.GrantLeaseResponse(lease=lease)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveResponse:
        async with error_mapping.told(context):
            ttl_ms = await self._store.keep_alive(
                request.lease, timeout=remaining(context, DEFAULT_TIMEOUT_S)
            )
        return pb.KeepAliveResponse(ttl_ms=ttl_ms)

    async def RevokeLease(self, request: pb.RevokeLeaseRequest, context: Any) -> pb.RevokeLeaseResponse:
        async with error_mapping.told(context):
            await self._store.revoke_lease(request.lease, timeout=remaining(context, DEFAULT_TIMEOUT_S))
        return pb.RevokeLeaseResponse()
