"""The ``sava`` command. Each file beside this one holds a group or a command; this one imports the one that
is used, and turns errors into exit codes: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong
usage, 130 ended by Ctrl-C. Brokers and runners have codes of their own beside these."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer

import sava
from sava.cli.output import leave_standard_output, print_error, print_line
from sava.errors import Outcome, SavaError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command, or a group of commands, that is imported when it is used."""

    module: str
    name: str
    help: str

    def load(self) -> Any:
        return getattr(import_module(f"sava.cli.{self.module}"), self.name)


COMMANDS: Final[Mapping[str, CommandEntry]] = {
    "up": CommandEntry("up", "up", "Run a cluster on this machine until Ctrl-C or SIGTERM."),
    "wait": CommandEntry(
        "up", "wait", "Wait until a cluster can be used: it has a leader, and all of its brokers are there."
    ),
    "broker": CommandEntry("broker", "broker", "Run one broker until SIGTERM or Ctrl-C."),
    "produce": CommandEntry("produce", "produce", "Publish messages to TOPIC."),
    "consume": CommandEntry("consume", "consume", "Print the messages of TOPIC."),
    "doctor": CommandEntry("doctor", "doctor", "Check a cluster, and how a client on this machine sees it."),
}
"""``help``: the beginning of what the command says of itself."""
GROUPS: Final[Mapping[str, CommandEntry]] = {
    "cluster": CommandEntry("cluster", "app", "Create, inspect and change the cluster."),
    "brokers": CommandEntry("brokers", "app", "List, drain and balance the brokers."),
    "meta": CommandEntry("meta", "app", "Read, write and watch the metadata store."),
    "storage": CommandEntry("storage", "app", "Look at stored messages, verify and back them up."),
    "namespaces": CommandEntry("topics", "namespaces_app", "Create, inspect and limit namespaces."),
    "topics": CommandEntry("topics", "app", "Create, inspect, limit, move and delete topics."),
    "subscriptions": CommandEntry(
        "subscriptions", "app", "Create, inspect, move and configure subscriptions."
    ),
    "auth": CommandEntry("auth", "app", "Create keys and tokens, and grant roles."),
    "schemas": CommandEntry("schemas", "app", "Register schemas, check them, bind them to topics."),
    "writers": CommandEntry("pipelines", "writers_app", "Inspect and forget writers of exactly-once writes."),
    "ledgers": CommandEntry(
        "ledgers", "app", "Inspect brokers' ledgers, and end one that cannot be recovered whole."
    ),
    "remotes": CommandEntry(
        "replication", "remotes_app", "Add, test and remove clusters that topics are replicated to."
    ),
    "replication": CommandEntry(
        "replication", "app", "Replicate topics to other clusters, and see how far they are."
    ),
    "spark": CommandEntry("pipelines", "spark_app", "Start PySpark on topics: a shell, or a program."),
    "pipelines": CommandEntry(
        "pipelines", "app", "Create and run pipelines: work on topics, done with Spark."
    ),
    "bench": CommandEntry(
        "bench",
        "app",
        "Put a load on a cluster: rates, latencies, and messages lost, duplicated or reordered.",
    ),
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


def _root() -> typer.Typer:
    root = typer.Typer(
        name="sava",
        help="Sava: publish/subscribe and streaming.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    root.callback()(_options)
    return root


def tree(only: str = "") -> typer.Typer:
    """All commands, or just the one command or group ``only``: Python imports the module of each, and Typer
    prepares every option of every command of a tree before it looks at the first argument, which both take
    longer than most commands do."""
    root = _root()
    for name, command in COMMANDS.items():
        if only in ("", name):
            root.command(name=name)(command.load())
    for name, group in GROUPS.items():
        if only in ("", name):
            root.add_typer(group.load(), name=name, help=group.help)
    return root


def outline() -> typer.Typer:
    """The names of all commands and groups with their help, for usage errors and ``sava --help``: nothing of
    them is imported, and none can be called."""
    root = _root()
    for name, entry in (*COMMANDS.items(), *GROUPS.items()):
        root.command(name=name, help=entry.help)(lambda: None)
    return root


EXIT_UNKNOWN = 4
"""The command may have done what it was to do, and its text names the command that shows whether it did. A
script that takes this for a failure and repeats it may do it twice."""


def _replace_closed_streams() -> None:
    """By such that fail when they are used. Python has nothing for a standard stream that is closed, which
    shows as a traceback, or as a success that is not seen."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")


def main() -> None:
    _replace_closed_streams()
    try:
        first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        root = tree(first) if first in COMMANDS or first in GROUPS else outline()
        root()
    except SavaError as error:
        # Only here: what reaches a broker takes longer to import than some commands to run.
        from sava.cli.connection import way_out

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
