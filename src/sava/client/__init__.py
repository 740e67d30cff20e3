"""The client: publish, consume and read over Sava's own protocol, a batch at a time on the wire.

    async with Client("http://127.0.0.1:6650") as client:
        async with client.producer("/default/orders") as producer:
            offset = await producer.send(b"…", key="k")

``sava.client.blocking`` has the same names without ``async``. How to use it is in ``docs/client.md``.

==============  =======================================================================================
``client``      Client: options of everything it makes
``producer``    Producer: checks (``columns``), routing, back-pressure (``room``), over a lane per partition
``lane``        one partition's stream: ``pending`` batches, the ``window`` of those in flight
``consumer``    Consumer: the queue of what was received, over a feed per partition
``feed``        one partition's stream: deliveries, credits, ``acks``
``reader``      Reader: a track per partition
``batch``       messages as received
``stream``      a gRPC stream, and the route to where it is opened
``connection``  channels, look-ups, tokens
==============  =======================================================================================
"""

from sava.client.batch import Batch, TypedMessage
from sava.client.client import Client
from sava.client.codec import Codec, SchemaCodec
from sava.client.connection import Tls
from sava.client.consumer import Consumer
from sava.client.errors import (
    ClientError,
    Closed,
    ConsumerReplaced,
    OutcomeUnknown,
    ProducerFenced,
    Refused,
    Timeout,
    TopicUnknown,
    Unanswered,
    Unavailable,
)
from sava.client.producer import Producer, Sent
from sava.client.reader import Reader
from sava.client.window import UNKNOWN_OFFSET
from sava.records import Message

__all__ = [
    "UNKNOWN_OFFSET",
    "Batch",
    "Client",
    "ClientError",
    "Closed",
    "Codec",
    "Consumer",
    "ConsumerReplaced",
    "Message",
    "OutcomeUnknown",
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
    "Unavailable",
]
