"""The service ``Ledgers`` of the admin port: the records of ledgers, how far the own one is, and the loss
that an operator may accept.

Any broker lists them: records are in the metadata store. How far each disk is, only the ledger's owner
knows, and is asked; how far a recovery is, only the leader. Recoveries are begun and given up by the leader
(NotController, and the call is passed on to it).
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from sava.api.messages import to_message
from sava.cluster.records import LedgerUnknown
from sava.errors import SavaError
from sava.ledger.failover import Failover, LossReport, UncleanRecovery
from sava.ledger.protocol import (
    LedgerId,
    LedgerRecord,
    LedgerState,
    Loss,
    Range,
    StorageId,
)
from sava.ledger.registry import LedgerRecords, LiveBrokers, Stored
from sava.ledger.writer import LedgerWriter
from sava.peers.forwarding import Forwarder, is_forwarded
from sava.proto import ledgers_pb2 as pb
from sava.proto import ledgers_pb2_grpc as rpc

LIST: Final = "/sava.admin.Ledgers/ListLedgers"
DESCRIBE: Final = "/sava.admin.Ledgers/DescribeLedger"
ASK_S: Final = 5.0
BY_THE_LEADER: Final = "recovery: by the leader"

Reply = TypeVar("Reply", pb.ListLedgersResponse, pb.Ledger)


class LedgersService(rpc.LedgersServicer):
    def __init__(
        self,
        records: LedgerRecords,
        failover: Failover,
        losses: UncleanRecovery,
        live_brokers: LiveBrokers,
        forwarder: Forwarder,
        own: Callable[[], LedgerWriter | None],
    ) -> None:
        """``own`` is the ledger that this broker writes."""
        self._records = records
        self._failover = failover
        self._losses = losses
        self._live_brokers = live_brokers
        self._forwarder = forwarder
        self._own = own

    async def ListLedgers(self, request: pb.ListLedgersRequest, context: Any) -> pb.ListLedgersResponse:
        found = await self._records.all()
        ledgers = [self._describe(ledger, stored.record) for ledger, stored in found.items()]
        listed = pb.ListLedgersResponse(ledgers=ledgers)
        if any(each.status == BY_THE_LEADER for each in ledgers):
            return await self._as_the_leader_tells(LIST, request, listed, context)
        return listed

    async def DescribeLedger(self, request: pb.DescribeLedgerRequest, context: Any) -> pb.Ledger:
        ledger, stored = _one_of(await self._records.of(request.broker_id), request)
        described = self._describe(ledger, stored.record)
        if stored.record.state is LedgerState.OPEN:
            await self._add_positions(ledger, described)
        if described.status == BY_THE_LEADER:
            return await self._as_the_leader_tells(DESCRIBE, request, described, context)
        return described

    async def RecoverLedger(self, request: pb.RecoverLedgerRequest, context: Any) -> pb.RecoverLedgerResponse:
        ledger = LedgerId(request.broker_id, request.incarnation)
        if request.HasField("accepted"):
            loss = _loss_of(request.accepted)
            is_accepted = await self._losses.accept(ledger, loss)
            return pb.RecoverLedgerResponse(loss=request.accepted, accepted=is_accepted)
        return _told(await self._losses.report(ledger))

    # -- describing ----------------------------------------------------------------------------

    def _describe(self, ledger: LedgerId, record: LedgerRecord) -> pb.Ledger:
        origin = record.origin
        storages = dict.fromkeys((*record.storages, *record.holders))
        return pb.Ledger(
            broker_id=ledger.broker,
            incarnation=ledger.incarnation,
            state=record.state.value,
            status=self._status(ledger, record),
            degraded=record.is_degraded and record.state is LedgerState.OPEN,
            write_quorum=record.qw,
            ack_quorum=record.qa,
            epoch=record.epoch,
            members=[self._member(storage, origin, record) for storage in storages],
            fragments=[
                pb.LedgerFragment(start=each.start, storage_ids=each.members, ack_quorum=each.qa)
                for each in record.fragments
            ],
            floor=record.floor,
            end=record.end,
            lost=map(_range, record.lost),
            error=self._failover.trouble(ledger, origin),
        )

    def _status(self, ledger: LedgerId, record: LedgerRecord) -> str:
        origin = self._live_brokers.find(record.origin)
        if record.state is LedgerState.CLOSED:
            return "served by its broker" if origin is not None else self._status_of_tails(record)
        if self._failover.is_continued(ledger):
            return "written" if record.state is LedgerState.OPEN else "about to be ended"
        coordinator = self._failover.recovery(ledger)
        if coordinator is None:
            return BY_THE_LEADER
        status = f"recovery: {coordinator.phase.value}"
        if coordinator.loss() is None:
            return status
        needed = coordinator.answers_needed
        return f"{status}, waits for " + (
            f"{needed} more disk{'s' if needed > 1 else ''}" if needed else "a part that no disk has intact"
        )

    def _status_of_tails(self, record: LedgerRecord) -> str:
        """Of a closed ledger whose own disk is gone. Any broker can say that no disk with all of it is
        registered; that the disks which are there lack a part, only the broker that read them."""
        is_held = any(self._live_brokers.find(holder) is not None for holder in record.holders)
        if is_held and not self._failover.lacks_bytes(record.origin):
            return "its topics go to others"
        return "its topics go to others, waits for a part that no disk has intact"

    def _member(self, storage: StorageId, origin: StorageId, record: LedgerRecord) -> pb.LedgerMember:
        holder = self._live_brokers.find(storage)
        return pb.LedgerMember(
            storage_id=storage,
            broker_id=holder.broker if holder is not None else 0,
            is_owner=storage == origin,
            is_holder=storage in record.holders,
        )

    async def _as_the_leader_tells(self, method: str, request: Message, own: Reply, context: Any) -> Reply:
        """Its answer; ``own`` if there is none, which is what the records say."""
        if is_forwarded():
            return own
        try:
            told = await self._forwarder.ask_leader(method, request, type(own), timeout=ASK_S)
        except SavaError:
            return own
        return own if told is None else told

    async def _add_positions(self, ledger: LedgerId, described: pb.Ledger) -> None:
        own = self._own()
        if own is not None and own.owner.ledger == ledger:
            _add_own_positions(own, described)
        elif ledger.broker != self._forwarder.broker and self._failover.is_continued(ledger):
            request = pb.DescribeLedgerRequest(broker_id=ledger.broker, incarnation=ledger.incarnation)
            try:
                answer = await self._forwarder.ask(
                    "admin", DESCRIBE, request, pb.Ledger, broker=ledger.broker, timeout=ASK_S
                )
            except SavaError:
                return  # what the record says is said without it
            if answer.HasField("positions"):
                described.CopyFrom(answer)


def _add_own_positions(own: LedgerWriter, described: pb.Ledger) -> None:
    owner = own.owner
    durable = owner.own_durable
    described.positions.CopyFrom(
        pb.LedgerPositions(floor=owner.floor, committed=owner.commit, durable=durable, end=owner.end)
    )
    for member in described.members:
        member.durable = durable if member.is_owner else owner.durable_end(StorageId(member.storage_id))
        member.behind = max(0, owner.end - member.durable)


def _one_of(found: Mapping[LedgerId, Stored], request: pb.DescribeLedgerRequest) -> tuple[LedgerId, Stored]:
    wanted = LedgerId(request.broker_id, request.incarnation)
    if not request.incarnation and found:
        wanted = max(found)
    if wanted not in found:
        raise LedgerUnknown(wanted)
    return wanted, found[wanted]


def _told(report: LossReport) -> pb.RecoverLedgerResponse:
    loss = pb.LedgerLoss(missing=map(_range, report.loss.missing), silent=report.loss.silent)
    if report.loss.unknown_from is not None:
        loss.unknown_from = report.loss.unknown_from
    return pb.RecoverLedgerResponse(
        loss=loss,
        answers_needed=report.answers_needed,
        topics=[to_message(pb.TopicLoss, each) for each in report.topics],
    )


def _loss_of(loss: pb.LedgerLoss) -> Loss:
    return Loss(
        tuple(Range(part.start, part.end) for part in loss.missing),
        loss.unknown_from if loss.HasField("unknown_from") else None,
        tuple(map(StorageId, loss.silent)),
    )


def _range(part: Range) -> pb.PositionRange:
    return pb.PositionRange(start=part.start, end=part.end)
