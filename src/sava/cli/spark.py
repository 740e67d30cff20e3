"""``sava spark``: PySpark with ``format("sava")`` in place."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from sava.pipeline.launch import program

app = typer.Typer(help="Start PySpark on topics: a shell, or a program.", no_args_is_help=True)

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
Service = Annotated[
    str,
    typer.Option(
        "--service",
        envvar="SAVA_SERVICE",
        metavar="HOST:PORT",
        help='Client address of a broker: what format("sava") uses unless it is told another.',
    ),
]


@app.command(context_settings=PASS_ON)
def shell(context: typer.Context, service: Service = "") -> None:
    """A Python shell with a session in `spark`. All other options are those of pyspark, such as --master and
    --conf; the default master is local[*]."""
    program("pyspark", context.args, os.environ, service).become()


@app.command(context_settings=PASS_ON)
def submit(context: typer.Context, service: Service = "") -> None:
    """Run a program: [OPTIONS] PROGRAM.py [ITS ARGUMENTS]. All other options are those of spark-submit, such
    as --master and --conf; the default master is local[*]. The exit code is the program's."""
    program("spark-submit", context.args, os.environ, service).become()
