"""One message at a time, beside the parts that no broker can leave out.

Sava's own client with one message in flight: a message and its answer on a gRPC stream, and a sync of the
disk. The published danube-client: a unary call for each message, many callers at once."""

from __future__ import annotations

from typing import Final

from bench.echo_client import echo_server
from bench.plan import IN_FLIGHT, Plan
from bench.report import Quantity, Row, Target, duration
from bench.rows.broker.shape import SECTION, seconds, topic
from bench.samples import Figure, interleave
from bench.standalone import standalone_broker
from bench.worker import Worker
from bench.workers import SIZE
from sava.proto import danube_api_pb2
from sava.records import RecordBatch

LATENCY = Target("at most 1.5× echo + fdatasync", at_most=1.5)
UNARY = Target("at least 60 % of the echo", at_least=0.6)
NOW: Final = 1_750_000_000_000_000


async def run(plan: Plan) -> list[Row]:
    async with (
        standalone_broker(plan.folder) as broker,
        echo_server(plan.folder) as echo,
        Worker("sava", plan.folder, broker.address) as sava,
        Worker("danube", plan.folder, broker.address) as danube,
        Worker("floor", plan.folder, echo) as floor,
    ):
        name, time = topic("single"), seconds(plan)
        size = len(memoryview(RecordBatch.encode([bytes(SIZE)], publish_time=NOW).data))
        alone = await interleave(
            plan.rounds,
            {
                "sava": lambda: sava.sample("latency", topic=name, seconds=time),
                "echo": lambda: floor.sample("stream", size=size, seconds=time),
                "sync": lambda: floor.sample("syncs", folder=str(plan.folder), size=size),
            },
        )
        call = _call_size(name, broker.address)
        many = await interleave(
            plan.rounds,
            {
                "sava": lambda: danube.sample("publish", topic=name, in_flight=IN_FLIGHT, seconds=time),
                "echo": lambda: floor.sample("unary", size=call, in_flight=IN_FLIGHT, seconds=time),
            },
        )
    return [_latency(alone), _unary(many)]


def _call_size(name: str, address: str) -> int:
    """Bytes of one message as danube-client sends it."""
    identity = danube_api_pb2.MsgID(producer_id=1 << 62, topic_name=name, broker_addr=f"http://{address}")
    message = danube_api_pb2.StreamMessage(
        request_id=1 << 14, msg_id=identity, payload=bytes(SIZE), publish_time=NOW, producer_name="bench"
    )
    return message.ByteSize()


def _latency(figures: dict[str, Figure]) -> Row:
    echo, sync = figures["echo"].p50, figures["sync"].p50
    parts = f"{duration(echo)} + {duration(sync)}"
    return Row(
        SECTION,
        "publish, 1 in flight: p50",
        figures["sava"].latency(),
        Quantity(echo + sync, "seconds", parts),
        LATENCY,
        peer_name="echo + sync",
    )


def _unary(figures: dict[str, Figure]) -> Row:
    def rate(figure: Figure) -> Quantity:
        return Quantity(figure.rate, "per second", f"p99 {duration(figure.p99)}")

    return Row(
        SECTION,
        f"publish by danube-client, {IN_FLIGHT} in flight",
        rate(figures["sava"]),
        rate(figures["echo"]),
        UNARY,
        peer_name="unary echo",
    )
