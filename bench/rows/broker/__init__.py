"""The broker beside NATS JetStream and Redis Streams: messages of 100 bytes, acknowledged as durable.

``flow``    many messages in and out, beside both
``single``  one message at a time, beside what gRPC and the disk take by themselves
``crowd``   many subscriptions of one topic; many topics that do nothing
"""

from __future__ import annotations

from bench.rows.broker import crowd, flow, single

PARTS = (flow.run, single.run, crowd.fan_out, crowd.idle)
