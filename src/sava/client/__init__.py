"""The client: publish, consume and read over Sava's own protocol, a batch at a time on the wire.

    async with Client("http://127.0.0.1:6650") as client:
        async with client.producer("/default/orders") as producer:
            offset = await producer.send(b"…", key="k")

``sava.client.blocking`` has the same names without ``async``. How to use it is in ``docs/client.md``.

====================  =================================================================================
``client``            Client: options of everything it makes
``producer``          Producer: checks, routing, back-pressure, over a stream per partition
``publish_stream``    a producer's stream into one partition: the queue, sending, receipts
``outgoing``          what a producer has on its way: columns, batches, the window of those in flight
``consumer``          Consumer: the queue of what was received, over a stream per partition
``subscribe_stream``  a consumer's stream out of one partition: deliveries, credits, acks
``reader``            Reader: a stream per partition, without a subscription
``messages``          codecs, positions, batches as received
``connection``        channels, calls, look-ups, streams, tokens
``liveness``          whether a broker that owes an answer is still there
``blocking``          the same without ``async``, over a ``loop_thread``
====================  =================================================================================
"""

from sava.client.client import Client
from sava.client.consumer import Consumer
from sava.client.errors import (
    ClientError,
    Closed,
    ConsumerReplaced,
    Denied,
    OutcomeUnknown,
    PermissionDenied,
    ProducerFenced,
    Refused,
    Timeout,
    TopicUnknown,
    Unanswered,
    Unauthenticated,
    Unavailable,
)
from sava.client.messages import Batch, Codec, SchemaCodec, TypedMessage
from sava.client.outgoing import UNKNOWN_OFFSET
from sava.client.producer import Producer, Sent
from sava.client.reader import Reader
from sava.records import Message
from sava.security.credentials import Tls

__all__ = [
    "UNKNOWN_OFFSET",
    "Batch",
    "Client",
    "ClientError",
    "Closed",
    "Codec",
    "Consumer",
    "ConsumerReplaced",
    "Denied",
    "Message",
    "OutcomeUnknown",
    "PermissionDenied",
    "Producer",
    "ProducerFenced",
    "Reader",
    "Refused",
    "SchemaCodec",
    "Sent",
    "Timeout",
    "Tls",
    "TopicUnknown",
    "TypedMessage",
    "Unanswered",
    "Unauthenticated",
    "Unavailable",
]
