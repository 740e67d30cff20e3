"""``sava bench``: loads for a cluster that runs, and what it bears of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

import typer

from sava.cli.connection import DEFAULT_ADMIN, DEFAULT_SERVICE, AdminOption, ServiceOption
from sava.cli.produce import Compression
from sava.cli.subscriptions import Type

app = typer.Typer(
    help="Put a load on a cluster: rates, latencies, and messages lost, duplicated or reordered.",
    no_args_is_help=True,
)

SECONDS: Final = 10.0
"""If nobody says how much."""


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Operation(StrEnum):
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
    Output, typer.Option("--output", "-o", help="table, json, or csv (a header and one row).")
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")]
Duration = Annotated[
    float | None,
    typer.Option("--duration", min=0.1, metavar="SECONDS", help=f"For so long. Default {SECONDS:g}."),
]
ConsumeDuration = Annotated[
    float | None,
    typer.Option(
        "--duration", min=0.1, metavar="SECONDS", help="At most so long. Without: until nothing comes."
    ),
]
MessageCount = Annotated[
    int | None, typer.Option("--count", min=1, help="So many messages, instead of or within --duration.")
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
    typer.Option("--partitions", min=1, help="Create the topic with so many, or add the missing ones."),
]
NonReliable = Annotated[
    bool, typer.Option("--non-reliable", help="The topic is non-reliable, or to be created so.")
]
Codec = Annotated[Compression, typer.Option("--compression", help="How batches travel and are stored.")]
SubscriptionType = Annotated[
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
    compression: Codec = Compression.NONE,
    linger_ms: Annotated[
        float, typer.Option("--linger-ms", min=0, help="How long a message may wait for others.")
    ] = 5.0,
    in_flight: Annotated[
        int,
        typer.Option("--in-flight", min=1, max=1000, help="Batches of each producer that have no receipt."),
    ] = 16,
    output: OutputOption = Output.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
) -> None:
    """Publish to TOPIC. Latency is from when a message was due until it was durable.

    `sava bench consume` recognizes the messages and finds what is missing."""
    # Only here, and in the others: every other command starts in half the time without the client's parts.
    from sava.cli import benching

    load = benching.production(
        topic,
        benching.Amount(duration, count, rate),
        producers=producers,
        size=size,
        keys=keys,
        partitions=partitions,
        reliable=False if non_reliable else None,
        compression=compression.codec,
        linger_ms=linger_ms,
        in_flight=in_flight,
    )
    benching.produce(service, load, output)


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
            help="End when nothing comes for so long, and nothing is left.",
        ),
    ] = 3.0,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", "-s", help="Without: a new one, which is deleted in the end."),
    ] = None,
    type_: SubscriptionType = Type.EXCLUSIVE,
    consumers: Consumers = 1,
    start: Annotated[
        Start, typer.Option("--start", help="Where a new subscription begins.")
    ] = Start.EARLIEST,
    queue: Annotated[
        int, typer.Option("--queue", min=1, max=1_000_000, help="Messages on their way to each consumer.")
    ] = 10_000,
    output: OutputOption = Output.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Consume and ack what is in TOPIC, and check what `sava bench produce` put there: nothing lost, nothing
    twice, everything in order. Exit code 1 if it is not so.

    It ends when nothing comes and the subscription has nothing left. With --count or --duration, and when it
    is interrupted, what is missing counts as unread, not as lost: it may not have had its turn.

    Latency is from when a message was due until it came here; it is true if both clocks are."""
    from sava.cli import benching

    benching.consume(
        service,
        admin,
        benching.consumption(
            topic,
            benching.Amount(duration, count, None),
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
    type_: SubscriptionType = Type.EXCLUSIVE,
    size: Size = "1024",
    keys: Keys = 0,
    partitions: Partitions = None,
    non_reliable: NonReliable = False,
    compression: Codec = Compression.NONE,
    linger_ms: Annotated[
        float, typer.Option("--linger-ms", min=0, help="How long a message may wait for others.")
    ] = 0.0,
    output: OutputOption = Output.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Publish to TOPIC at a rate and consume at the same time: how long a message takes from when it was due
    until it is durable, and until it is consumed. Exit code 1 if one is lost, comes twice or out of order."""
    from sava.cli import benching

    load = benching.production(
        topic,
        benching.Amount(duration, count, rate),
        producers=producers,
        size=size,
        keys=keys,
        partitions=partitions,
        reliable=False if non_reliable else None,
        compression=compression.codec,
        linger_ms=linger_ms,
        in_flight=1000,
    )
    benching.latency(service, admin, load, type_.value, consumers, output)


@app.command()
def metadata(
    operation: Annotated[
        Operation,
        typer.Option("--operation", help="txn: a compare and a put. local-get: without a majority."),
    ] = Operation.PUT,
    duration: Duration = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="So many calls.")] = None,
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
    output: OutputOption = Output.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Call the metadata store, below /bench/. The keys are deleted in the end."""
    from sava.cli import benching

    benching.metadata(
        admin,
        benching.Amount(duration, count, rate),
        operation=operation.value,
        callers=callers,
        keys=keys,
        value_size=value_size,
        output=output,
    )
