"""``sava produce``: publish messages from arguments, a file, standard input, or made up for a load."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import typer
from rich.filesize import decimal

from sava.cli.connection import DEFAULT_ADMIN, AdminOption, ServiceOption, run, service_at, shown_to
from sava.cli.output import QUIET_S, Format, ProgressLine, print_json, print_line
from sava.client import UNKNOWN_OFFSET, Sent
from sava.client.blocking import Client
from sava.errors import CallerError
from sava.proto import danube_schema_pb2 as schema_pb


class CompressionOption(StrEnum):
    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"

    @property
    def codec(self) -> Literal["lz4", "zstd"] | None:
        return None if self is CompressionOption.NONE else "lz4" if self is CompressionOption.LZ4 else "zstd"


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
        CompressionOption, typer.Option("--compression", help="How batches travel and are stored.")
    ] = CompressionOption.NONE,
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="SUBJECT", help="Messages name this subject's latest version."),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="json or table.")] = Format.TABLE,
    service: ServiceOption = "",
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Publish messages to TOPIC. It is created if it is missing and the cluster allows that.

    Returns when all are durable, and prints their offsets."""
    if lines and file is None:
        raise typer.BadParameter("--lines says how to read --file FILE")
    if sum((bool(messages), file is not None, size is not None)) > 1:
        raise typer.BadParameter("give messages, --file FILE or --size BYTES, not several of them")
    if messages is None and file is None and size is None and count is not None:
        raise typer.BadParameter("--count repeats messages that are given, --file FILE, or --size BYTES")
    if messages:
        chunks = repeated([message.encode() for message in messages], count or 1)
    elif size is not None:
        chunks = repeated([made_up(size)], count or 1)
    elif file is None or lines:
        chunks = lines_of(file)
    else:
        chunks = repeated([content_of(file)], count or 1)
    publish(
        service_at(service, admin),
        topic,
        chunks,
        ProduceOptions(
            key=key,
            attributes=attributes_of(attribute or []),
            rate=rate,
            name=name,
            reliable=False if non_reliable else None,
            compression=compression.codec,
            schema=None if schema is None else latest_schema(admin, schema),
        ),
        output,
    )


# -- options -----------------------------------------------------------------------


CHUNK_MESSAGES: Final = 1000
CHUNK_BYTES: Final = 1 << 20
READ_BYTES: Final = 64 << 10
TURNS_PER_S: Final = 20
"""How finely a rate is kept."""


class FileUnreadable(CallerError):
    """The file to publish cannot be read."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """A codec that leaves payloads as they are and lets messages name a schema."""

    subject: str
    schema_id: int
    schema_version: int

    def encode(self, value: bytes, /) -> bytes:
        return value

    def decode(self, payload: bytes, /) -> bytes:
        return payload


def latest_schema(admin: str, subject: str) -> Stamped:
    request = schema_pb.GetLatestSchemaRequest(subject=subject)
    latest = run(admin, lambda client: client.call(client.schemas.GetLatestSchema, request))
    return Stamped(subject, latest.schema_id, latest.version)


@dataclass(frozen=True, slots=True)
class ProduceOptions:
    key: str | None
    attributes: Mapping[str, str]
    rate: float | None
    name: str | None
    reliable: bool | None
    """None: as the topic is."""
    compression: Literal["lz4", "zstd"] | None
    schema: Stamped | None


# -- where payloads come from --------------------------------------------------------------------


def repeated(payloads: Sequence[bytes], count: int) -> Iterator[list[bytes]]:
    """All of them, ``count`` times over, in chunks."""
    size = sum(map(len, payloads)) or 1
    times = max(1, min(CHUNK_MESSAGES // len(payloads), CHUNK_BYTES // size))
    while count > 0:
        yield list(payloads) * min(times, count)
        count -= times


def made_up(size: int) -> bytes:
    """Not worth compressing, like most payloads that are."""
    return random.randbytes(size)


def content_of(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise FileUnreadable(f"{file} cannot be read: {error.strerror}") from error


def lines_of(file: Path | None) -> Iterator[list[bytes]]:
    """The lines of a file, or of standard input, without their ends. Whatever is there is a chunk, so that a
    line that was typed is published before the next one comes."""
    with _opened(file) as source:
        rest = b""
        while block := source.read1(READ_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            if whole:
                yield whole
        if rest:
            yield [rest]


def _opened(file: Path | None) -> AbstractContextManager[BufferedReader]:
    if file is None or str(file) == "-":
        return nullcontext(cast(BufferedReader, sys.stdin.buffer))
    try:
        return file.open("rb")
    except OSError as error:
        raise FileUnreadable(f"{file} cannot be read: {error.strerror}") from error


def attributes_of(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, is_one, value = text.partition("=")
        if not is_one or not name:
            raise typer.BadParameter(f"--attribute {text!r}: written NAME=VALUE")
        found[name] = value
    return found


# -- publishing ----------------------------------------------------------------------------------


@dataclass(slots=True)
class PublishedSoFar:
    """What has been published so far."""

    messages: int = 0
    size: int = 0
    ranges: dict[str, list[int]] = field(default_factory=dict)
    """Of each topic or partition: the first offset and the end. Others may have published in between."""

    def add(self, payloads: Sequence[bytes], sent: Sequence[Sent]) -> None:
        self.messages += len(payloads)
        self.size += sum(map(len, payloads))
        for part in sent:
            if part.offset == UNKNOWN_OFFSET:
                continue
            known = self.ranges.setdefault(part.topic, [part.offset, part.offset])
            known[0] = min(known[0], part.offset)
            known[1] = max(known[1], part.offset + part.count)


def publish(
    service: str, topic: str, chunks: Iterator[list[bytes]], options: ProduceOptions, output: Format
) -> None:
    published = PublishedSoFar()
    began = time.monotonic()
    with Client(service, **shown_to(service)) as client:
        producer = client.producer(
            topic,
            name=options.name,
            reliable=options.reliable,
            linger_ms=0,
            compression=options.compression,
            schema=options.schema.subject if options.schema is not None else None,
            codec=options.schema,
        )
        with producer, ProgressLine() as progress:
            for chunk in paced(chunks, options.rate):
                published.add(chunk, producer.send_many(chunk, **columns(len(chunk), options)))
                if progress.is_due:
                    speed = _speed(published, time.monotonic() - began)
                    progress.show(f"{published.messages:,} messages, {speed}")
    _report(topic, published, time.monotonic() - began, output)


def columns(count: int, options: ProduceOptions) -> dict[str, Any]:
    """Key and attributes, the same for all messages of a chunk."""
    return {
        "keys": [options.key] * count if options.key is not None else None,
        "attributes": [options.attributes] * count if options.attributes else None,
    }


def paced(chunks: Iterator[list[bytes]], rate: float | None) -> Iterator[list[bytes]]:
    """The same payloads, cut and held back so that no more than ``rate`` come in a second."""
    if rate is None:
        yield from chunks
        return
    size = max(1, int(rate / TURNS_PER_S))
    due = time.monotonic()
    for chunk in chunks:
        for first in range(0, len(chunk), size):
            part = chunk[first : first + size]
            time.sleep(max(0.0, due - time.monotonic()))
            yield part
            # Time that was lost waiting for input or for the broker is not made up for.
            due = max(due, time.monotonic() - 1 / TURNS_PER_S) + len(part) / rate


def _report(topic: str, published: PublishedSoFar, seconds: float, output: Format) -> None:
    if output is Format.JSON:
        print_json(
            {
                "topic": topic,
                "messages": published.messages,
                "bytes": published.size,
                "seconds": round(seconds, 3),
                "offsets": [
                    {"topic": name, "first_offset": first, "next_offset": end}
                    for name, (first, end) in sorted(published.ranges.items())
                ],
            }
        )
        return
    count = published.messages
    line = f"{count} message{'' if count == 1 else 's'} published to {topic}"
    if seconds >= QUIET_S:
        line += f" in {seconds:.1f} s ({_speed(published, seconds)})"
    if len(published.ranges) == 1 and topic in published.ranges:
        line += f", {_offsets(*published.ranges[topic])}"
    print_line(line)
    if topic not in published.ranges:
        for name, (first, end) in sorted(published.ranges.items()):
            print_line(f"  {name}: {_offsets(first, end)}")


def _offsets(first: int, end: int) -> str:
    return f"offset {first}" if end == first + 1 else f"offsets {first} to {end - 1}"


def _speed(published: PublishedSoFar, seconds: float) -> str:
    rate = published.messages / seconds
    return f"{rate:,.{0 if rate >= 10 else 1}f} messages/s, {decimal(int(published.size / seconds))}/s"
