"""``sava bench``: put a load on a running cluster, and show what it sustains."""

from __future__ import annotations

import csv
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import typer
from rich.filesize import decimal

from sava.cli.connection import (
    DEFAULT_ADMIN,
    AdminOption,
    ServiceOption,
    reached,
    run_to_end,
    service_at,
    shown_to,
)
from sava.cli.output import ProgressLine, print_json, print_line, print_progress, print_table
from sava.cli.produce import CompressionOption
from sava.cli.subscriptions import Type
from sava.client import Client
from sava.client.subscribe_stream import SubscriptionType
from sava.errors import RetryableError, SavaError
from sava.load import runs
from sava.load.figures import Flow, LoadOutcome
from sava.load.runs import LoadProgress, MetadataCalls, Operation
from sava.load.tally import HEADER_BYTES, draw_run
from sava.load.traffic import Consumption, LoadSubscription, Production
from sava.topics.errors import SubscriptionUnknown, TopicUnknown

app = typer.Typer(no_args_is_help=True)

SECONDS: Final = 10.0
"""Without --duration and --count."""
LARGEST: Final = 8 << 20


class BenchOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class MetadataOperation(StrEnum):
    PUT = "put"
    GET = "get"
    LOCAL_GET = "local-get"
    TXN = "txn"


class Start(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"

    @property
    def position(self) -> Literal["earliest", "latest"]:
        return "earliest" if self is Start.EARLIEST else "latest"


OutputOption = Annotated[
    BenchOutput, typer.Option("--output", "-o", help="table, json, or csv (a header and one row).")
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")]
Duration = Annotated[
    float | None,
    typer.Option("--duration", min=0.1, metavar="SECONDS", help=f"How long. Default {SECONDS:g}."),
]
ConsumeDuration = Annotated[
    float | None,
    typer.Option(
        "--duration", min=0.1, metavar="SECONDS", help="At most this long. Without: until nothing comes."
    ),
]
MessageCount = Annotated[
    int | None, typer.Option("--count", min=1, help="How many messages, instead of or within --duration.")
]
Producers = Annotated[int, typer.Option("--producers", min=1, max=1000, help="Side by side.")]
Consumers = Annotated[
    int, typer.Option("--consumers", min=1, max=1000, help="Side by side, of one subscription.")
]
Size = Annotated[
    str,
    typer.Option(
        "--size", metavar="BYTES|LOW-HIGH", help="Of a payload, at least 32; of a range each as likely."
    ),
]
Keys = Annotated[
    int, typer.Option("--keys", min=0, max=1 << 20, help="Different keys, in turn; 0: messages have none.")
]
Partitions = Annotated[
    int | None,
    typer.Option("--partitions", min=1, help="Create the topic with this many, or add the missing ones."),
]
NonReliable = Annotated[
    bool, typer.Option("--non-reliable", help="The topic is non-reliable, or to be created so.")
]
Codec = Annotated[CompressionOption, typer.Option("--compression", help="How batches travel and are stored.")]
TypeOption = Annotated[
    Type, typer.Option("--type", help="How the subscription shares messages between its consumers.")
]


@app.command()
def produce(
    topic: Topic,
    duration: Duration = None,
    count: MessageCount = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=0.001, metavar="N", help="Messages a second in all. Without: as fast as it goes."
        ),
    ] = None,
    producers: Producers = 1,
    size: Size = "1024",
    keys: Keys = 0,
    partitions: Partitions = None,
    non_reliable: NonReliable = False,
    compression: Codec = CompressionOption.NONE,
    linger_ms: Annotated[
        float, typer.Option("--linger-ms", min=0, help="How long a message may wait for others.")
    ] = 5.0,
    in_flight: Annotated[
        int,
        typer.Option("--in-flight", min=1, max=1000, help="Batches of each producer that have no receipt."),
    ] = 16,
    output: OutputOption = BenchOutput.TABLE,
    service: ServiceOption = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Publish to TOPIC. Latency is from when a message was due until it was durable.

    `sava bench consume` recognizes the messages and finds what is missing."""
    load = production(
        topic,
        Amount(duration, count, rate),
        producers=producers,
        size=size,
        keys=keys,
        partitions=partitions,
        reliable=False if non_reliable else None,
        compression=compression.codec,
        linger_ms=linger_ms,
        in_flight=in_flight,
    )
    run_produce(service_at(service, admin), load, output)


@app.command()
def consume(
    topic: Topic,
    duration: ConsumeDuration = None,
    count: MessageCount = None,
    idle: Annotated[
        float,
        typer.Option(
            "--idle",
            min=0.1,
            metavar="SECONDS",
            help="End when nothing comes for this long, and nothing is left.",
        ),
    ] = 3.0,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", "-s", help="Without: a new one, which is deleted in the end."),
    ] = None,
    type_: TypeOption = Type.EXCLUSIVE,
    consumers: Consumers = 1,
    start: Annotated[
        Start, typer.Option("--start", help="Where a new subscription begins.")
    ] = Start.EARLIEST,
    queue: Annotated[
        int, typer.Option("--queue", min=1, max=1_000_000, help="Messages on their way to each consumer.")
    ] = 10_000,
    output: OutputOption = BenchOutput.TABLE,
    service: ServiceOption = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Consume and ack what is in TOPIC, and check what `sava bench produce` put there: nothing lost, nothing
    twice, everything in order. Exit code 1 if it is not so.

    It ends when nothing comes and the subscription has nothing left. With --count or --duration, and when it
    is interrupted, what is missing counts as unread, not as lost: it may not have had its turn.

    Latency is from when a message was due until it came here, if both clocks agree."""
    run_consume(
        service_at(service, admin),
        admin,
        consumption(
            topic,
            Amount(duration, count, None),
            subscription=subscription,
            type=type_.value,
            consumers=consumers,
            start=start.position,
            idle_s=idle,
            receive_queue=queue,
        ),
        output,
        is_new=subscription is None,
    )


@app.command()
def latency(
    topic: Topic,
    duration: Duration = None,
    count: MessageCount = None,
    rate: Annotated[
        float, typer.Option("--rate", min=0.001, metavar="N", help="Messages a second in all.")
    ] = 1000.0,
    producers: Producers = 1,
    consumers: Consumers = 1,
    type_: TypeOption = Type.EXCLUSIVE,
    size: Size = "1024",
    keys: Keys = 0,
    partitions: Partitions = None,
    non_reliable: NonReliable = False,
    compression: Codec = CompressionOption.NONE,
    linger_ms: Annotated[
        float, typer.Option("--linger-ms", min=0, help="How long a message may wait for others.")
    ] = 0.0,
    output: OutputOption = BenchOutput.TABLE,
    service: ServiceOption = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Publish to TOPIC at a rate and consume at the same time: how long a message takes from when it was due
    until it is durable, and until it is consumed. Exit code 1 if one is lost, comes twice or out of order."""
    load = production(
        topic,
        Amount(duration, count, rate),
        producers=producers,
        size=size,
        keys=keys,
        partitions=partitions,
        reliable=False if non_reliable else None,
        compression=compression.codec,
        linger_ms=linger_ms,
        in_flight=1000,
    )
    run_latency(service_at(service, admin), admin, load, type_.value, consumers, output)


@app.command()
def metadata(
    operation: Annotated[
        MetadataOperation,
        typer.Option("--operation", help="txn: a compare and a put. local-get: without a majority."),
    ] = MetadataOperation.PUT,
    duration: Duration = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="How many calls.")] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, metavar="N", help="Calls a second. Without: as fast as it goes."),
    ] = None,
    callers: Annotated[
        int, typer.Option("--callers", min=1, max=10_000, help="Each waits for its answer.")
    ] = 16,
    keys: Annotated[int, typer.Option("--keys", min=1, max=10_000, help="Different keys.")] = 1000,
    value_size: Annotated[
        int, typer.Option("--value-size", min=0, max=1 << 19, metavar="BYTES", help="Of a value.")
    ] = 128,
    output: OutputOption = BenchOutput.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Call the metadata store, below /bench/. The keys are deleted in the end."""
    run_metadata(
        admin,
        Amount(duration, count, rate),
        operation=operation.value,
        callers=callers,
        keys=keys,
        value_size=value_size,
        output=output,
    )


# -- running -----------------------------------------------------------------------

Work = Callable[[LoadProgress], Coroutine[Any, Any, None]]


class LoadNotSustained(RetryableError):
    """Messages were lost, came twice or out of order, or calls failed."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much, as the options say it."""

    seconds: float | None
    count: int | None
    rate: float | None

    @property
    def duration(self) -> float | None:
        return SECONDS if self.seconds is None and self.count is None else self.seconds


def production(topic: str, amount: Amount, *, size: str, **options: Any) -> Production:
    return Production(
        topic=topic,
        run=draw_run(),
        count=amount.count,
        seconds=amount.duration,
        rate=amount.rate,
        size=_sizes(size),
        **options,
    )


def consumption(topic: str, amount: Amount, *, subscription: str | None, **options: Any) -> Consumption:
    return Consumption(
        topic=topic,
        subscription=subscription or f"bench-{draw_run():08x}",
        count=amount.count,
        seconds=amount.seconds,
        **options,
    )


def run_produce(service: str, load: Production, output: BenchOutput) -> None:
    run = runs.ProduceRun(load)

    async def work(progress: LoadProgress) -> None:
        async with Client(service, **shown_to(service)) as client:
            await run.go(client, progress)

    _carry_out(run, work, output)


def run_consume(service: str, admin: str, load: Consumption, output: BenchOutput, *, is_new: bool) -> None:
    run = runs.ConsumeRun(load, draw_run())
    _run_with_consumers(service, admin, load, run, output, is_kept=not is_new)


def run_latency(
    service: str, admin: str, load: Production, kind: SubscriptionType, consumers: int, output: BenchOutput
) -> None:
    name = f"bench-{load.run:08x}"
    consumption = Consumption(
        topic=load.topic, subscription=name, type=kind, consumers=consumers, start="latest"
    )
    run = runs.LatencyRun(load, consumption)
    _run_with_consumers(service, admin, consumption, run, output, is_kept=False)


def _run_with_consumers(
    service: str,
    admin: str,
    load: Consumption,
    run: runs.ConsumeRun | runs.LatencyRun,
    output: BenchOutput,
    *,
    is_kept: bool,
) -> None:
    async def work(progress: LoadProgress) -> None:
        async with (
            await reached(admin) as asked,
            Client(service, **shown_to(service)) as client,
        ):
            subscription = LoadSubscription(asked, load.topic, load.subscription)
            async with nullcontext() if is_kept else _forgetting(subscription):
                await run.go(client, subscription, progress)

    _carry_out(run, work, output)


def run_metadata(
    admin: str,
    amount: Amount,
    *,
    operation: Operation,
    callers: int,
    keys: int,
    value_size: int,
    output: BenchOutput,
) -> None:
    load = MetadataCalls(
        run=draw_run(),
        operation=operation,
        callers=callers,
        keys=keys,
        value_size=value_size,
        count=amount.count,
        seconds=amount.duration,
        rate=amount.rate,
    )
    run = runs.MetadataRun(load)

    async def work(progress: LoadProgress) -> None:
        async with await reached(admin) as client:
            await run.go(client, progress)

    _carry_out(run, work, output)


def _carry_out(run: runs.LoadRun, work: Work, output: BenchOutput) -> None:
    """Raises LoadNotSustained when all has been shown. What ends a run before, KeyboardInterrupt too, is
    raised when what was found until then has been shown."""
    try:
        with ProgressLine() as progress:
            run_to_end(work(lambda line: progress.show(line()) if progress.is_due else None))
    except KeyboardInterrupt:
        _show(run.outcome(), output)
        raise
    except SavaError:
        if not run.outcome().is_empty:
            _show(run.outcome(), output)
        raise
    outcome = run.outcome()
    _show(outcome, output)
    if complaint := outcome.complaint():
        raise LoadNotSustained(f"run {outcome.run}: {complaint}")


@asynccontextmanager
async def _forgetting(subscription: LoadSubscription) -> AsyncIterator[None]:
    """A subscription without consumers keeps its topic from being trimmed, so a run leaves none."""
    try:
        yield
    finally:
        if subscription.is_used:
            await _forget(subscription)


async def _forget(subscription: LoadSubscription) -> None:
    topic, name = subscription.topic, subscription.name
    try:
        await subscription.delete()
    except (SubscriptionUnknown, TopicUnknown):
        pass  # it was refused, or another client has deleted it
    except SavaError as error:
        print_progress(
            f"sava: subscription {name} of {topic} was not deleted: {error}; "
            f"`sava subscriptions delete {topic} {name} --yes` does it"
        )


def _sizes(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit():
        raise typer.BadParameter(f"--size {text!r}: a number of bytes, or two as in 100-2000")
    sizes = int(low), int(high or low)
    if not HEADER_BYTES <= sizes[0] <= sizes[1] <= LARGEST:
        raise typer.BadParameter(
            f"--size {text}: {HEADER_BYTES} (what a message is recognized by) to {LARGEST}, the lower first"
        )
    return sizes


# -- showing -----------------------------------------------------------------------


def _show(outcome: LoadOutcome, output: BenchOutput) -> None:
    if outcome.note:
        print_progress(f"sava: {outcome.note}")
    if output is BenchOutput.JSON:
        print_json(outcome.as_dict())
    elif output is BenchOutput.CSV:
        row = outcome.flat()
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([row.keys(), row.values()])
        sys.stdout.flush()
    else:
        _show_tables(outcome)


def _show_tables(outcome: LoadOutcome) -> None:
    print_table(
        ("", "COUNT", "FAILED", "SECONDS", "PER_SECOND", "BYTES_PER_SECOND"),
        [
            (
                *(name, f"{flow.count:,}", f"{flow.failed:,}", f"{flow.seconds:.2f}"),
                "-" if flow.rate is None else f"{flow.rate:,.0f}",
                "-" if flow.bytes_per_second is None else decimal(int(flow.bytes_per_second)),
            )
            for name, flow in outcome.flows.items()
        ],
    )
    timed = {name: flow for name, flow in outcome.flows.items() if flow.latency}
    if timed:
        print_line("")
        _show_latencies(timed)
    if outcome.count is not None:
        print_line("")
        count = outcome.count
        names = [each.name for each in fields(count)]
        print_table([name.upper() for name in names], [[f"{getattr(count, name):,}" for name in names]])


def _show_latencies(flows: dict[str, Flow]) -> None:
    columns = list(next(iter(flows.values())).latency)
    print_table(
        ("LATENCY_MS", *(name.upper() for name in columns)),
        [(name, *(f"{flow.latency[column]:,.3f}" for column in columns)) for name, flow in flows.items()],
    )
