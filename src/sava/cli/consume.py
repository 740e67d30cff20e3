"""``sava consume``: print the messages of a topic, through a subscription or past all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import (
    DEFAULT_ADMIN,
    AdminOption,
    ServiceOption,
    run,
    run_to_end,
    service_at,
    shown_to,
)
from sava.cli.messages import POSITION_FORMS, Position, Printer, parse_position, reader_may_leave
from sava.cli.output import RawFormat
from sava.cli.subscriptions import Type
from sava.client import Batch, Client, Message
from sava.client.messages import Start
from sava.client.subscribe_stream import SubscriptionType
from sava.errors import Outcome, RetryableError
from sava.proto import topics_admin_pb2 as pb

IDLE_S: Final = 3.0


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription", "-s", help="Consume through this one, created if missing. Without: only read."
        ),
    ] = None,
    type_: Annotated[
        Type, typer.Option("--type", help="How a new subscription shares messages between its consumers.")
    ] = Type.SHARED,
    start: Annotated[
        str,
        typer.Option(
            "--start",
            metavar="POSITION",
            help=f"Where a reader or a new subscription begins: {POSITION_FORMS}.",
        ),
    ] = "earliest",
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after this many; exit code 1 if fewer come.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            help=f"End when nothing comes for this long. Default {IDLE_S:g}.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until interrupted.")] = False,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Leave the messages to the subscription: they come again.")
    ] = False,
    output: Annotated[
        RawFormat, typer.Option("--output", "-o", help="json (a line each), table, or raw (payloads alone).")
    ] = RawFormat.TABLE,
    service: ServiceOption = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Print the messages of TOPIC. With a subscription each is acked once it has been printed."""
    if follow and timeout is not None:
        raise typer.BadParameter("--follow continues until interrupted; --timeout ends it")
    if no_ack and subscription is None:
        raise typer.BadParameter("--no-ack has no meaning without --subscription")
    position = parse_position(start)
    wanted = ConsumeOptions(position, count, timeout, follow=follow, output=output)
    service = service_at(service, admin)
    if subscription is None:
        _read_past(service, topic, wanted)
    else:
        _consume(service, topic, subscription, type_.value, wanted, is_acked=not no_ack)


# -- reading -----------------------------------------------------------------------


QUEUE: Final = 1000
"""Messages on their way to here: what is not printed in the end goes back to the subscription."""


class MessagesMissing(RetryableError):
    """Fewer messages came than were asked for."""

    outcome = Outcome.PARTLY


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    start: Position
    count: int | None
    """None: all."""
    idle_s: float | None
    """End when nothing comes for this long; None: the default."""
    follow: bool
    """Never end by itself."""
    output: RawFormat

    @property
    def patience_s(self) -> float | None:
        if self.follow:
            return None
        return IDLE_S if self.idle_s is None else self.idle_s


def _consume(
    service: str,
    topic: str,
    subscription: str,
    kind: SubscriptionType,
    wanted: ConsumeOptions,
    *,
    is_acked: bool,
) -> None:
    async def work(client: Client) -> None:
        consumer = client.consumer(
            topic,
            subscription=subscription,
            type=kind,
            start=cast(Start, wanted.start),
            receive_queue=min(wanted.count or QUEUE, QUEUE),
        )
        async with consumer:
            printer = Countdown(wanted)
            while not printer.is_done:
                batch = await consumer.receive_batch(printer.left, timeout=wanted.patience_s)
                if batch is None:
                    break
                printer.show(list(batch))
                if is_acked:
                    await consumer.ack(batch)
            printer.check()

    _run(service, work)


def _read_past(service: str, topic: str, wanted: ConsumeOptions) -> None:
    """Past all subscriptions."""

    async def work(client: Client) -> None:
        (await _read(client, topic, wanted)).check()

    _run(service, work)


async def _read(client: Client, topic: str, wanted: ConsumeOptions) -> Countdown:
    """Without anything to wait for it ends with the last message there is."""
    waits = wanted.follow or wanted.idle_s is not None or wanted.start == "latest"
    reader = client.reader(topic, start=cast(Start, wanted.start), end=None if waits else "latest")
    async with reader, aclosing(cast(Any, reader.batches())) as batches:
        printer = Countdown(wanted)
        while not printer.is_done:
            batch = await _next(batches, wanted.patience_s if waits else None)
            if batch is None:
                break
            printer.show(batch[: printer.left])
    return printer


def peek(service: str, admin: str, topic: str, start: Position, limit: int, output: RawFormat) -> None:
    """The first messages from ``start``; from "latest" the last ones."""
    if start != "latest":
        wanted = ConsumeOptions(start, limit, None, follow=False, output=output)
        _run(service, lambda client: _read(client, topic, wanted))
        return
    parts = run(admin, lambda client: _ends(client, topic))

    async def work(client: Client) -> None:
        found: list[Message] = []
        for name, first, end in parts:
            async with client.reader(name, start=max(first, end - limit), end=end) as reader:
                found.extend([message async for message in reader])
        found.sort(key=lambda message: message.publish_time)
        Printer(output).show(found[-limit:])

    _run(service, work)


async def _ends(client: AdminClient, topic: str) -> list[tuple[str, int, int]]:
    """Name, first offset and end of the topic, or of each of its partitions."""
    described = await client.call(client.topics.DescribeTopic, pb.DescribeTopicRequest(name=topic))
    parts = [
        await client.call(client.topics.DescribeTopic, pb.DescribeTopicRequest(name=name))
        for name in described.partitions
    ] or [described]
    return [(part.name, part.start_offset, part.next_offset) for part in parts]


class Countdown:
    """Prints until there is enough."""

    def __init__(self, wanted: ConsumeOptions) -> None:
        self._printer = Printer(wanted.output)
        self._count = wanted.count
        self.left = wanted.count
        """None: no end."""

    @property
    def is_done(self) -> bool:
        return self.left == 0

    def show(self, messages: list[Message]) -> None:
        self._printer.show(messages)
        if self.left is not None:
            self.left -= len(messages)

    def check(self) -> None:
        if self.left:
            assert self._count is not None
            raise MessagesMissing(f"{self._count - self.left} of {self._count} messages came")


async def _next(batches: AsyncIterator[Batch], timeout: float | None) -> Batch | None:
    """None at the end, or when nothing comes in time."""
    try:
        async with asyncio.timeout(timeout):
            return await anext(batches, None)
    except TimeoutError:
        return None


def _run(service: str, work: Callable[[Client], Awaitable[object]]) -> None:
    async def connected() -> None:
        async with Client(service, **shown_to(service)) as client:
            await work(client)

    with reader_may_leave():
        run_to_end(connected())
