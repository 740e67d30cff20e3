"""Secured: what TLS, tokens and permissions cost a client, beside the same broker without them.

Both brokers are clusters of one with default settings; the secured one has certificates of an authority of
its own, and the client shows a token, as ``sava auth bootstrap`` makes them."""

from __future__ import annotations

import json
from typing import Final

import yaml

from bench.plan import Plan
from bench.report import Quantity, Row, Target, duration
from bench.rows.broker.shape import seconds, topic
from bench.samples import Contestant, Figure, Sample, interleave
from bench.servers import Server
from bench.standalone import standalone_broker
from bench.worker import Worker
from sava.security.provision import Provision

SECTION: Final = "secured"
USER: Final = "bench"
DAY_S: Final = 86_400.0
BATCHED: Final = Target("at least 0.85× without", at_least=0.85)
SINGLE: Final = Target("at most 1.2× without", at_most=1.2)


async def run(plan: Plan) -> list[Row]:
    files = Provision(
        directory=plan.folder / "auth",
        cluster_name="sava",
        admin=USER,
        ttl_s=DAY_S,
        has_authority=True,
        brokers=["127.0.0.1"],
    )
    files.write()
    auth = json.dumps(yaml.safe_load(files.section())["auth"])
    async with (
        standalone_broker(plan.folder) as plain,
        standalone_broker(plan.folder, SAVA__AUTH=auth) as secured,
        Worker("sava", plan.folder, plain.address) as to_plain,
        Worker(
            "sava", plan.folder, secured.address, str(files.ca_file), str(files.token_file(USER))
        ) as to_secured,
    ):
        both = {"without": (plain, to_plain), "with": (secured, to_secured)}
        batched = await interleave(
            plan.rounds, {name: _one("publish_many", plan, *each) for name, each in both.items()}
        )
        single = await interleave(
            plan.rounds, {name: _one("latency", plan, *each) for name, each in both.items()}
        )
    return [_batched(batched), _single(single)]


def _one(job: str, plan: Plan, broker: Server, worker: Worker) -> Contestant:
    async def contestant() -> Sample:
        sample = await worker.sample(job, topic=topic("secured"), seconds=seconds(plan))
        await broker.child.quiet()
        return sample

    return contestant


def _batched(figures: dict[str, Figure]) -> Row:
    with_auth, without = (Quantity(figures[name].rate, "per second") for name in ("with", "without"))
    name = "publish with TLS and a token, send_many, batches of 1,000"
    return Row(SECTION, name, with_auth, without, BATCHED, peer_name="without")


def _single(figures: dict[str, Figure]) -> Row:
    def p50(figure: Figure) -> Quantity:
        return Quantity(figure.p50, "seconds", f"p99 {duration(figure.p99)}")

    name = "publish with TLS and a token, 1 in flight: p50"
    return Row(SECTION, name, p50(figures["with"]), p50(figures["without"]), SINGLE, peer_name="without")
