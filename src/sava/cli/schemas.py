"""``sava schemas``: what messages look like, how that may change, and which topics insist on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import AdminSession, command
from sava.cli.messages import instant
from sava.cli.output import RawFormat, as_dict, print_fields, print_json, print_line, text_of
from sava.errors import CallerError
from sava.proto import danube_schema_pb2 as pb
from sava.schemas.types import CompatibilityMode, Policy, SchemaType

app = typer.Typer(no_args_is_help=True)

Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="The name of a schema, such as orders-value.")
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")]
File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="The definition ('-': standard input)."),
]


TypeOption = Annotated[SchemaType, typer.Option("--type", help="The kind of schema.")]


class SchemaNotDone(CallerError):
    """The registry said no; the text is its answer."""


class NotCompatible(CallerError):
    """A schema cannot follow the versions before it."""


@command(app)
def register(
    session: AdminSession,
    subject: Subject,
    type_: TypeOption,
    file: File = None,
    description: Annotated[str, typer.Option("--description", help="For readers.")] = "",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be repeated.")] = None,
) -> None:
    """Register the next version of SUBJECT. The same schema again gives the version it has."""
    request = pb.RegisterSchemaRequest(
        subject=subject,
        schema_type=type_.value,
        schema_definition=_definition(type_, file),
        description=description,
        tags=tag or (),
    )
    response = session.ask(request)
    done = "registered" if response.is_new_version else "was registered before"
    session.answer(response, f"{subject} version {response.version} {done}, schema id {response.schema_id}")


@command(app)
def get(
    session: AdminSession,
    subject: Subject,
    version: Annotated[int | None, typer.Option("--version", min=1, help="By default the latest.")] = None,
    output: Annotated[
        RawFormat, typer.Option("--output", "-o", help="json, table, or raw (the definition alone).")
    ] = RawFormat.TABLE,
) -> None:
    """Show a version of SUBJECT with its definition."""

    async def ask(client: AdminClient) -> pb.GetSchemaResponse:
        latest = await _latest(client, subject)
        if version is None or version == latest.version:
            return latest
        request = pb.GetSchemaRequest(schema_id=latest.schema_id, version=version)
        older: pb.GetSchemaResponse = await client.ask(request)
        return older

    response = session.run(ask)
    if output is RawFormat.JSON:
        print_json(as_dict(response))
    elif output is RawFormat.RAW:
        sys.stdout.buffer.write(response.schema_definition)
        sys.stdout.buffer.flush()
    else:
        _show(response)


@command(app)
def versions(session: AdminSession, subject: Subject) -> None:
    """List the versions of SUBJECT."""
    request = pb.ListVersionsRequest(subject=subject)
    response = session.ask(request)
    session.show_list(
        response.versions,
        "version",
        created=lambda each: _created(each.created_at),
        created_by="created_by",
        fingerprint="fingerprint",
        description="description",
    )


@command(app)
def check(
    session: AdminSession,
    subject: Subject,
    type_: TypeOption,
    file: File = None,
    mode: Annotated[
        CompatibilityMode | None,
        typer.Option("--mode", help="Check under this mode instead of the subject's own."),
    ] = None,
) -> None:
    """Check whether a schema could become the next version of SUBJECT. Exit code 1 if not."""
    request = pb.CheckCompatibilityRequest(
        subject=subject, schema_type=type_.value, new_schema_definition=_definition(type_, file)
    )
    if mode is not None:
        request.compatibility_mode = mode.value
    response = session.ask(request)
    if session.is_json:
        print_json(as_dict(response))
    if not response.is_compatible:
        raise NotCompatible(f"{subject}: not compatible: {'; '.join(response.errors)}")
    if not session.is_json:
        print_line(f"{subject}: compatible")


@command(app)
def mode(
    session: AdminSession,
    subject: Subject,
    wanted: Annotated[CompatibilityMode | None, typer.Argument(help="The mode to set.")] = None,
) -> None:
    """Show or set the compatibility mode of SUBJECT."""

    async def ask(client: AdminClient) -> str:
        if wanted is not None:
            request = pb.SetCompatibilityModeRequest(subject=subject, compatibility_mode=wanted.value)
            _check(await client.ask(request))
        return (await _latest(client, subject)).compatibility_mode

    now = session.run(ask)
    if session.is_json:
        print_json({"subject": subject, "compatibility_mode": now})
    else:
        print_line(f"{subject}: {now}")


@command(app)
def delete(
    session: AdminSession,
    subject: Subject,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="The version to delete.")],
) -> None:
    """Delete one version of SUBJECT. Its number is never reused."""
    request = pb.DeleteSchemaVersionRequest(subject=subject, version=version)
    response = session.ask(request)
    _check(response)
    session.answer(response, f"{subject} version {version} deleted")


@command(app, "list")
def list_(session: AdminSession) -> None:
    """List the subjects."""
    response = session.ask(pb.ListSubjectsRequest())
    session.show_list(
        response.subjects,
        "subject",
        type="schema_type",
        version="latest_version",
        mode="compatibility_mode",
        schema_id="schema_id",
        tags=lambda each: ", ".join(each.tags),
    )


@command(app)
def configure_topic(
    session: AdminSession,
    topic: Topic,
    subject: Annotated[str, typer.Option("--subject", help="The subject that its messages follow.")],
    policy: Annotated[
        Policy, typer.Option("--policy", help="What happens to other messages.")
    ] = Policy.ENFORCE,
    validate_payload: Annotated[bool, typer.Option("--validate-payload", help="Check payloads too.")] = False,
) -> None:
    """Bind TOPIC to a subject."""
    request = pb.ConfigureTopicSchemaRequest(
        topic_name=topic,
        schema_subject=subject,
        validation_policy=policy.value,
        enable_payload_validation=validate_payload,
    )

    async def ask(client: AdminClient) -> pb.GetTopicSchemaConfigResponse:
        _check(await client.ask(request))
        return await _of_topic(client, topic)

    _show_topic(session, topic, session.run(ask))


@command(app, "topic")
def show_topic(session: AdminSession, topic: Topic) -> None:
    """Show the subject of TOPIC and what happens to messages that do not follow it."""
    _show_topic(session, topic, session.run(lambda client: _of_topic(client, topic)))


# Danube's name for it.
command(app, "list-subjects", hidden=True)(list_)


def _definition(type_: SchemaType, file: Path | None) -> bytes:
    if file is None:
        if type_ in (SchemaType.BYTES, SchemaType.STRING, SchemaType.NUMBER):
            return b""  # the type says it all
        raise typer.BadParameter(f"a schema of type {type_.value} needs --file FILE")
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise SchemaNotDone(f"{file} cannot be read: {error.strerror}") from error


async def _latest(client: AdminClient, subject: str) -> pb.GetSchemaResponse:
    request = pb.GetLatestSchemaRequest(subject=subject)
    response: pb.GetSchemaResponse = await client.ask(request)
    return response


async def _of_topic(client: AdminClient, topic: str) -> pb.GetTopicSchemaConfigResponse:
    request = pb.GetTopicSchemaConfigRequest(topic_name=topic)
    response: pb.GetTopicSchemaConfigResponse = await client.ask(request)
    return response


def _check(
    response: pb.SetCompatibilityModeResponse
    | pb.DeleteSchemaVersionResponse
    | pb.ConfigureTopicSchemaResponse,
) -> None:
    """Danube's answers carry a refusal inside."""
    if not response.success:
        raise SchemaNotDone(response.message or "the registry refused, without saying why")


_FIELDS: Final = ("subject", "version", "schema_id", "schema_type", "compatibility_mode", "description")


def _show(schema: pb.GetSchemaResponse) -> None:
    fields = {name: getattr(schema, name) for name in _FIELDS}
    fields |= {"created": _created(schema.created_at), "created_by": schema.created_by}
    print_fields(fields | {"tags": ", ".join(schema.tags), "fingerprint": schema.fingerprint})
    print_line("")
    print_line(text_of(schema.schema_definition))


def _show_topic(session: AdminSession, topic: str, binding: pb.GetTopicSchemaConfigResponse) -> None:
    payloads = "payloads are validated" if binding.enable_payload_validation else "payloads are not looked at"
    session.answer(
        binding,
        f"{topic}: subject {binding.schema_subject} (schema id {binding.schema_id}), "
        f"policy {binding.validation_policy}, {payloads}",
    )


def _created(seconds: int) -> str:
    return instant(seconds * 1_000_000)
