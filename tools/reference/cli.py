"""docs/reference/cli.md, from the commands themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import typer.main

from sava.cli.connection import VARIABLES
from sava.cli.main import tree
from tools.reference.pages import anchor, page, prose, table

Row = tuple[str, str, str]
"""An argument or option, its default, what it means."""
Command = tuple[str, Any]
"""Its full name, and what typer makes of it."""

COMMON: Final = 5
"""An argument or option that as many commands take, with the same meaning, stands at the top of the page."""

INTRODUCTION: Final = """
Every command explains itself with `--help`; `sava --version` prints the version.

| exit code | meaning |
|---|---|
| 0 | Done. Brokers, `sava up` and runners also end so on SIGTERM or Ctrl-C. |
| 1 | Refused or failed: one line on stderr says why. A command that checks or compares has found a fault. |
| 2 | Wrong usage. |
| 3 | A broker stopped itself: its disk failed or is damaged, or an essential part died of a bug (see \
its log). |
| 4 | [Unknown](errors.md#not-done-or-unknown): the answer was lost, or the deadline passed, and the command \
may have taken effect. The line on stderr names the command that shows it. |
| 70 | A runner (`sava pipelines run`) lost its Java, or could not stop a query in time: start it again. |
| 130 | Ended by Ctrl-C. |

A variable in a row below gives the value if the option is absent. These are variables only; all three
together switch to mutual TLS:
"""


COMMON_HEAD: Final = """
## Common arguments and options

The second column of a table is the default. Commands do not repeat the rows here, nor those of their group.
""".strip()
NO_HEADS: Final = ("", "", "")


def render() -> str:
    root = typer.main.get_command(tree())
    commands = list(walk(root, "sava"))
    common = common_rows(commands, COMMON)
    groups = grouped(commands)
    variables = [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]
    return page(
        "The sava command",
        INTRODUCTION,
        table(("variable", ""), variables),
        table(("commands", ""), index(groups)),
        COMMON_HEAD,
        table((*NO_HEADS, "commands"), [(*row, users(row, commands)) for row in common]),
        *sections(groups, {*common}),
    )


def index(groups: dict[str, list[Command]]) -> Iterator[tuple[str, str]]:
    for group, members in groups.items():
        names = [name.removeprefix(group).strip() for name, _ in members]
        yield f"[`{group}`](#{anchor(group)})", ", ".join(f"`{name}`" for name in names if name)


def grouped(commands: list[Command]) -> dict[str, list[Command]]:
    """By their first word after ``sava``; a command may be a group of its own."""
    groups: dict[str, list[Command]] = {}
    for name, command in commands:
        groups.setdefault(" ".join(name.split()[:2]), []).append((name, command))
    return groups


def common_rows(commands: list[Command], enough: int) -> list[Row]:
    """What ``enough`` commands take, arguments first. Of several meanings of one name only the most frequent
    counts."""
    counts = Counter(_row(each) for _, command in commands for each in _shown(command))
    common: dict[str, Row] = {}
    for row, count in counts.most_common():
        if count >= enough:
            common.setdefault(_first_name(row), row)
    return sorted(common.values(), key=lambda row: row[0].startswith("`-"))


def users(row: Row, commands: list[Command]) -> str:
    """The commands that take an option, or the shorter list of those that do not."""
    if not row[0].startswith("`-"):
        return ""
    takes = {name: any(_row(each) == row for each in _shown(command)) for name, command in commands}
    short = min((True, False), key=lambda wanted: sum(taken is wanted for taken in takes.values()))
    listed = [name.removeprefix("sava ") for name, taken in takes.items() if taken is short]
    return ("" if short else "all but ") + ", ".join(f"`{name}`" for name in listed)


def sections(groups: dict[str, list[Command]], everywhere: set[Row]) -> Iterator[str]:
    """Each group, with the rows that its commands share; a second name of a command only refers to the
    first."""
    first: dict[Any, str] = {}
    for group, members in groups.items():
        shared = [row for row in common_rows(members, 2) if row not in everywhere]
        if len(members) > 1:
            yield f"## {group}" + (f"\n\n{table(NO_HEADS, shared)}" if shared else "")
        for name, command in members:
            known = first.setdefault(command.callback, name)
            head = f"{'##' if name == group else '###'} {name}"
            if known == name:
                yield section(head, command, everywhere, {*shared})
            else:
                yield f"{head}\n\nThe same as [`{known}`](#{anchor(known)})."


def walk(command: Any, name: str) -> Iterator[Command]:
    """Every command that does something, by its full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for part, below in sorted(inner.items()):
        if not below.hidden:
            yield from walk(below, f"{name} {part}")


def section(head: str, command: Any, everywhere: set[Row], shared: set[Row]) -> str:
    shown = _shown(command)
    arguments = [each for each in shown if each.param_type_name == "argument"]
    rows = [_row(each) for each in shown if _row(each) not in everywhere]
    parts = [head]
    if arguments:
        parts.append(f"`{' '.join(map(_usage, arguments))}`")
    parts.append(prose(command.help))
    if own := [row for row in rows if row not in shared]:
        parts.append(table(NO_HEADS, own))
    if also := [_first_name(row) for row in rows if row in shared and row[0].startswith("`-")]:
        parts.append(f"Also {', '.join(also)}.")
    return "\n\n".join(parts)


def _shown(command: Any) -> list[Any]:
    """Arguments first."""
    shown = [each for each in command.params if not each.hidden and each.name != "help"]
    return sorted(shown, key=lambda each: each.param_type_name != "argument")


def _row(parameter: Any) -> Row:
    if parameter.param_type_name == "argument":
        return f"`{_label(parameter)}`", "", _meaning(parameter)
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.metavar:
        names += f" `{parameter.metavar}`"
    return names, _default(parameter), _meaning(parameter)


def _first_name(row: Row) -> str:
    """With its backticks, without a metavar."""
    return f"`{row[0].split('`')[1]}`"


def _label(argument: Any) -> str:
    label: str = argument.metavar or argument.name.upper()
    return label.strip("[]{}.")


def _usage(argument: Any) -> str:
    label = _label(argument) + ("…" if argument.nargs == -1 else "")
    return label if argument.required else f"[{label}]"


def _meaning(parameter: Any) -> str:
    """Its help, and which values there are if that does not name them all."""
    meaning = parameter.help or ""
    choices = [str(each.value) for each in parameter.type_descriptor.choices or ()]
    if not {*choices} <= {*re.findall(r"[\w-]+", meaning)}:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if parameter.envvar:
        meaning += f" Variable `{parameter.envvar}`."
    return meaning.strip()


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "*required*"
    if value is True:
        return f"`{option.opts[0]}`"
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"
