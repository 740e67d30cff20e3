"""docs/reference/cli.md, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import typer.main

from sava.cli.connection import TLS_VARIABLES
from sava.cli.main import tree
from tools.reference.pages import anchor, page, prose, table

INTRODUCTION: Final = """
Every command explains itself with `--help`. Exit codes:

* 0: done. Brokers, `sava up` and runners also end so on SIGTERM or Ctrl-C.
* 1: refused or failed (one line on stderr says why); of commands that check or compare: something is wrong.
* 2: wrong usage.
* 3: a broker has stopped by itself: its disk failed, what is on it is damaged, or an essential part of it
  died of a bug (its log says which).
* 4: unknown. The command may have done what it was to do: its answer was lost, or its deadline passed. The
  line on stderr names the command that shows which. [Errors](errors.md#not-done-or-unknown) tells more.
* 70: a runner (`sava pipelines run`) has lost its Java, or could not stop a query in time: start it again.
* 130: ended by Ctrl-C.

`sava --version` tells the version. What is said below to be "also as" a variable of the environment is taken
from there where the option is not given. These are variables only; all three together switch to mutual TLS:
"""


def render() -> str:
    root = typer.main.get_command(tree())
    commands = list(walk(root, "sava"))
    rows = [
        (f"[`{name}`](#{anchor(name)})", prose(command.help).partition("\n\n")[0])
        for name, command in commands
    ]
    variables = [(f"`{name}`", meaning) for name, meaning in TLS_VARIABLES.items()]
    return page(
        "The sava command",
        INTRODUCTION,
        table(("variable", "a file in PEM"), variables),
        table(("command", "what it does"), rows),
        *(section(name, command) for name, command in commands),
    )


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for part, below in sorted(inner.items()):
        if not below.hidden:
            yield from walk(below, f"{name} {part}")


def section(name: str, command: Any) -> str:
    shown = [each for each in command.params if not each.hidden and each.name != "help"]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    usage = " ".join((name, *(_usage(each) for each in arguments), *(["[OPTIONS]"] if options else [])))
    parts = [f"## {name}", f"`{usage}`", prose(command.help)]
    if arguments:
        rows = [(f"`{_label(each)}`", _meaning(each)) for each in arguments]
        parts.append(table(("argument", "meaning"), rows))
    if options:
        parts.append(table(("option", "default", "meaning"), [_option(each) for each in options]))
    return "\n\n".join(parts)


def _label(argument: Any) -> str:
    label: str = argument.metavar or argument.name.upper()
    return label.strip("[]{}.")


def _usage(argument: Any) -> str:
    label = _label(argument) + ("…" if argument.nargs == -1 else "")
    return label if argument.required else f"[{label}]"


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.metavar:
        names += f" `{option.metavar}`"
    return names, _default(option), _meaning(option)


def _meaning(parameter: Any) -> str:
    """Its help, and which values there are if that does not name them all."""
    meaning = parameter.help or ""
    choices = [str(each.value) for each in parameter.type_descriptor.choices or ()]
    if not {*choices} <= {*re.findall(r"[\w-]+", meaning)}:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if parameter.envvar:
        meaning += f" Also as `{parameter.envvar}`."
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
