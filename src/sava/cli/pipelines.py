"""``sava pipelines``: work on topics that runners do with Spark; ``sava spark``: PySpark on topics; ``sava
writers``: applications that write exactly once, and how far they are."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from sava import logs
from sava.api.admin_client import AdminClient
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, AdminSession, command, tls_from_environment
from sava.cli.messages import moment
from sava.cli.output import as_dict, print_fields, print_json, print_line, print_rows
from sava.errors import CallerError, Outcome, RetryableError
from sava.pipeline.launch import program
from sava.proto import pipelines_pb2 as pb
from sava.proto import writers_pb2

app = typer.Typer(no_args_is_help=True)

DELETE_TIMEOUT_S = 60.0
POLL_S = 0.2
DEFAULT_KIND = "custom"

Name = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.")]


class StillStopping(RetryableError):
    """A pipeline that was deleted is still at work."""

    outcome = Outcome.PARTLY


class NoSuchPipeline(CallerError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no pipeline {name}; `sava pipelines list` shows those that there are")


@command(app)
def create(
    session: AdminSession,
    name: Name,
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="OPTION=VALUE",
            help='What is read, by options of format("sava"): topic=/default/orders. Repeatable.',
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="OPTION=VALUE",
            help="Where it goes: topic=/default/copy, or format=parquet with its options. Repeatable.",
        ),
    ] = None,
    function: Annotated[
        str,
        typer.Option(
            "--function", metavar="MODULE:FUNCTION", help="From DataFrame to DataFrame; without it: a copy."
        ),
    ] = "",
    trigger: Annotated[
        str, typer.Option("--trigger", metavar="TIME", help='Between batches, such as "1 second".')
    ] = "",
    output_mode: Annotated[
        str, typer.Option("--output-mode", metavar="MODE", help="append, update or complete.")
    ] = "",
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", metavar="DIR", help="By default below the runner's --checkpoints."),
    ] = "",
) -> None:
    """Create a pipeline of kind custom. `apply` creates and changes pipelines by files."""
    settings: dict[str, Any] = {"from": _pairs(from_, "--from"), "to": _pairs(to, "--to")}
    given = {"function": function, "trigger": trigger, "outputMode": output_mode, "checkpoint": checkpoint}
    settings |= {key: value for key, value in given.items() if value}
    spec = spec_of(name, DEFAULT_KIND, settings)
    request = pb.ApplyPipelineRequest(spec=spec, create_only=True)
    _answer(
        session, session.ask(request), f"pipeline {name} created; a runner does it (`sava pipelines run`)"
    )


@command(app)
def apply(
    session: AdminSession,
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="YAML ('-': standard input).")],
) -> None:
    """Create the pipelines of FILE, and change those that are different. All are checked before any."""
    specs = read_specs(file)

    async def work(client: AdminClient) -> list[tuple[str, pb.Pipeline]]:
        before = {each.spec.name: each for each in await _all(client)}
        done = []
        for spec in specs:
            request = pb.ApplyPipelineRequest(spec=spec)
            applied = await client.ask(request)
            known = before.get(spec.name)
            how = "created" if known is None else "changed"
            done.append(
                ("unchanged" if known is not None and known.revision == applied.revision else how, applied)
            )
        return done

    done = session.run(work)
    if session.is_json:
        print_json([{"result": how, **_shown(applied)} for how, applied in done])
        return
    for how, applied in done:
        print_line(f"pipeline {applied.spec.name} {how}")


@command(app, "list")
def list_(session: AdminSession) -> None:
    """List pipelines, and how far they are."""
    found = session.run(_all)
    if session.is_json:
        print_json([_shown(each) for each in found])
        return
    print_rows(
        found,
        name=lambda each: each.spec.name,
        kind=lambda each: each.spec.kind,
        state=lambda each: each.status.state,
        runner=lambda each: each.status.runner or "-",
        rows=lambda each: each.status.rows,
        **{"rows/s": lambda each: f"{each.status.rate:.1f}"},
        lag=_lag,
        lag_s=_lag_s,
        restarts=lambda each: each.status.restarts,
    )


@command(app)
def status(
    session: AdminSession,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="By default all.")] = None,
) -> None:
    """Show how far pipelines are, and the last error."""
    found = _chosen(session.run(_all), names or [])
    if session.is_json:
        print_json([{"name": each.spec.name, **as_dict(each.status)} for each in found])
        return
    print_rows(
        found,
        name=lambda each: each.spec.name,
        state=lambda each: each.status.state,
        since=lambda each: moment(each.status.since_ms),
        reported=lambda each: moment(each.status.reported_ms),
        rows=lambda each: each.status.rows,
        lag=_lag,
        lag_s=_lag_s,
        restarts=lambda each: each.status.restarts,
        last_error=lambda each: each.status.last_error or "-",
    )


@command(app)
def describe(session: AdminSession, name: Name) -> None:
    """Show a pipeline: its settings, and how far it is."""
    (found,) = _chosen(session.run(_all), [name])
    if session.is_json:
        print_json(_shown(found))
        return
    spec, status = found.spec, found.status
    fields = as_dict(status)
    for name in ("since", "reported"):
        fields[name] = moment(fields.pop(f"{name}_ms"))
    print_fields(
        {"name": spec.name, "kind": spec.kind, "made_by": spec.made_by, "revision": found.revision}
        | {"paused": "yes" if found.is_paused else "no", **fields}
        | {"lag_messages": _lag(found), "lag_seconds": _lag_s(found)}
    )
    print_line("settings")
    for line in json.dumps(json.loads(found.spec.settings), indent=2, ensure_ascii=False).splitlines():
        print_line(f"  {line}")


@command(app)
def pause(session: AdminSession, name: Name) -> None:
    """Stop a pipeline after its current batch, until it is resumed."""
    paused = session.ask(pb.PipelineName(name=name), "PausePipeline")
    _answer(session, paused, f"pipeline {name} is paused")


@command(app)
def resume(session: AdminSession, name: Name) -> None:
    """Continue a paused pipeline."""
    resumed = session.ask(pb.PipelineName(name=name), "ResumePipeline")
    _answer(session, resumed, f"pipeline {name} is resumed")


@command(app)
def delete(
    session: AdminSession,
    name: Name,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until its runner has stopped it.")] = True,
) -> None:
    """Delete a pipeline. Its checkpoint and output stay."""

    async def work(client: AdminClient) -> bool:
        response = await client.ask(pb.PipelineName(name=name), "DeletePipeline")
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        is_gone = bool(response.is_gone)
        while wait and not is_gone:
            if time.monotonic() >= deadline:
                raise StillStopping(
                    f"pipeline {name} is deleted, but its runner has not stopped it yet; it goes when it has"
                )
            await asyncio.sleep(POLL_S)
            is_gone = name not in {each.spec.name for each in await _all(client)}
        return is_gone

    is_gone = session.run(work)
    if session.is_json:
        print_json({"name": name, "is_gone": is_gone})
    else:
        print_line(f"pipeline {name} {'deleted' if is_gone else 'goes when its runner has stopped it'}")


@command(app)
def runners(session: AdminSession) -> None:
    """List the runners, and how many pipelines each has."""
    response: pb.ListRunnersResponse = session.ask(pb.ListRunnersRequest())
    session.show_list(
        response.runners,
        "runner",
        pipelines="claims",
        kinds=lambda each: ",".join(each.kinds),
        only=lambda each: ",".join(each.only) or "-",
        since=lambda each: moment(each.since_ms),
    )


@app.command(name="run")
def run_(
    master: Annotated[
        str, typer.Option("--master", metavar="URL", help="Spark's master; its cores are shared by all.")
    ] = "local[*]",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="This pipeline alone. Repeatable.")
    ] = None,
    checkpoints: Annotated[
        Path,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Where queries store their progress: one directory for all runners.",
        ),
    ] = Path("sava-checkpoints"),
    python_path: Annotated[
        list[Path] | None,
        typer.Option("--python-path", metavar="DIR", help="Where users' functions are. Repeatable."),
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="Of Spark. Repeatable.")
    ] = None,
    claim_ttl: Annotated[
        float,
        typer.Option(
            "--claim-ttl",
            min=2,
            max=300,
            metavar="SECONDS",
            help="After this long without a sign of this runner another takes over.",
        ),
    ] = 10.0,
    stuck_after: Annotated[
        float,
        typer.Option(
            "--stuck-after",
            min=5,
            metavar="SECONDS",
            help="A query that has work and does nothing for this long restarts.",
        ),
    ] = 120.0,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Run pipelines until SIGTERM or Ctrl-C: they stop after their current batch then (a second signal: at
    once). Several runners share the work, and take over from each other."""
    # Only here: other commands need no Spark.
    from sava.pipeline.runner import process

    logs.set_up()
    options = process.RunnerOptions(
        admin=admin,
        master=master,
        only=tuple(only or ()),
        checkpoints=checkpoints.absolute(),
        python_path=tuple(python_path or ()),
        conf=_pairs(conf, "--conf"),
        tls=tls_from_environment(),
        ttl_s=claim_ttl,
        stuck_s=stuck_after,
    )
    sys.exit(process.run(options))


async def _all(client: AdminClient) -> list[pb.Pipeline]:
    response = await client.ask(pb.ListPipelinesRequest())
    return list(response.pipelines)


def _chosen(found: Sequence[pb.Pipeline], names: Sequence[str]) -> list[pb.Pipeline]:
    by_name = {each.spec.name: each for each in found}
    for name in names:
        if name not in by_name:
            raise NoSuchPipeline(name)
    return [by_name[name] for name in names] if names else list(found)


def _answer(session: AdminSession, pipeline: pb.Pipeline, text: str) -> None:
    if session.is_json:
        print_json(_shown(pipeline))
    else:
        print_line(text)


def _shown(pipeline: pb.Pipeline) -> dict[str, Any]:
    shown = as_dict(pipeline)
    shown["spec"]["settings"] = json.loads(pipeline.spec.settings)
    return shown


def _lag(each: pb.Pipeline) -> str:
    """Nothing is shown for what is not known."""
    return str(each.status.lag_messages) if each.status.lag_messages >= 0 else "-"


def _lag_s(each: pb.Pipeline) -> str:
    return f"{each.status.lag_seconds:.1f}" if each.status.lag_seconds >= 0 else "-"


def _pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for text in given or ():
        name, found, value = text.partition("=")
        if not found or not name:
            raise typer.BadParameter(f"{option} {text}: written NAME=VALUE")
        pairs[name] = value
    return pairs


# -- files of pipelines ------------------------------------------------------------

# YAML, one document for each:
#
#     name: upper
#     from: {topic: /default/orders, startingOffsets: earliest}
#     function: shop:upper
#     to: {topic: /default/shouted}
#
# What is neither name nor kind is a setting of the kind.


class FileInvalid(CallerError):
    """A file that does not hold pipelines; says where and why."""


def read_specs(file: Path) -> list[pb.PipelineSpec]:
    """All of them, checked. '-' is standard input. Raises FileInvalid, SettingsInvalid."""
    shown = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise FileInvalid(f"{shown} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileInvalid(f"{shown} is not YAML: {' '.join(str(error).split())}") from None
    if not documents:
        raise FileInvalid(f"{shown} holds no pipeline")
    found = [
        _spec_of_document(document, f"{shown}, document {number}")
        for number, document in enumerate(documents, 1)
    ]
    names = [spec.name for spec in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FileInvalid(f"{shown} has two pipelines of the name {twice[0]}")
    return found


def _spec_of_document(document: Any, where: str) -> pb.PipelineSpec:
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise FileInvalid(f"{where}: a pipeline is written as settings by name")
    settings = dict(document)
    name, kind = settings.pop("name", None), settings.pop("kind", DEFAULT_KIND)
    if not isinstance(name, str) or not name:
        raise FileInvalid(f"{where}: the pipeline has no name")
    return spec_of(name, str(kind), settings)


def spec_of(name: str, kind: str, settings: dict[str, Any]) -> pb.PipelineSpec:
    """Raises SettingsInvalid."""
    # Only here: the settings of kinds bring parts that other commands do not need.
    from sava.pipeline.runner import kinds

    kinds.check(name, kind, settings)
    try:
        text = json.dumps(settings)
    except TypeError as error:
        raise FileInvalid(f"pipeline {name}: {error}; write it as text") from None
    return pb.PipelineSpec(name=name, kind=kind, settings=text)


# -- PySpark with format("sava") in place ------------------------------------------


spark_app = typer.Typer(no_args_is_help=True)

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
Service = Annotated[
    str,
    typer.Option(
        "--service",
        envvar="SAVA_SERVICE",
        metavar="HOST:PORT",
        help='Client address of a broker: what format("sava") uses unless the program names another.',
    ),
]


@spark_app.command(context_settings=PASS_ON)
def shell(context: typer.Context, service: Service = "") -> None:
    """A Python shell with a session in `spark`. All other options are those of pyspark, such as --master and
    --conf; the default master is local[*]."""
    program("pyspark", context.args, os.environ, service).become()


@spark_app.command(context_settings=PASS_ON)
def submit(context: typer.Context, service: Service = "") -> None:
    """Run a program: [OPTIONS] PROGRAM.py [ITS ARGUMENTS]. All other options are those of spark-submit, such
    as --master and --conf; the default master is local[*]. The exit code is the program's."""
    program("spark-submit", context.args, os.environ, service).become()


# -- sava writers ------------------------------------------------------------------


writers_app = typer.Typer(no_args_is_help=True)


@command(writers_app, "list")
def list_writers(session: AdminSession) -> None:
    """List writers, and the last batch of each that was decided."""
    response = session.ask(writers_pb2.ListWritersRequest())
    session.show_list(
        response.writers,
        *("writer", "query", "run", "batch", "messages"),
        decided=lambda each: moment(each.decided_ms),
        state=_state,
    )


@command(writers_app)
def forget(
    session: AdminSession,
    writer: Annotated[str, typer.Argument(metavar="WRITER", help="The id of the writer.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also while a batch is decided and not published; the rest of it is lost then."
        ),
    ] = False,
) -> None:
    """Forget WRITER, and with it which of its batches were published: they would be published again."""
    request = writers_pb2.ForgetWriterRequest(writer=writer, force=force)
    session.answer(session.ask(request), f"writer {writer} forgotten")


def _state(writer: writers_pb2.WriterInfo) -> str:
    if writer.is_published:
        return "published"
    return f"not published: {writer.error}" if writer.error else "being published"
