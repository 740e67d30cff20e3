"""Spark: reading and writing topics through ``format("sava")``, on two cores (``local[2]``).

What stands beside is Spark itself in the same session, in turns: its own Parquet reader on the same segments,
a batch read, a streaming source that does nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from bench.plan import Plan
from bench.report import Quantity, Row, Target
from bench.samples import Contestant, Figure, Sample, interleave
from bench.servers import Server
from bench.spark_cluster import spark_cluster
from bench.standalone import standalone_broker
from bench.worker import Worker

SECTION: Final = "spark"
TOPIC: Final = "/default/history"
COLUMN: Final = "publish_time"
CORES: Final = 4
"""So many are needed to tell one worker from two: the driver and the broker want some themselves."""

COLD = Target("at least 55 %", at_least=0.55)
PRUNED = Target("at most 85 % of the time", at_most=0.85)
STREAM = Target("at least 70 %", at_least=0.7)
TINY = Target("at most 1.3×", at_most=1.3)
ONCE = Target("at least 300,000/s", at_least=3e5, of_peer=False)
FAST = Target("at least 500,000/s", at_least=5e5, of_peer=False)
TWO = Target("at least 1.6×", at_least=1.6)


@dataclass(frozen=True)
class Sizes:
    history: int
    written: int
    batches: int


FULL = Sizes(history=6_000_000, written=1_000_000, batches=30)
QUICK = Sizes(history=500_000, written=300_000, batches=10)


async def run(plan: Plan) -> list[Row]:
    sizes = QUICK if plan.quick else FULL
    async with standalone_broker(plan.folder) as broker:
        await _fill(plan, broker, TOPIC, sizes.history)
        async with Worker("spark", plan.folder, broker.address, "local[2]", str(plan.folder)) as spark:
            files = (await spark.do("stored", topic=TOPIC))["files"]
            reads = await _turns(plan, _reading(spark, sizes, files))
            tiny = await _turns(plan, _tiny(plan, broker, spark, sizes))
            writes = await _turns(plan, _writing(spark, sizes))
        return [
            *_read_rows(reads),
            *_tiny_rows(tiny),
            *_write_rows(writes),
            *await _scaling(plan, broker, sizes),
        ]


async def _turns(plan: Plan, contestants: dict[str, Contestant]) -> dict[str, Figure]:
    """Java compiles what has run a few times; the first round does not count."""
    await interleave(1, contestants)
    return await interleave(plan.rounds, contestants)


async def _fill(plan: Plan, broker: Server, topic: str, count: int) -> None:
    async with Worker("sava", plan.folder, broker.address) as sava:
        await sava.do("fill", topic=topic, count=count)


# -- reading -----------------------------------------------------------------------------------------


def _reading(spark: Worker, sizes: Sizes, files: list[str]) -> dict[str, Contestant]:
    rows = sizes.history
    return {
        "ours": _job(spark, "read", topic=TOPIC, rows=rows),
        "native": _job(spark, "native", files=files, rows=rows),
        "ours, one": _job(spark, "read", topic=TOPIC, rows=rows, columns=f"{COLUMN} timestamp"),
        "native, one": _job(spark, "native", files=files, rows=rows, column=COLUMN),
        "stream": _job(spark, "stream", topic=TOPIC, rows=rows),
    }


def _read_rows(figures: dict[str, Figure]) -> list[Row]:
    ours, one = figures["ours"].rate, figures["ours, one"].rate
    return [
        Row(
            SECTION,
            "read history, all columns",
            _rate(figures["ours"]),
            _rate(figures["native"]),
            COLD,
            peer_name="spark.read.parquet",
        ),
        Row(
            SECTION,
            "read history, one column, time for a million",
            Quantity(1e6 / one, "seconds"),
            Quantity(1e6 / ours, "seconds"),
            PRUNED,
            peer_name="all columns",
        ),
        Row(
            SECTION,
            "read history, one column",
            _rate(figures["ours, one"]),
            _rate(figures["native, one"]),
            peer_name="spark.read.parquet",
        ),
        Row(
            SECTION,
            "stream of history, two triggers",
            _rate(figures["stream"]),
            _rate(figures["ours"]),
            STREAM,
            peer_name="batch read",
        ),
    ]


# -- tiny batches --------------------------------------------------------------------------------------


def _tiny(plan: Plan, broker: Server, spark: Worker, sizes: Sizes) -> dict[str, Contestant]:
    numbers = iter(range(1000))

    async def ours() -> Sample:
        """From a topic that was just published: what a stream that has caught up reads."""
        topic = f"/default/tiny-{next(numbers)}"
        await _fill(plan, broker, topic, 20_000)
        return await spark.sample("tiny", topic=topic, batches=sizes.batches)

    return {"ours": ours, "bare": _job(spark, "tiny", batches=sizes.batches)}


def _tiny_rows(figures: dict[str, Figure]) -> list[Row]:
    return [
        Row(
            SECTION,
            "micro-batch of 20 messages",
            figures["ours"].latency(),
            figures["bare"].latency(),
            TINY,
            peer_name="bare Python source",
        )
    ]


# -- writing -------------------------------------------------------------------------------------------


def _writing(spark: Worker, sizes: Sizes) -> dict[str, Contestant]:
    return {
        delivery: _job(spark, "write", topic=f"/default/{delivery}", rows=sizes.written, delivery=delivery)
        for delivery in ("exactlyOnce", "atLeastOnce")
    }


def _write_rows(figures: dict[str, Figure]) -> list[Row]:
    return [
        Row(SECTION, "write 100 bytes, exactly once", _rate(figures["exactlyOnce"]), target=ONCE),
        Row(SECTION, "write 100 bytes, at least once", _rate(figures["atLeastOnce"]), target=FAST),
    ]


# -- two workers ---------------------------------------------------------------------------------------


async def _scaling(plan: Plan, broker: Server, sizes: Sizes) -> list[Row]:
    name = "hash history, two standalone workers"
    cores = os.cpu_count() or 1
    if cores < CORES:
        note = f"not measured: {CORES} cores are needed, there are {cores}"
        return [Row(SECTION, name, None, target=TWO, note=note)]
    figures = {}
    for workers in (1, 2):
        async with (
            spark_cluster(plan.folder, workers) as master,
            Worker("spark", plan.folder, broker.address, master, str(plan.folder)) as spark,
        ):
            job = {"ours": _job(spark, "churn", topic=TOPIC, rows=sizes.history)}
            figures[workers] = (await _turns(plan, job))["ours"]
    return [Row(SECTION, name, _rate(figures[2]), _rate(figures[1]), TWO, peer_name="one worker")]


def _job(worker: Worker, job: str, **arguments: Any) -> Contestant:
    async def contestant() -> Sample:
        return await worker.sample(job, **arguments)

    return contestant


def _rate(figure: Figure) -> Quantity:
    return Quantity(figure.rate, "per second")
