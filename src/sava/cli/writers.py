"""``sava writers``: applications that write exactly once, and how far they are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, as_dict, print_answer, print_json, print_table
from sava.proto import writers_pb2 as pb

app = typer.Typer(no_args_is_help=True)


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List writers, and the last batch of each that was decided."""
    response: pb.ListWritersResponse = run(
        admin, lambda client: client.call(client.writers.ListWriters, pb.ListWritersRequest())
    )
    if output is Format.JSON:
        print_json([as_dict(writer) for writer in response.writers])
        return
    print_table(
        ("WRITER", "QUERY", "RUN", "BATCH", "MESSAGES", "DECIDED", "STATE"),
        [
            (
                *(each.writer, each.query or "-", each.run),
                *(each.batch, each.messages, _moment(each.decided_ms), _state(each)),
            )
            for each in response.writers
        ],
    )


@app.command()
def forget(
    writer: Annotated[str, typer.Argument(metavar="WRITER", help="The id of the writer.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also while a batch is decided and not published; the rest of it is lost then."
        ),
    ] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Forget WRITER, and with it which of its batches were published: they would be published again."""
    request = pb.ForgetWriterRequest(writer=writer, force=force)
    response = run(admin, lambda client: client.call(client.writers.ForgetWriter, request))
    print_answer(response, output, f"writer {writer} forgotten")


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def _state(writer: pb.WriterInfo) -> str:
    if writer.is_published:
        return "published"
    return f"not published: {writer.error}" if writer.error else "being published"
