"""The ``sava`` command. Each file beside this one holds one group; this one joins them and turns errors
into exit codes: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage, 130 ended by
Ctrl-C. Brokers and runners have codes of their own beside these."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

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

COMMANDS: Final[Mapping[str, Callable[..., Any]]] = {
    "up": up.up,
    "wait": wait.wait,
    "broker": broker.broker,
    "produce": produce.produce,
    "consume": consume.consume,
    "doctor": doctor.doctor,
}
GROUPS: Final[Mapping[str, typer.Typer]] = {
    "cluster": cluster.app,
    "brokers": brokers.app,
    "meta": meta.app,
    "storage": storage.app,
    "namespaces": namespaces.app,
    "topics": topics.app,
    "subscriptions": subscriptions.app,
    "schemas": schemas.app,
    "writers": writers.app,
    "journals": journals.app,
    "remotes": remotes.app,
    "replication": replication.app,
    "spark": spark.app,
    "pipelines": pipelines.app,
    "bench": bench.app,
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"sava {sava.__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Options before the command."""


def tree(only: str = "") -> typer.Typer:
    """All commands, or just the one command or group ``only``: Typer prepares every option of every command
    of a tree before it looks at the first argument, which takes longer than most commands do."""
    root = typer.Typer(
        name="sava",
        help="Sava: publish/subscribe and streaming.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    root.callback()(_options)
    is_known = only in COMMANDS or only in GROUPS
    for name, command in COMMANDS.items():
        if not is_known or name == only:
            root.command(name=name)(command)
    for name, group in GROUPS.items():
        if not is_known or name == only:
            root.add_typer(group, name=name)
    return root


app = tree()


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
        tree(sys.argv[1] if len(sys.argv) > 1 else "")()
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
