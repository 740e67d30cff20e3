"""``sava meta``: the operators' view of the metadata store."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import AdminSession, command
from sava.cli.output import (
    RawFormat,
    as_dict,
    end_without_reader,
    print_json,
    print_json_line,
    print_line,
    print_rows,
    text_of,
)
from sava.errors import CallerError
from sava.proto import admin_pb2 as pb

app = typer.Typer(no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="A key, such as /namespaces/default/policy.")]
Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="A prefix that ends in '/', or a whole key.")]
Local = Annotated[
    bool,
    typer.Option("--local", help="Read the asked broker's copy, possibly old; works without a majority."),
]
ValuesOutput = Annotated[
    RawFormat, typer.Option("--output", "-o", help="json, table, or raw (values alone).")
]


class NotFoundError(CallerError):
    """The key does not exist, or a condition on it does not hold."""


@command(app)
def get(
    session: AdminSession,
    key: Key,
    local: Local = False,
    output: ValuesOutput = RawFormat.RAW,
) -> None:
    """Print the value of KEY (linearizable unless --local)."""
    response = session.ask(pb.GetRequest(key=key, local=local))
    if not response.HasField("kv"):
        raise NotFoundError(f"key {key} does not exist (at revision {response.revision})")
    _show([response.kv], output, single=True)


@command(app, "range")
def range_(
    session: AdminSession,
    prefix: Prefix,
    limit: Annotated[int, typer.Option(min=0, help="At most this many keys; 0 for all.")] = 0,
    local: Local = False,
    output: ValuesOutput = RawFormat.TABLE,
) -> None:
    """List the keys under PREFIX, in order."""

    async def pages(client: AdminClient) -> list[pb.KeyValue]:
        kvs: list[pb.KeyValue] = []
        while True:
            left = limit - len(kvs) if limit else 0
            after = kvs[-1].key if kvs else ""
            page = min(left, 1000) if left else 1000
            request = pb.RangeRequest(prefix=prefix, limit=page, start_after=after, local=local)
            response = await client.ask(request)
            kvs.extend(response.kvs)
            if not response.more or (limit and len(kvs) >= limit):
                return kvs

    _show(session.run(pages), output)


@command(app)
def put(
    session: AdminSession,
    key: Key,
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="The value; '-' reads it from standard input.")
    ],
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Only when the key does not exist.")] = False,
    if_mod_revision: Annotated[
        int | None, typer.Option(min=0, help="Only when it was last changed at this revision.")
    ] = None,
) -> None:
    """Write VALUE under KEY."""
    data = sys.stdin.buffer.read() if value == "-" else value.encode()
    request = pb.PutRequest(key=key, value=data, if_absent=if_absent)
    if if_mod_revision is not None:
        request.if_mod_revision = if_mod_revision
    response = session.ask(request)
    if not response.succeeded:
        raise NotFoundError(f"key {key} was not changed: {_why_not(request, response)}")
    session.answer(response, f"revision {response.revision}")


def _why_not(request: pb.PutRequest, response: pb.PutResponse) -> str:
    if not response.HasField("prev"):
        return "it does not exist"
    if request.if_absent:
        return f"it exists since revision {response.prev.create_revision}"
    return f"it was last changed at revision {response.prev.mod_revision}, not {request.if_mod_revision}"


@command(app)
def delete(
    session: AdminSession,
    key: Key,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Delete everything under KEY, which then ends in '/'.")
    ] = False,
) -> None:
    """Delete KEY. Deleting what does not exist is no error."""
    response = session.ask(pb.DeleteRequest(key=key, prefix=prefix))
    session.answer(response, f"deleted {len(response.prev)}, revision {response.revision}")


@command(app)
def watch(
    session: AdminSession,
    prefix: Prefix,
    from_revision: Annotated[
        int, typer.Option(min=0, help="Begin with this revision; 0 for from now on.")
    ] = 0,
) -> None:
    """Print every change under PREFIX until interrupted."""

    async def follow(client: AdminClient) -> None:
        async for response in client.watch(pb.WatchRequest(prefix=prefix, from_revision=from_revision)):
            for event in response.events:
                _show_event(session, event)
            end_without_reader()
            await asyncio.sleep(0)

    session.run(follow)


def _show_event(session: AdminSession, event: pb.Event) -> None:
    if session.is_json:
        print_json_line(as_dict(event))
    elif event.HasField("kv"):
        print_line(f"{event.revision} put {event.key} {text_of(event.kv.value)}")
    else:
        print_line(f"{event.revision} delete {event.key}")


def _show(kvs: list[Any], output: RawFormat, *, single: bool = False) -> None:
    if output is RawFormat.JSON:
        rows = [as_dict(kv) for kv in kvs]
        print_json(rows[0] if single else rows)
    elif output is RawFormat.RAW:
        for kv in kvs:
            sys.stdout.buffer.write(kv.value + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_rows(
            kvs, "key", value=lambda kv: text_of(kv.value), mod_revision="mod_revision", version="version"
        )
