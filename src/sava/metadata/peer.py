"""What nodes of one cluster say to each other: the core's messages, and requests forwarded to the leader.

Every message travels in an ``Envelope`` that names the cluster, both ends and the sender's incarnation. A
node drops what is not meant for it, counts it, and never lets a message from another cluster, another node
with a copied directory, or an earlier incarnation of a peer reach the core.

``Transport`` carries the envelopes. A node calls it to reach others, and it calls the node (``Inbound``) with
what others sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from sava.errors import Outcome, SavaError
from sava.metadata import errors
from sava.metadata.commands import Command, CommandRefused, Result
from sava.metadata.errors import Compacted, LeaseNotFound, OutcomeUnknown
from sava.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    check_message,
)
from sava.raft.types import (
    Busy,
    MalformedMessage,
    Membership,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NodeId,
    NotLeader,
    TransferRefused,
    Transferring,
)
from sava.wal.errors import DiskFull

# -- requests that only the leader answers ---------------------------------------------------------------


class Propose(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The leader stamps the time; a node that forwards must not."""

    command: Command
    session: int = 0
    seq: int = 0
    low: int = 0
    fence_term: int = 0


class ReadIndex(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class KeepAlive(msgspec.Struct, frozen=True, array_like=True, tag=3):
    lease: int


class ChangeMembership(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answered when the change is complete: committed, and not joint any more."""

    change: MembershipChange


class TransferLeadership(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """``to`` 0: the leader picks the most up-to-date voter. Answered when leadership has left this node."""

    to: NodeId


LeaderRequest = Propose | ReadIndex | KeepAlive | ChangeMembership | TransferLeadership


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``index``: a node that has applied it sees the effect (a forwarder waits for that before it answers its
    caller)."""

    index: int
    result: Result


class ReadAt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    index: int


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=3):
    ttl_ms: int


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    index: int


class Transferred(msgspec.Struct, frozen=True, array_like=True, tag=5):
    to: NodeId


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """``maybe_applied`` False: refused before it was appended, definitely without effect. True: the
    outcome is not known yet."""

    code: str
    message: str
    detail: int = 0
    maybe_applied: bool = False


Reply = Committed | ReadAt | Alive | Changed | Transferred | Failed


# -- messages --------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """A request forwarded by a node that does not lead; one hop, never forwarded again."""

    ticket: int
    request: LeaderRequest


class LeaderAnswer(msgspec.Struct, frozen=True, array_like=True, tag=21):
    ticket: int
    reply: Reply


class Conflict(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """'Another process already speaks as you.' The receiver stops: its data directory is a copy."""

    node: NodeId
    nonce: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """A sign of life, between nodes that have nothing else to say (``suspicion``)."""


class Doubt(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The leader's question: what do you know of ``node``?"""

    ticket: int
    node: NodeId


class Opinion(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """The answer; ``sign`` is a ``suspicion.Sign``."""

    ticket: int
    node: NodeId
    sign: int


PeerMessage = (
    VoteRequest
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | TimeoutNow
    | SnapshotChunk
    | SnapshotReply
    | Ask
    | LeaderAnswer
    | Conflict
    | Ping
    | Doubt
    | Opinion
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``incarnation`` counts the sender's starts (durable); ``nonce`` is drawn at each start, so two
    processes that run on copies of one directory can be distinguished. ``address`` is where the sender
    listens: a node that joins must answer a leader before the log has said where the others are."""

    cluster: str
    src: NodeId
    incarnation: int
    nonce: int
    dst: NodeId
    message: PeerMessage
    address: str = ""


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """What a pristine node receives once. ``membership`` holds the founding voters, or is empty for a node
    that joins a running cluster and learns the membership from its log. The cluster id is derived from the
    founding node ids, so that repeating ``init`` — even twice at the same time — names the same cluster."""

    cluster: str
    membership: Membership


class MalformedEnvelope(SavaError):
    """Bytes from the network that are no envelope of this version, or whose message no node sends."""

    outcome = Outcome.UNKNOWN


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


encode_envelope: Callable[[Envelope], bytes] = _encoder.encode


def decode_envelope(data: bytes) -> Envelope:
    """Raises MalformedEnvelope, also for a message of Raft's that no core would send."""
    try:
        envelope = _decoder.decode(data)
        if not isinstance(envelope.message, Ask | LeaderAnswer | Conflict | Ping | Doubt | Opinion):
            check_message(envelope.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEnvelope(f"not an envelope: {error}") from error
    except MalformedMessage as error:
        raise MalformedEnvelope(str(error)) from error
    return envelope


# -- errors by name ------------------------------------------------------------------------------------------
#
# Every error that may leave a node has a stable code, and each code leads back to the error.
#
# A request may fail on another node, or inside an applied command (``CommandRefused``); either way its caller
# gets the type that would have been raised here. Unknown codes, from a newer node, become the base class:
# never a guess.


INTERNAL = "internal"

_BY_TEXT: dict[str, type[SavaError]] = {
    **{
        kind.code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SavaError) and hasattr(kind, "code")
    },
    "busy": Busy,
    "membership_busy": MembershipBusy,
    "membership_refused": MembershipRefused,
    "transfer_refused": TransferRefused,
    "disk_full": DiskFull,
}
"""Errors that are made from their text."""

_CODES: dict[type[SavaError], str] = {
    **{kind: code for code, kind in _BY_TEXT.items()},
    NotLeader: "not_leader",
    Transferring: "transferring",
}


def code_of(error: SavaError) -> str:
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), INTERNAL)


def detail_of(error: SavaError) -> int:
    """The number that belongs to the error, 0 when it has none."""
    match error:
        case LeaseNotFound():
            return error.lease
        case Compacted():
            return error.floor
        case NotLeader():
            return error.leader
        case Transferring():
            return error.target
        case _:
            return 0


def error_from(code: str, message: str, detail: int = 0) -> SavaError:
    match code:
        case LeaseNotFound.code:
            return LeaseNotFound(detail)
        case Compacted.code:
            return Compacted(detail)
        case "not_leader":
            return NotLeader(NodeId(detail))
        case "transferring":
            return Transferring(NodeId(detail))
        case _:
            return _BY_TEXT.get(code, SavaError)(message)


def error_of(reply: Failed | CommandRefused) -> SavaError:
    if isinstance(reply, Failed) and reply.maybe_applied:
        return OutcomeUnknown(reply.message)
    return error_from(reply.code, reply.message, reply.detail)


# -- transport -----------------------------------------------------------------------------------------------


class NodeInfo(msgspec.Struct, frozen=True):
    """What a node says of itself to any peer that asks on its Raft port."""

    node: NodeId
    cluster: str
    """Empty: waiting for initialization."""
    address: str
    founders: tuple[NodeId, ...]
    """The voters named at ``init`` (empty when pristine or joined later)."""
    version: str
    seeds: tuple[str, ...] = ()
    """Addresses of the nodes that are to form a cluster by themselves, this one among them or not."""
    cluster_name: str = ""
    """As configured, for people; seeds compare it before they become one cluster."""
    is_reticent: bool = False
    """It belongs to a cluster, and tells the asker, who has proved nothing, not which."""
    is_fixed: bool = False
    """The id is that of its certificate: it comes back under it also when it has lost its disk."""
    has_history: bool = False
    """Its cluster has elected leaders before."""

    def for_stranger(self, asker: NodeId) -> NodeInfo:
        """What one who is not known to be a broker of the cluster learns: that ``asker``, if it speaks the
        truth, is among the founders, so that a seed can find out why it has no place."""
        founders = tuple(each for each in self.founders if each == asker)
        return NodeInfo(self.node, "", self.address, founders, self.version, is_reticent=True)


class Inbound(Protocol):
    """What a transport needs from the node it serves. All of it is called on the node's event loop. A
    Protocol, as the node stands above transports."""

    def info(self) -> NodeInfo: ...

    def member_address(self, node: NodeId) -> str | None:
        """Where a member of the cluster listens, as far as this node knows."""
        ...

    def receive(self, envelopes: Sequence[Envelope]) -> None: ...

    def unreachable(self, peer: NodeId) -> None:
        """Something sent to ``peer`` was certainly not delivered."""
        ...

    def disconnected(self, peer: NodeId, *, is_refused: bool) -> None:
        """A connection to ``peer`` broke, or could not be made; ``is_refused``: its machine answered that no
        process listens."""
        ...

    async def bind(self, bootstrap: Bootstrap, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """``prepare`` is called before anything is written, and only if the order is one to be obeyed. Raises
        IdentityConflict."""
        ...


class Transport(Protocol):
    """Carries envelopes between nodes. A Protocol, as the simulator has one in memory, in virtual time."""

    def attach(self, inbound: Inbound) -> None:
        """Called once, before anything is sent or received."""
        ...

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        """Queue for delivery, in order; never blocks. A bounded queue per peer drops the newest when full.
        Votes and heartbeats travel apart from appends and snapshot chunks, so that bulk cannot starve
        them."""
        ...

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        """Raises Unavailable naming the address."""
        ...

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        """Raises IdentityConflict, NotAuthenticated or Unavailable."""
        ...

    def dropped(self) -> dict[str, int]:
        """Messages not sent, by reason."""
        ...

    async def close(self) -> None: ...
