"""``sava produce``: publish messages from arguments, a file, standard input, or made up for a load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from sava.cli.connection import DEFAULT_ADMIN, DEFAULT_SERVICE, AdminOption, ServiceOption
from sava.cli.output import Format


class Compression(StrEnum):
    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"

    @property
    def codec(self) -> Literal["lz4", "zstd"] | None:
        return None if self is Compression.NONE else "lz4" if self is Compression.LZ4 else "zstd"


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    messages: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MESSAGE]...", help="Payloads; without any, the lines of standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="One message: the whole file ('-': standard input)."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="With --file: each of its lines is a message.")
    ] = False,
    key: Annotated[
        str | None, typer.Option("--key", help="Messages of one key keep their order and their partition.")
    ] = None,
    attribute: Annotated[
        list[str] | None, typer.Option("--attribute", metavar="NAME=VALUE", help="May be repeated.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Publish the given messages this many times over.")
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", min=0, metavar="BYTES", help="Make up messages of this size.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, metavar="N", help="At most N messages a second.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the producer; by default a new one.")
    ] = None,
    non_reliable: Annotated[
        bool, typer.Option("--non-reliable", help="The topic is non-reliable, or to be created so.")
    ] = False,
    compression: Annotated[
        Compression, typer.Option("--compression", help="How batches travel and are stored.")
    ] = Compression.NONE,
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="SUBJECT", help="Messages name this subject's latest version."),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="json or table.")] = Format.TABLE,
    service: ServiceOption = DEFAULT_SERVICE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Publish messages to TOPIC, which is created if it is missing and the cluster allows that.

    Returns when all of them are durable, and says which offsets they have."""
    # Only here: other commands start in half the time without the client's parts.
    from sava.cli import producing

    if lines and file is None:
        raise typer.BadParameter("--lines says how to read --file FILE")
    if sum((bool(messages), file is not None, size is not None)) > 1:
        raise typer.BadParameter("give messages, --file FILE or --size BYTES, not several of them")
    if messages is None and file is None and size is None and count is not None:
        raise typer.BadParameter("--count repeats messages that are given, --file FILE, or --size BYTES")
    if messages:
        chunks = producing.repeated([message.encode() for message in messages], count or 1)
    elif size is not None:
        chunks = producing.repeated([producing.made_up(size)], count or 1)
    elif file is None or lines:
        chunks = producing.lines(file)
    else:
        chunks = producing.repeated([producing.content(file)], count or 1)
    producing.publish(
        service,
        topic,
        chunks,
        producing.Options(
            key=key,
            attributes=producing.attributes(attribute or []),
            rate=rate,
            name=name,
            reliable=False if non_reliable else None,
            compression=compression.codec,
            schema=None if schema is None else producing.latest_schema(admin, schema),
        ),
        output,
    )
