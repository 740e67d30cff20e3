"""``ConsumerService``: Danube's consumers, which receive one message at a time on a stream and ack each in a
call. The path of a delivery reads from top to bottom: the calls, the stream of one client, the sessions of
this broker, the credit window of a stream.

``Subscribe`` names a consumer and gives it an id; ``ReceiveMessages`` brings the id and is its stream. The
two are apart in time, and a client comes back with the id alone after the broker was restarted. So an id
stands for a *session*, known by a record in the metadata store, and only a stream attaches to it:

    Subscribe(orders, s, c) ─▶ session 7, idle    ReceiveMessages(7) ─▶ attached    the stream ends ─▶ idle

An idle session holds nothing back: a consumer of another name can have an exclusive subscription, a failover
subscription promotes the next, messages in flight go to others. Only on non-reliable topics a session that
was just given out collects what is published until its stream comes, since nothing else would keep it.

**One session, two streams.** The newest stream has the session. The one before is kept open and silent, and
gets the session back if the newer one goes. Ending it would do harm: Danube's Python client would open its
stream again at once with the same id, take the session from the newer one, which would do the same, without
end.

**A topic that moves.** Danube's clients look a topic up at the broker that they were with last, and open a
stream that ended again at once. So a stream that ends because the topic moves, or because its owner died,
brings them nothing but the same broker again. ``ConsumerStream`` keeps the stream open instead, silent, until
a broker has the topic:

    client ═══▶ this broker ───▶ its own session ─ TopicMoved ─▶ the owner's ─ broken ─▶ the next owner's …

What was delivered and not acked comes again from the new owner, as after any broken stream. Acks are
forwarded like any call. A stream that no broker can serve for a while fails, and one whose consumer the owner
does not know fails as it would there.

**Streams that fail.** The Python client does not wait between two attempts to open a stream, whatever the
status. So a stream that cannot be served, for its id is unknown or its topic is not there yet, is held back
for a while before it fails. The health check of an unknown id, which makes the client subscribe again once
its stream has ended, ends it.

**Too large messages.** Sava's own producers can send messages that Danube's clients refuse to receive. Such a
client's stream would fail, be opened again, get the same message, and fail again. So the broker refuses it in
the client's name, and the subscription's failure policy decides what becomes of it.

**Back-pressure.** A client that does not read lets HTTP/2's flow control stop the writes to its stream, and a
stream gets nothing new from its subscription while it is not written to; no other stream waits. HTTP/2 alone
stops a broker only when a client's buffers are full, and those hold hundreds of small messages. A client that
works a second on each has what is in its buffers for minutes, while the ack timeout, thirty seconds by
default, takes it for lost: every message would be delivered several times, and be dead-lettered in the end.
So on reliable topics a stream is ahead of its client's acks by a ``CreditWindow`` that follows the client. It
begins small, grows by one with each ack that comes promptly (it doubles in the time of a round trip), and
shrinks when acks take long:

    fast client   64 ▶ 128 ▶ … ▶ 1000       acks come within milliseconds
    slow client   64 ▶ 32 ▶ 16 ▶ 10         acks take longer than a third of the ack timeout

A message that is not acked leaves the window after that time, so a client that does not ack, or loses one
message in a thousand, is slow and never stands still. If the subscription's own limit of unacked messages is
set to no more than the largest window, that limit alone counts.

**Topics of other brokers.** An id says which topic it is of by a number. Of a topic that this broker has not
loaded, the metadata store is asked for the name now and then, and a topic that was created since is not in
its answer: no consumer would have such an id. So the names of topics that a client has subscribed to through
this broker are remembered, wherever the topics are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any, Final

import grpc

from sava.api.danube.wire import (
    MAX_PAYLOAD_BYTES,
    Composer,
    answer,
    required,
    topic_name,
)
from sava.cluster.view import NotServed
from sava.errors import SavaError
from sava.peers import forwarding
from sava.peers.channels import Unreachable
from sava.peers.error_mapping import Relayed
from sava.peers.forwarding import Forwarder, is_forwarded
from sava.peers.guard import require_topic
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.security.permissions import Permission
from sava.security.principal import current
from sava.security.quotas import Quotas, Usage
from sava.topics.consumer import ConsumerHandle, KnownConsumer, topic_of_consumer
from sava.topics.errors import (
    ConsumerReplaced,
    ConsumerUnknown,
    MessageInvalid,
    NotOwner,
    SubscriptionBusy,
    TopicUnknown,
)
from sava.topics.names import TopicName
from sava.topics.served import ServedTopics
from sava.topics.specs import LATEST, FailurePolicy, SubscriptionSpec, SubscriptionType
from sava.topics.subscription import Subscription
from sava.topics.topic import SubscribeOptions, Topic

# ruff: noqa: N802 (gRPC names the methods)


class ConsumerService(rpc.ConsumerServiceServicer):
    def __init__(
        self,
        topics: ServedTopics,
        sessions: ConsumerSessions,
        forwarder: Forwarder,
        broker_url: str,
        quotas: Quotas,
    ) -> None:
        self._quotas = quotas
        self._topics = topics
        self._sessions = sessions
        self._forwarder = forwarder
        self._broker_url = broker_url

    async def Subscribe(self, request: pb.ConsumerRequest, context: Any) -> pb.ConsumerResponse:
        options = subscribe_options(
            required(request.subscription, "subscription"),
            _subscription_type(request.subscription_type),
            required(request.consumer_name, "consumer_name"),
            tuple(request.key_filters),
        )
        consumer_id = await self._sessions.subscribe(required(request.topic_name, "topic_name"), options)
        return pb.ConsumerResponse(
            request_id=request.request_id, consumer_id=consumer_id, consumer_name=request.consumer_name
        )

    async def ReceiveMessages(  # type: ignore[override]  # the generated type knows only generators
        self, request: pb.ReceiveRequest, context: Any
    ) -> None:
        began = asyncio.get_running_loop().time()
        try:
            with self._quotas.stream(current.get(), context.peer()) as usage:
                write = _metered(context.write, usage)
                if is_forwarded():
                    await self._sessions.serve(request.consumer_id, write, self._broker_url)
                else:
                    await ConsumerStream(
                        self._sessions, self._forwarder, self._broker_url, request, context, write
                    ).run()
        except Exception as error:
            lasted = asyncio.get_running_loop().time() - began
            if lasted < HOLD_S and not is_forwarded():
                await self._sessions.hold(request.consumer_id, HOLD_S - lasted)
            if not isinstance(error, SavaError):
                raise
            if isinstance(error, SubscriptionBusy):
                # Not PERMISSION_DENIED, after which some clients give up for good: the other one may leave.
                error = ConsumerUnknown(str(error))
            await answer(context, error)

    async def Ack(self, request: pb.AckRequest, context: Any) -> pb.AckResponse:
        topic = await self._load(request)
        offset = request.msg_id.topic_offset
        topic.ack(request.subscription_name, ((offset, offset + 1),))
        self._sessions.answered(topic.name, request.subscription_name, offset)
        return pb.AckResponse(request_id=request.request_id)

    async def Nack(self, request: pb.NackRequest, context: Any) -> pb.NackResponse:
        topic = await self._load(request)
        offset = request.msg_id.topic_offset
        topic.nack(
            request.subscription_name,
            ((offset, offset + 1),),
            delay_ms=request.delay_ms,
            reason=request.reason,
        )
        self._sessions.answered(topic.name, request.subscription_name, offset)
        return pb.NackResponse(request_id=request.request_id)

    async def _load(self, request: pb.AckRequest | pb.NackRequest) -> Topic:
        """The topic of an ack. Raises MessageInvalid, TopicUnknown."""
        if not request.HasField("msg_id"):
            raise MessageInvalid("msg_id is missing")
        required(request.subscription_name, "subscription_name")
        return await self._topics.get(topic_name(required(request.msg_id.topic_name, "msg_id.topic_name")))


def _metered(write: Write, usage: Usage) -> Write:
    async def metered(message: pb.StreamMessage) -> None:
        if usage.consuming is not None:
            await usage.consumed(len(message.payload))
        await write(message)

    return metered


def _subscription_type(number: int) -> SubscriptionType:
    try:
        return SubscriptionType(number)
    except ValueError:
        known = ", ".join(f"{kind.name} ({kind.value})" for kind in SubscriptionType)
        raise MessageInvalid(f"subscription_type {number} is not one of {known}") from None


# -- one client's stream ---------------------------------------------------------------------------


RECEIVE_MESSAGES: Final = "/danube.ConsumerService/ReceiveMessages"
PATIENCE_S: Final = 15.0
"""How long a stream waits for a broker that has its topic."""
SERVED_S: Final = 1.0
"""A stream that has lasted for this time was served."""
PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0


class ConsumerStream:
    """Owned by the event loop."""

    def __init__(
        self,
        sessions: ConsumerSessions,
        forwarder: Forwarder,
        broker_url: str,
        request: pb.ReceiveRequest,
        context: Any,
        write: Write,
    ) -> None:
        """``write``: to the client, of what is served here; another broker counts what it serves itself."""
        self._write = write
        self._sessions = sessions
        self._forwarder = forwarder
        self._broker_url = broker_url
        self._request = request
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._give_up_at = self._loop.time() + PATIENCE_S
        self._pause = PAUSE_S

    async def run(self) -> None:
        """Until its client goes (cancellation) or it cannot be served (raises)."""
        while True:
            try:
                await self._once()
            except SavaError as error:
                if not _is_passing(error) or self._loop.time() >= self._give_up_at:
                    raise
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    async def _once(self) -> None:
        began = self._loop.time()
        try:
            await self._sessions.serve(self._request.consumer_id, self._write, self._broker_url)
        except NotOwner as error:
            self._note(began)
            await self._relay(TopicName.parse(error.topic))

    async def _relay(self, topic: TopicName) -> None:
        left = self._give_up_at - self._loop.time()
        link = await self._forwarder.owner_link(topic, "client", timeout=max(left, 0.0))
        if link is None:
            return  # it has come here
        require_topic(Permission.CONSUME, topic)
        request = self._request.SerializeToString()
        metadata = self._forwarder.metadata(RECEIVE_MESSAGES, self._context)
        began = self._loop.time()
        try:
            await forwarding.relay_server_stream(
                link, RECEIVE_MESSAGES, request, None, metadata, self._context.write
            )
        finally:
            self._note(began)

    def _note(self, began: float) -> None:
        now = self._loop.time()
        if now - began >= SERVED_S:
            self._give_up_at = now + PATIENCE_S
            self._pause = PAUSE_S


def _is_passing(error: SavaError) -> bool:
    """Whether the topic, here or elsewhere, may be served again soon without the client's doing."""
    if isinstance(error, Relayed):
        if not error.code:
            return True  # the connection broke, or the broker did
        return error.status is grpc.StatusCode.UNAVAILABLE and error.code != "consumer_unknown"
    return isinstance(error, NotOwner | NotServed | Unreachable)


# -- sessions --------------------------------------------------------------------------------------


FETCH: Final = 64
"""Messages taken from a subscription at a time; their ack timeout begins then."""
AHEAD: Final = 1000
"""On non-reliable topics: messages for a stream that are not written yet."""
HOLD_S: Final = 1.0
"""A stream that fails has lasted at least for this time."""
SETTLE_S: Final = 1.0
"""How long an older stream leaves the session to a newer one that has not come yet, or may come back."""
CLOSE_LAG_S: Final = 0.05
"""Between the answer to a health check and the end of the stream, so that they arrive in this order."""
PENDING_S: Final = 10.0
"""How long a session on a non-reliable topic collects messages before its first stream."""
MAX_NAMES: Final = 100_000
"""Topics whose names are remembered."""

TOO_LARGE: Final = "larger than Danube's clients can receive"

Write = Callable[[pb.StreamMessage], Awaitable[None]]


class ConsumerSession:
    """The place of one consumer id, while it has a stream or is about to get one."""

    def __init__(self, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.streams = 0
        self.pending: ConsumerHandle | None = None
        """Attached by Subscribe and waiting for the first stream; on non-reliable topics."""
        self._taken_by: object | None = None
        self._left = asyncio.Event()

    def take(self, stream: object) -> None:
        self._taken_by = stream
        self._left.clear()

    def leave(self, stream: object) -> None:
        if self._taken_by is stream:
            self._taken_by = None
            self._left.set()

    async def vacant(self) -> None:
        """Until no stream has had the session for a while."""
        await asyncio.sleep(SETTLE_S)
        while self._taken_by is not None:
            await self._left.wait()
            await asyncio.sleep(SETTLE_S)

    def take_pending(self) -> ConsumerHandle | None:
        consumer, self.pending = self.pending, None
        return None if consumer is None or consumer.is_closed else consumer

    def drop_pending(self) -> None:
        if self.pending is not None:
            self.pending.close()
            self.pending = None


class ConsumerSessions:
    """The sessions of this broker, by id. Owned by the event loop."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._sessions: dict[int, ConsumerSession] = {}
        """Those with a stream or a pending consumer; of the others the metadata store knows."""
        self._held: dict[int, asyncio.Event] = {}
        """Set when a stream with an unknown id should end."""
        self._windows: dict[tuple[TopicName, str], set[CreditWindow]] = {}
        """Of the streams of each subscription."""
        self._names: OrderedDict[int, TopicName] = OrderedDict()
        """Of topics that were subscribed to, by their id."""

    # -- subscribing -----------------------------------------------------------------------------

    async def subscribe(self, topic_text: str, options: SubscribeOptions) -> int:
        """The id of the consumer, which is the same each time. Streams that it has lose their session."""
        name = topic_name(topic_text)
        try:
            topic = await self._topics.get(name)
        finally:
            self._remember(name)
        consumer = await self._attach(topic, options)
        if topic.spec.reliable:
            consumer.close()
            return consumer.consumer_id
        session = self._session(consumer.consumer_id)
        session.drop_pending()
        session.pending = consumer
        asyncio.get_running_loop().call_later(PENDING_S, self._give_up, session, consumer)
        return consumer.consumer_id

    def _remember(self, name: TopicName) -> None:
        spec = self._topics.registry.get_local(name)
        if spec is not None:
            self._names[spec.topic_id] = name
            self._names.move_to_end(spec.topic_id)
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)

    async def _attach(self, topic: Topic, options: SubscribeOptions) -> ConsumerHandle:
        """A consumer that only waits for its stream does not keep others out. Raises SubscriptionBusy."""
        try:
            return await topic.subscribe(options)
        except SubscriptionBusy:
            others = topic.subscriptions[options.subscription].consumers.values()
            sessions = [self._sessions.get(other.consumer_id) for other in others]
            waiting = [session for session in sessions if session is not None and session.pending is not None]
            if not waiting:
                raise
            for session in waiting:
                session.drop_pending()
            return await topic.subscribe(options)

    def _give_up(self, session: ConsumerSession, consumer: ConsumerHandle) -> None:
        if session.pending is consumer:
            session.drop_pending()
            self._tidy(session)

    def _session(self, consumer_id: int) -> ConsumerSession:
        session = self._sessions.get(consumer_id)
        if session is None:
            session = self._sessions[consumer_id] = ConsumerSession(consumer_id)
        return session

    def _tidy(self, session: ConsumerSession) -> None:
        if (
            not session.streams
            and session.pending is None
            and self._sessions.get(session.consumer_id) is session
        ):
            del self._sessions[session.consumer_id]

    # -- knowing ---------------------------------------------------------------------------------

    async def is_known(self, consumer_id: int) -> bool:
        """False only when it is certain. A stream that is held back for this id ends then. Raises NotOwner:
        the broker that has the topic knows."""
        if consumer_id in self._sessions:
            return True
        try:
            if await self._consumer_by_id(consumer_id) is not None:
                return True
        except NotOwner:
            raise
        except SavaError:
            return True
        self.release(consumer_id)
        return False

    async def _consumer_by_id(self, consumer_id: int) -> KnownConsumer | None:
        """None if certainly no consumer has it. Raises NotOwner, and what keeps the topic from loading."""
        topic_id = topic_of_consumer(consumer_id)
        name = self._names.get(topic_id)
        if name is not None and self._topics.by_id(topic_id) is None:
            try:
                await self._topics.get(name)
            except TopicUnknown:
                return None
        return await self._topics.consumer_by_id(consumer_id)

    def release(self, consumer_id: int) -> None:
        """The client learns that it must subscribe again: a stream that is held back for its id ends."""
        held = self._held.get(consumer_id)
        if held is not None:
            asyncio.get_running_loop().call_later(CLOSE_LAG_S, held.set)

    async def hold(self, consumer_id: int, seconds: float) -> None:
        """Keep a stream that cannot be served from failing at once; until then, or until the client has
        learned that it must subscribe again."""
        held = self._held.setdefault(consumer_id, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await held.wait()
        except TimeoutError:
            pass
        finally:
            if self._held.get(consumer_id) is held:
                del self._held[consumer_id]

    def answered(self, topic: TopicName, subscription: str, offset: int) -> None:
        """The offset was acked or nacked, by whomever."""
        for window in self._windows.get((topic, subscription), ()):
            window.answered(offset)

    # -- delivering ------------------------------------------------------------------------------

    async def serve(self, consumer_id: int, write: Write, broker_url: str) -> None:
        """One stream, until its client goes (cancellation) or it cannot be served (raises)."""
        session = self._session(consumer_id)
        session.streams += 1
        try:
            while True:
                await self._serve_session(session, write, broker_url)
                await session.vacant()
        finally:
            session.streams -= 1
            self._tidy(session)

    async def _serve_session(self, session: ConsumerSession, write: Write, broker_url: str) -> None:
        """Returns when a newer stream has taken the session. Raises ConsumerUnknown, also if its subscription
        was removed: only Subscribe creates it again."""
        known = await self._consumer_by_id(session.consumer_id)
        if known is None:
            raise ConsumerUnknown(f"consumer {session.consumer_id} is not known here; subscribe again")
        require_topic(Permission.CONSUME, known.topic)
        self._topics.owners.check_name(known.owner, known.name, known.topic, "consumer")
        topic = await self._topics.get(known.topic)
        consumer = session.take_pending()
        if consumer is None:
            options = subscribe_options(known.subscription, known.type, known.name, known.key_filters)
            consumer = await self._attach(topic, options)
        stream = object()
        session.take(stream)
        composer = Composer(topic, broker_url)
        try:
            if topic.spec.reliable:
                await self._deliver(topic, consumer, composer, write)
            else:
                await _pass_on(consumer, composer, write)
        except ConsumerReplaced:
            return
        finally:
            consumer.close()
            session.leave(stream)

    async def _deliver(
        self, topic: Topic, consumer: ConsumerHandle, composer: Composer, write: Write
    ) -> None:
        subscription = topic.subscriptions[consumer.subscription]
        assert isinstance(subscription, Subscription)
        window = CreditWindow(consumer.grant, lambda: subscription.spec)
        key = topic.name, subscription.name
        windows = self._windows.setdefault(key, set())
        windows.add(window)
        try:
            while True:
                for delivery in await consumer.receive(FETCH):
                    for offset, message in delivery.messages():
                        if consumer.is_closed:
                            break
                        # First: the ack may be here before the write returns.
                        window.written(offset)
                        if len(message.payload) > MAX_PAYLOAD_BYTES:
                            consumer.nack(((offset, offset + 1),), reason=TOO_LARGE)
                            window.answered(offset)
                            continue
                        await write(composer.compose(offset, message))
        finally:
            window.close()
            windows.discard(window)
            if not windows:
                self._windows.pop(key, None)


async def _pass_on(consumer: ConsumerHandle, composer: Composer, write: Write) -> None:
    """On a non-reliable topic: acks mean nothing there, and most clients send none."""
    consumer.grant(AHEAD)
    while True:
        for delivery in await consumer.receive(FETCH):
            for offset, message in delivery.messages():
                if len(message.payload) <= MAX_PAYLOAD_BYTES:
                    await write(composer.compose(offset, message))
            consumer.grant(len(delivery))


def subscribe_options(
    subscription: str, kind: SubscriptionType, consumer_name: str, key_filters: tuple[str, ...]
) -> SubscribeOptions:
    return SubscribeOptions(
        subscription=subscription,
        type=kind,
        consumer_name=consumer_name,
        key_filters=key_filters,
        start=LATEST,
        credits=START,
        ack_timeout_ms=FailurePolicy().ack_timeout_ms,
        durable_id=True,
    )


# -- the credit window -----------------------------------------------------------------------------


START: Final = 64
LEAST: Final = 10
"""What Danube's own broker sends ahead at most."""
MOST: Final = 1000
PATIENCE: Final = 1 / 3
"""Of the ack timeout: for this time a message that is not acked takes a place in the window."""
PROMPT: Final = 1 / 30
"""Of the ack timeout: an ack within this time is prompt."""
NO_TIMEOUT_S: Final = 30.0
"""What stands for the ack timeout of a subscription that has none."""


class CreditWindow:
    """How far one stream may be ahead of its client's acks; owned by the event loop. ``grant`` lets N more
    messages through; ``spec`` is the subscription's, asked for again and again."""

    def __init__(self, grant: Callable[[int], None], spec: Callable[[], SubscriptionSpec]) -> None:
        """The first ``START`` messages are granted already."""
        self._grant = grant
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._size = START
        self._open = START
        """Messages granted, and not acked or given up."""
        self._written: dict[int, float] = {}
        """Of these, the offsets that were written, oldest first, and when."""
        self._has_acks = False
        self._timer: asyncio.TimerHandle | None = None
        self._settle(0)

    @property
    def size(self) -> int:
        return MOST if self._spec().max_unacked_messages <= MOST else self._size

    def written(self, offset: int) -> None:
        if self._written.pop(offset, None) is not None:
            self._settle(1)  # delivered again, in the place of the first time
        self._written[offset] = self._loop.time()
        if self._timer is None:
            self._set_timer()

    def answered(self, offset: int) -> None:
        """By an ack or a nack, which need not be for this stream."""
        since = self._written.pop(offset, None)
        if since is None:
            return
        self._has_acks = True
        if self._loop.time() - since < PROMPT * self._timeout:
            self._size = min(self._size + 1, MOST)
        self._settle(1)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self, count: int) -> None:
        self._open -= count
        more = self.size - self._open
        if more > 0:
            self._open += more
            self._grant(more)

    @property
    def _timeout(self) -> float:
        return self._spec().failure_policy.ack_timeout_ms / 1000 or NO_TIMEOUT_S

    def _set_timer(self) -> None:
        oldest = next(iter(self._written.values()))
        self._timer = self._loop.call_at(oldest + PATIENCE * self._timeout, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        before = self._loop.time() - PATIENCE * self._timeout
        late = [offset for offset, _ in takewhile(lambda item: item[1] <= before, self._written.items())]
        for offset in late:
            del self._written[offset]
        if late:
            if self._has_acks:
                self._size = max(self._size // 2, LEAST)
            self._settle(len(late))
        if self._written:
            self._set_timer()
