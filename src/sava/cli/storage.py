"""``sava storage``: what storage holds of topics, and whether it is what it says. Nothing here changes it.

Two sources. With ``--journal`` the directory of a stopped broker; otherwise the descriptors in the metadata
store, asked of any broker, and the objects that they describe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sava.cli.output import Format, Output, RawFormat

app = typer.Typer(help="Look at stored messages and verify them.", no_args_is_help=True)

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


def _alone(**others: str) -> None:
    for name, value in others.items():
        if value:
            raise typer.BadParameter(f"--{name} has no meaning with --journal")
