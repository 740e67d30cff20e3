"""The ``sava`` command. Each file beside this one holds one group; this one joins them and turns errors
into exit codes: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage, 130 ended by
Ctrl-C. Brokers and runners have codes of their own beside these."""

from __future__ import annotations

import errno
import os
import sys

import typer

import sava
from sava.cli import (
    bench,
    broker,
    brokers,
    cluster,
    consume,
    doctor,
    journals,
    meta,
    namespaces,
    pipelines,
    produce,
    remotes,
    replication,
    schemas,
    spark,
    storage,
    subscriptions,
    topics,
    up,
    wait,
    writers,
)
from sava.cli.output import leave_standard_output, print_error, print_line
from sava.errors import Outcome, SavaError

app = typer.Typer(
    name="sava",
    help="Sava: publish/subscribe and streaming.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(name="up")(up.up)
app.command(name="wait")(wait.wait)
app.command(name="broker")(broker.broker)
app.add_typer(cluster.app, name="cluster")
app.add_typer(brokers.app, name="brokers")
app.add_typer(meta.app, name="meta")
app.add_typer(storage.app, name="storage")
app.add_typer(namespaces.app, name="namespaces")
app.add_typer(topics.app, name="topics")
app.add_typer(subscriptions.app, name="subscriptions")
app.add_typer(schemas.app, name="schemas")
app.add_typer(writers.app, name="writers")
app.add_typer(journals.app, name="journals")
app.add_typer(remotes.app, name="remotes")
app.add_typer(replication.app, name="replication")
app.add_typer(spark.app, name="spark")
app.add_typer(pipelines.app, name="pipelines")
app.command(name="produce")(produce.produce)
app.command(name="consume")(consume.consume)
app.command(name="doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"sava {sava.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Options before the command."""


EXIT_UNKNOWN = 4
"""The command may have done what it was to do, and its text names the command that shows whether it did. A
script that takes this for a failure and repeats it may do it twice."""


def _replace_closed_streams() -> None:
    """By such that fail when they are used. Python has nothing for a standard stream that is closed, which
    shows as a traceback, or as a success that nobody has seen."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")


def main() -> None:
    _replace_closed_streams()
    try:
        app()
    except SavaError as error:
        # Only here: it knows the errors of clients, which most commands do without.
        from sava.cli.way_out import way_out

        print_error(f"{error}{way_out(error)}")
        sys.exit(EXIT_UNKNOWN if error.outcome is Outcome.UNKNOWN else 1)
    except OSError as error:
        # Files that are named to commands have errors of their own: this is what they print, into a file on a
        # full disk, or what they were to read.
        leave_standard_output()
        closed = error.errno == errno.EBADF
        what = "standard input or output is closed" if closed else "standard output cannot be written"
        print_error(f"{what}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
