"""``sava consume``: print the messages of a topic, through a subscription or past all of them."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from sava.cli import positions
from sava.cli.connection import DEFAULT_SERVICE, ServiceOption
from sava.cli.output import RawFormat
from sava.cli.subscriptions import Type

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
            help=f"Where a reader or a new subscription begins: {positions.FORMS}.",
        ),
    ] = "earliest",
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after so many; exit code 1 if fewer come.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            help=f"End when nothing comes for so long. Default {IDLE_S:g}.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Leave the messages to the subscription: they come again.")
    ] = False,
    output: Annotated[
        RawFormat, typer.Option("--output", "-o", help="json (a line each), table, or raw (payloads alone).")
    ] = RawFormat.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
) -> None:
    """Print the messages of TOPIC. With a subscription each is acked once it has been printed."""
    if follow and timeout is not None:
        raise typer.BadParameter("--follow goes on until interrupted; --timeout ends it")
    if no_ack and subscription is None:
        raise typer.BadParameter("--no-ack has no meaning without --subscription")
    position = positions.parse(start)
    # Only here: other commands start in half the time without the client's parts.
    from sava.cli import reading

    wanted = reading.Wanted(position, count, timeout, follow=follow, output=output)
    if subscription is None:
        reading.read(service, topic, wanted)
    else:
        reading.consume(service, topic, subscription, type_.value, wanted, is_acked=not no_ack)
