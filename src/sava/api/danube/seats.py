"""Seats: Danube's consumers, and the streams on which they get their messages.

``Subscribe`` names a consumer and gives it an id; ``ReceiveMessages`` brings the id and is its stream. The
two are apart in time, and a client comes back with the id alone after the broker was restarted. So an id is
a *seat*, known by a record in the metadata store, and only a stream sits on it:

    Subscribe(orders, s, c) ─▶ seat 7, empty      ReceiveMessages(7) ─▶ taken      the stream ends ─▶ empty

An empty seat holds nothing back: a consumer of another name can have an exclusive subscription, a failover
subscription promotes the next, messages in flight go to others. Only on non-reliable topics a seat that was
just given out collects what is published until its stream comes, since nothing else would keep it.

**One seat, two streams.** The newest stream has the seat. The one before is kept open and silent, and gets
the seat back if the newer one goes. Ending it would do harm: Danube's Python client would open its stream
again at once with the same id, take the seat from the newer one, which would do the same, and so on for
ever.

**Streams that fail.** The Python client does not wait between two attempts to open a stream, whatever the
status. So a stream that cannot be served, for its id is unknown or its topic is not there yet, is held back
for a while before it fails. The health check of an unknown id, which makes the client subscribe again once
its stream has ended, ends it.

**Too large messages.** Sava's own producers can send messages that Danube's clients refuse to receive. Such a
client's stream would fail, be opened again, get the same message, and fail again. So the broker refuses it in
the client's name, and the subscription's failure policy decides what becomes of it.

**Back-pressure.** A client that does not read lets HTTP/2's flow control stop the writes to its stream, and
a stream gets nothing new from its subscription while it is not written to; nobody else waits. On reliable
topics a stream is ahead of its client's acks by a window (``window``).

**Topics of other brokers.** An id says which topic it is of by a number. Of a topic that this broker has not
loaded, the metadata store is asked for the name now and then, and a topic that was created since is not in
its answer: nobody would have such an id. So the names of topics that somebody has subscribed to through this
broker are remembered, wherever the topics are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from sava.api.danube.codes import topic_name
from sava.api.danube.messages import MAX_PAYLOAD_BYTES, Composer
from sava.api.danube.window import START, Window
from sava.errors import SavaError
from sava.proto import danube_api_pb2 as pb
from sava.topics.consumer import ConsumerHandle
from sava.topics.consumers import KnownConsumer, topic_of_consumer
from sava.topics.errors import (
    ConsumerReplaced,
    ConsumerUnknown,
    NotOwner,
    SubscriptionBusy,
    TopicUnknown,
)
from sava.topics.names import TopicName
from sava.topics.position import LATEST
from sava.topics.specs import FailurePolicy, SubscriptionType
from sava.topics.subscription import Subscription
from sava.topics.topic import SubscribeOptions, Topic
from sava.topics.topics import ServedTopics

FETCH: Final = 64
"""Messages taken from a subscription at a time; their ack timeout begins then."""
AHEAD: Final = 1000
"""On non-reliable topics: messages for a stream that are not written yet."""
HOLD_S: Final = 1.0
"""A stream that fails has lasted at least so long."""
SETTLE_S: Final = 1.0
"""How long an older stream leaves the seat to a newer one that has not come yet, or may come back."""
CLOSE_LAG_S: Final = 0.05
"""Between the answer to a health check and the end of the stream, so that they arrive in this order."""
PENDING_S: Final = 10.0
"""How long a seat on a non-reliable topic collects messages before its first stream."""
MAX_NAMES: Final = 100_000
"""Topics whose names are remembered."""

TOO_LARGE: Final = "larger than Danube's clients can receive"

Write = Callable[[pb.StreamMessage], Awaitable[None]]


class Seat:
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
        """Until no stream has had the seat for a while."""
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


class Seats:
    """The seats of this broker, by id. Owned by the event loop."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._seats: dict[int, Seat] = {}
        """Those with a stream or a pending consumer; of the others the metadata store knows."""
        self._held: dict[int, asyncio.Event] = {}
        """Set when a stream with an unknown id should end."""
        self._windows: dict[tuple[TopicName, str], set[Window]] = {}
        """Of the streams of each subscription."""
        self._names: OrderedDict[int, TopicName] = OrderedDict()
        """Of topics that were subscribed to, by their id."""

    # -- subscribing -----------------------------------------------------------------------------

    async def subscribe(self, topic_text: str, options: SubscribeOptions) -> int:
        """The id of the consumer, which is the same each time. Streams that it has lose their seat."""
        name = topic_name(topic_text)
        try:
            topic = await self._topics.get(name)
        finally:
            self._remember(name)
        consumer = await self._attach(topic, options)
        if topic.spec.reliable:
            consumer.close()
            return consumer.consumer_id
        seat = self._seat(consumer.consumer_id)
        seat.drop_pending()
        seat.pending = consumer
        asyncio.get_running_loop().call_later(PENDING_S, self._give_up, seat, consumer)
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
            seats = [self._seats.get(other.consumer_id) for other in others]
            waiting = [seat for seat in seats if seat is not None and seat.pending is not None]
            if not waiting:
                raise
            for seat in waiting:
                seat.drop_pending()
            return await topic.subscribe(options)

    def _give_up(self, seat: Seat, consumer: ConsumerHandle) -> None:
        if seat.pending is consumer:
            seat.drop_pending()
            self._tidy(seat)

    def _seat(self, consumer_id: int) -> Seat:
        seat = self._seats.get(consumer_id)
        if seat is None:
            seat = self._seats[consumer_id] = Seat(consumer_id)
        return seat

    def _tidy(self, seat: Seat) -> None:
        if not seat.streams and seat.pending is None and self._seats.get(seat.consumer_id) is seat:
            del self._seats[seat.consumer_id]

    # -- knowing ---------------------------------------------------------------------------------

    async def is_known(self, consumer_id: int) -> bool:
        """False only when it is certain. A stream that is held back for this id ends then. Raises NotOwner:
        the broker that has the topic knows."""
        if consumer_id in self._seats:
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
        """None if certainly nobody. Raises NotOwner, and whatever keeps the topic from being loaded."""
        topic_id = topic_of_consumer(consumer_id)
        name = self._names.get(topic_id)
        if name is not None and self._topics.by_id(topic_id) is None:
            try:
                await self._topics.get(name)
            except TopicUnknown:
                return None
        return await self._topics.consumer_by_id(consumer_id)

    def release(self, consumer_id: int) -> None:
        """The client is being told to subscribe again: a stream that is held back for its id ends."""
        held = self._held.get(consumer_id)
        if held is not None:
            asyncio.get_running_loop().call_later(CLOSE_LAG_S, held.set)

    async def hold(self, consumer_id: int, seconds: float) -> None:
        """Keep a stream that cannot be served from failing at once; until then, or until the client was told
        that it should subscribe again."""
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
        seat = self._seat(consumer_id)
        seat.streams += 1
        try:
            while True:
                await self._serve_seat(seat, write, broker_url)
                await seat.vacant()
        finally:
            seat.streams -= 1
            self._tidy(seat)

    async def _serve_seat(self, seat: Seat, write: Write, broker_url: str) -> None:
        """Returns when a newer stream has taken the seat. Raises ConsumerUnknown, also if its subscription
        was removed: nobody but Subscribe makes it anew."""
        known = await self._consumer_by_id(seat.consumer_id)
        if known is None:
            raise ConsumerUnknown(f"consumer {seat.consumer_id} is not known here; subscribe again")
        topic = await self._topics.get(known.topic)
        consumer = seat.take_pending()
        if consumer is None:
            options = subscribe_options(known.subscription, known.type, known.name, known.key_filters)
            consumer = await self._attach(topic, options)
        stream = object()
        seat.take(stream)
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
            seat.leave(stream)

    async def _deliver(
        self, topic: Topic, consumer: ConsumerHandle, composer: Composer, write: Write
    ) -> None:
        subscription = topic.subscriptions[consumer.subscription]
        assert isinstance(subscription, Subscription)
        window = Window(consumer.grant, lambda: subscription.spec)
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
