"""``sava storage``: what storage holds of topics, whether it is what it says, and that it stays so while
somebody copies it. Nothing here changes it.

Two sources. With ``--journal`` the directory of a stopped broker; otherwise the descriptors in the metadata
store, asked of any broker, and the objects that they describe.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, RawFormat, print_json, print_line
from sava.proto import admin_pb2 as pb
from sava.storage.catalog import HOLD_KEY as HOLD

app = typer.Typer(help="Look at stored messages, verify and back them up.", no_args_is_help=True)

Topic = Annotated[str, typer.Option("--topic", metavar="/NS/TOPIC", help="One topic only.")]
Url = Annotated[
    str,
    typer.Option("--url", help="Where segments are (file:///dir, s3://bucket/prefix); else as configured."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The brokers' configuration: names --url and --admin."),
]
Admin = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="SAVA_ADMIN",
        metavar="HOST:PORT",
        help="Admin address of any broker; else the one that is configured for this machine.",
    ),
]
Journal = Annotated[
    Path | None,
    typer.Option("--journal", metavar="DIR", help="Look into the journal of a stopped broker instead."),
]
DumpOutput = Annotated[
    RawFormat, typer.Option("--output", "-o", help="json, table, or raw (payloads alone).")
]


@app.command()
def inspect(
    topic: Topic = "",
    journal: Journal = None,
    url: Url = "",
    config: Config = None,
    admin: Admin = "",
    output: Output = Format.TABLE,
) -> None:
    """Show topics with their states and segments (a table of all topics leaves the segments out).

    With --url or --config also whether the objects are there, by name and size."""
    from sava.cli import storage_work as work

    if journal is not None:
        _alone(topic=topic, url=url)
        work.inspect_journal(journal, output)
    else:
        work.inspect(work.place(config, url, admin), topic, output, with_objects=bool(url or config))


@app.command()
def verify(
    topic: Topic = "", journal: Journal = None, url: Url = "", config: Config = None, admin: Admin = ""
) -> None:
    """Read everything and compare it with what describes it. Exit code 1 if anything is wrong."""
    from sava.cli import storage_work as work

    if journal is not None:
        _alone(topic=topic, url=url)
        is_sound = work.verify_journal(journal)
    else:
        is_sound = work.verify(work.place(config, url, admin), topic)
    if not is_sound:
        raise typer.Exit(1)


@app.command()
def dump(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="/ns/topic; with --journal a topic's id.")],
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="First offset; by default the first there is.")
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=0, help="Offset to stop before; by default the end.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most this many messages; 0 for all.")] = 0,
    journal: Journal = None,
    url: Url = "",
    config: Config = None,
    admin: Admin = "",
    output: DumpOutput = RawFormat.JSON,
) -> None:
    """Print messages, in order."""
    from sava.cli import storage_work as work

    wanted = work.Wanted(start, end, limit, output)
    if journal is None:
        work.dump(work.place(config, url, admin), topic, wanted)
        return
    _alone(url=url)
    if not topic.isdigit():
        raise typer.BadParameter("a journal knows topics by their id: see sava storage inspect --journal DIR")
    work.dump_journal(journal, int(topic), wanted)


@app.command()
def hold(
    minutes: Annotated[float, typer.Option(min=0.1, help="It ends by itself after so long.")] = 60,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Keep all segments as they are, so that metadata and objects can be copied and fit together.

    Retention and the merging of small segments wait; publishing and consuming go on. Repeat it for more
    time."""
    until_ms = time.time_ns() // 1_000_000 + round(minutes * 60_000)
    request = pb.PutRequest(key=HOLD, value=json.dumps({"until_ms": until_ms}).encode())
    run(admin, lambda client: client.call(client.meta.Put, request))
    until = datetime.fromtimestamp(until_ms / 1000, UTC).isoformat(timespec="seconds")
    if output is Format.JSON:
        print_json({"until": until})
    else:
        print_line(f"segments stay as they are until {until}; `sava storage release` ends it")


@app.command()
def release(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """End what `sava storage hold` began. Repeating it is harmless."""
    response = run(admin, lambda client: client.call(client.meta.Delete, pb.DeleteRequest(key=HOLD)))
    was_held = bool(response.prev)
    if output is Format.JSON:
        print_json({"was_held": was_held})
    else:
        print_line("segments are not held any more" if was_held else "segments were not held")


def _alone(**others: str) -> None:
    for name, value in others.items():
        if value:
            raise typer.BadParameter(f"--{name} has no meaning with --journal")
