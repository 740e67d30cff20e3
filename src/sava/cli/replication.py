"""``sava replication``: which topics are copied to other clusters, and how far they are."""

from __future__ import annotations

from typing import Annotated

import typer

from sava.cli import positions
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, as_dict, print_answer, print_json, print_line
from sava.cli.remotes import ASK_TIMEOUT_S
from sava.cli.replication_output import show_differences, show_status
from sava.cli.replication_verify import verify
from sava.errors import CallerError
from sava.proto import replication_pb2 as pb

app = typer.Typer(help="Replicate topics to other clusters, and see how far they are.", no_args_is_help=True)

Scope = Annotated[
    str,
    typer.Argument(metavar="SCOPE", help="A namespace (default) or a topic (/default/orders)."),
]
START = "earliest, latest, or a time such as 2026-03-01T12:00 (UTC unless it names a zone)"


class RemotesDiffer(CallerError):
    """A policy was not set, because remotes have not what it needs."""


@app.command(name="set")
def set_(
    scope: Scope,
    remotes: Annotated[
        list[str] | None, typer.Option("--remote", metavar="NAME", help="Copy to this remote. Repeatable.")
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Copy nowhere, whatever is set for the namespace.")
    ] = False,
    start: Annotated[
        str, typer.Option("--start", help=f"Where to begin with what was never copied: {START}.")
    ] = "earliest",
    forward: Annotated[
        bool,
        typer.Option("--forward", help="Pass on what came from elsewhere, unless it has been there."),
    ] = False,
    subscriptions: Annotated[
        list[str] | None,
        typer.Option("--subscription", metavar="NAME", help="Copy the position of this one too. Repeatable."),
    ] = None,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Do not ask the remotes whether they have what is needed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show in what the remotes differ.")] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Replicate the topics of SCOPE. The policy of a topic holds in place of its namespace's, as a whole.
    Remotes that differ in what keeps messages from being copied are shown, and nothing is set."""
    if bool(remotes) == off:
        raise typer.BadParameter("name the remotes with --remote, or say --off")
    policy = pb.ReplicationPolicy(
        remotes=remotes or [],
        start=_start(start),
        forward=forward,
        subscriptions=subscriptions or [],
    )
    request = pb.SetReplicationRequest(scope=scope, policy=policy, skip_checks=skip_checks, dry_run=dry_run)
    response = run(
        admin, lambda client: client.call(client.replication.SetReplication, request, timeout=ASK_TIMEOUT_S)
    )
    if output is Format.JSON:
        print_json(as_dict(response))
    else:
        _show_set(scope, response)
    if not response.is_set and not dry_run:
        differing = [each.remote for each in response.remotes if any(d.blocks for d in each.differences)]
        raise RemotesDiffer(
            f"the policy of {scope} was not changed: messages would not be copied because of differences at "
            f"{', '.join(differing)}; --skip-checks sets it all the same"
        )


@app.command()
def get(scope: Scope, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show the policy that holds for SCOPE, and where it is set."""
    request = pb.GetReplicationRequest(scope=scope)
    response = run(admin, lambda client: client.call(client.replication.GetReplication, request))
    if output is Format.JSON:
        print_json(as_dict(response))
    elif not response.from_scope:
        print_line(f"{scope} is not replicated: no policy is set")
    else:
        _show_policy(scope, response)


@app.command()
def clear(scope: Scope, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Remove the policy of SCOPE. Of a topic, its namespace's holds from now on."""
    request = pb.ClearReplicationRequest(scope=scope)
    response = run(admin, lambda client: client.call(client.replication.ClearReplication, request))
    print_answer(response, output, f"{scope} has no replication policy of its own")


@app.command()
def status(
    topic: Annotated[str, typer.Argument(metavar="[TOPIC]", help="Only this topic.")] = "",
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Only to this remote.")] = "",
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Show how far every partition is at every remote, and what keeps it from going on."""
    request = pb.GetReplicationStatusRequest(topic=topic, remote=remote)
    response = run(admin, lambda client: client.call(client.replication.GetReplicationStatus, request))
    if output is Format.JSON:
        print_json([as_dict(each) for each in response.topics])
    else:
        show_status(response.topics)


@app.command()
def recreate(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, such as /default/orders.")],
    remote: Annotated[str, typer.Option("--remote", metavar="NAME", help="Where it was deleted.")],
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Replicate TOPIC to a remote again where it was deleted, or go on where messages were lost before they
    were copied. It is created there if replication may do that."""
    request = pb.RecreateRemoteTopicRequest(topic=topic, remote=remote)
    response = run(admin, lambda client: client.call(client.replication.RecreateRemoteTopic, request))
    print_answer(response, output, f"topic {topic} is replicated to {remote} again")


app.command()(verify)


def _start(text: str) -> str:
    """As a policy has it."""
    if text in ("earliest", "latest"):
        return text
    try:
        moment = positions.parse_time(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"--start {text!r}: give {START}") from None
    return str(positions.to_message(moment).publish_time)


def _show_set(scope: str, response: pb.SetReplicationResponse) -> None:
    if response.remotes:
        show_differences({each.remote: each.differences for each in response.remotes})
    if response.is_set:
        print_line(f"the policy of {scope} is set")


def _show_policy(scope: str, response: pb.GetReplicationResponse) -> None:
    policy = response.policy
    start = policy.start if not policy.start.isdecimal() else positions.instant(int(policy.start))
    print_line(f"{scope}, as set for {response.from_scope}")
    for name, value in (
        ("remotes", ", ".join(policy.remotes) or "none: it is not replicated"),
        ("start", start),
        ("forward", "yes" if policy.forward else "no"),
        ("subscriptions", ", ".join(policy.subscriptions) or "-"),
    ):
        print_line(f"{name:<15} {value}")
