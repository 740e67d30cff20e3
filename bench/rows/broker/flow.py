"""Many messages: publishing, then consuming what was published, each system through its own Python client.

NATS publishes asynchronously and consumes by a pull consumer with explicit acks; Redis publishes pipelines of
1,000 and consumes by a consumer group. Sava appears in the two ways its users write it: batches
(``send_many``, ``receive_batch``), and one message at a time with the client batching behind the scenes
(``send`` with default settings, ``async for``)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.plan import Plan
from bench.report import Quantity, Row, Target
from bench.rows.broker.shape import SECTION, fresh, seconds, topic
from bench.samples import Contestant, Figure, Sample, interleave
from bench.servers import Server, nats_server, nats_version, redis_server, redis_version
from bench.standalone import standalone_broker
from bench.worker import Worker

TEN_TIMES_NATS = Target("at least 10× NATS", at_least=10.0)
FIVE_TIMES_REDIS = Target("at least 5× Redis", at_least=5.0)
CONSUMED = 500_000
"""Messages that wait for Sava's consumers, as many as its default cache holds. The others have all of theirs
in memory too, and consume what they published in a second."""


@dataclass(frozen=True)
class Peer:
    name: str
    worker: Worker
    server: Server


@asynccontextmanager
async def _peers(plan: Plan) -> AsyncIterator[dict[str, Peer]]:
    """Those that are installed."""
    async with AsyncExitStack() as stack:
        found = {}
        for name, server, version in (
            ("NATS", nats_server, nats_version()),
            ("Redis", redis_server, redis_version()),
        ):
            if version is None:
                continue
            running = await stack.enter_async_context(server(plan.folder))
            worker = Worker(name.lower(), plan.folder, running.address)
            found[name] = Peer(name, await stack.enter_async_context(worker), running)
        yield found


async def run(plan: Plan) -> list[Row]:
    async with (
        _peers(plan) as peers,
        standalone_broker(plan.folder) as broker,
        Worker("sava", plan.folder, broker.address) as sava,
    ):
        published = await interleave(plan.rounds, _publishing(plan, broker, sava, peers))
        consumed = await interleave(plan.rounds, _consuming(broker, sava, peers))
    rows = []
    rows += _rows("publish, send_many, batches of 1,000", published["send_many"], published, peers, 1.5e6)
    rows += _rows("publish, send, 4,000 ahead", published["ahead"], published, peers, 2e5)
    rows += _rows(
        "publish, send, 4,000 callers that await each",
        published["each"],
        published,
        peers,
        2e5,
        beside=(),
    )
    for name, aim in (("receive_batch", 1e6), ("async for", 3e5)):
        rows += _rows(f"consume and ack, {name}", consumed[name], consumed, peers, aim, beside=("NATS",))
    return rows


def _publishing(plan: Plan, broker: Server, sava: Worker, peers: dict[str, Peer]) -> dict[str, Contestant]:
    def ours(job: str) -> Contestant:
        async def contestant() -> Sample:
            sample = await sava.sample(job, topic=topic("flow"), seconds=seconds(plan))
            await broker.child.quiet()
            return sample

        return contestant

    def theirs(peer: Peer) -> Contestant:
        async def contestant() -> Sample:
            stream = fresh("flow")
            sample = await peer.worker.sample("publish", topic=stream, seconds=seconds(plan))
            await peer.worker.do("remove", topic=stream)
            await peer.server.child.quiet()
            return sample

        return contestant

    found = {
        "send_many": ours("publish_many"),
        "ahead": ours("publish_ahead"),
        "each": ours("publish_each"),
    }
    return found | {name: theirs(peer) for name, peer in peers.items()}


def _consuming(broker: Server, sava: Worker, peers: dict[str, Peer]) -> dict[str, Contestant]:
    def ours(job: str) -> Contestant:
        async def contestant() -> Sample:
            filled = topic("flow")
            await sava.do("fill", topic=filled, count=CONSUMED)
            await broker.child.quiet()
            return await sava.sample(job, topic=filled, count=CONSUMED)

        return contestant

    def theirs(peer: Peer) -> Contestant:
        async def contestant() -> Sample:
            stream = fresh("flow")
            await peer.worker.do("publish", topic=stream, seconds=1.0)
            await peer.server.child.quiet()
            sample = await peer.worker.sample("consume", topic=stream)
            await peer.worker.do("remove", topic=stream)
            return sample

        return contestant

    found = {"receive_batch": ours("consume_batches"), "async for": ours("consume_each")}
    return found | {name: theirs(peer) for name, peer in peers.items()}


def _rows(
    name: str,
    figure: Figure,
    figures: dict[str, Figure],
    peers: dict[str, Peer],
    aim: float,
    *,
    beside: tuple[str, ...] = ("NATS", "Redis"),
) -> list[Row]:
    """One row beside each of the two, and one for where Sava wants to go."""
    targets = {"NATS": TEN_TIMES_NATS, "Redis": FIVE_TIMES_REDIS}
    rows = [
        Row(
            SECTION,
            name,
            _rate(figure),
            _rate(figures[peer]) if peer in figures else None,
            target if peer in beside else None,
            peers[peer].server.note if peer in peers else f"{peer} is not installed",
            peer,
        )
        for peer, target in targets.items()
    ]
    target = Target(f"{aim:,.0f}/s", at_least=aim, of_peer=False, is_aim=True)
    return [*rows, Row(SECTION, name, _rate(figure), None, target)]


def _rate(figure: Figure) -> Quantity:
    spread = f"{figure.lowest_rate:,.0f} to {figure.highest_rate:,.0f}" if figure.repetitions > 1 else ""
    return Quantity(figure.rate, "per second", spread)
