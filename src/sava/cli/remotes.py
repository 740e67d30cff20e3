"""``sava remotes``: the clusters that this one replicates to."""

from __future__ import annotations

from typing import Annotated

import typer

from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, as_dict, print_answer, print_json, print_line, print_table
from sava.cli.replication_output import show_differences
from sava.errors import CallerError, RetryableError
from sava.proto import replication_pb2 as pb

app = typer.Typer(help="Add, test and remove clusters that topics are replicated to.", no_args_is_help=True)

ASK_TIMEOUT_S = 30.0
"""For commands that wait for another cluster's answers."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="What the remote is called here, such as west.")]
FILE = "PEM file on the machines of all brokers and runners"


class RemoteSilent(RetryableError):
    """A remote that was tested did not answer, or not as it should."""


class RemoteDiffers(CallerError):
    """A remote that was tested has not what policies need of it."""


@app.command()
def add(
    name: Name,
    service: Annotated[
        str,
        typer.Option("--service", metavar="ADDRESSES", help="Client addresses, with commas between."),
    ],
    token: Annotated[
        str,
        typer.Option("--token", envvar="SAVA_REMOTE_TOKEN", help="Goes with every call to the remote."),
    ] = "",
    tls_ca: Annotated[str, typer.Option("--tls-ca", help=f"Whose signature the remote has: a {FILE}.")] = "",
    tls_cert: Annotated[str, typer.Option("--tls-cert", help=f"Shown to the remote: a {FILE}.")] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", help=f"Of --tls-cert: a {FILE}.")] = "",
    max_rate: Annotated[
        int, typer.Option("--max-rate", min=0, help="Messages a second, of all topics together; 0: any.")
    ] = 0,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Add the cluster at ADDRESSES as remote NAME, or give a remote new addresses and all that goes with
    them. It must answer, and have another cluster_name."""
    request = pb.Remote(
        name=name,
        service=service,
        token=token,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_rate=max_rate,
    )
    response = run(
        admin, lambda client: client.call(client.replication.AddRemote, request, timeout=ASK_TIMEOUT_S)
    )
    print_answer(
        response.remote,
        output,
        f"remote {name} is cluster {response.remote.cluster_name} (id {response.remote.cluster_id})",
    )


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List the remotes. Tokens are not shown."""
    response = run(admin, lambda client: client.call(client.replication.ListRemotes, pb.ListRemotesRequest()))
    if output is Format.JSON:
        print_json([as_dict(remote) for remote in response.remotes])
        return
    print_table(
        ("NAME", "SERVICE", "CLUSTER", "CLUSTER_ID", "TLS", "MAX_RATE"),
        [
            (
                *(remote.name, remote.service, remote.cluster_name, remote.cluster_id),
                "yes" if remote.tls_ca or remote.tls_cert or "https://" in remote.service else "-",
                remote.max_rate or "any",
            )
            for remote in response.remotes
        ],
    )


@app.command(name="test")
def try_(name: Name, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Ask remote NAME who it is, and show in what it differs from what policies need of it."""
    request = pb.TestRemoteRequest(name=name)
    response = run(
        admin, lambda client: client.call(client.replication.TestRemote, request, timeout=ASK_TIMEOUT_S)
    )
    if output is Format.JSON:
        print_json(as_dict(response))
    elif response.is_reachable:
        print_line(
            f"remote {name} is cluster {response.cluster_name} (id {response.cluster_id}), "
            f"answered in {response.round_trip_ms:.0f} ms"
        )
        show_differences({name: response.differences})
    if not response.is_reachable:
        raise RemoteSilent(f"remote {name}: {response.error}")
    if blocking := [each for each in response.differences if each.blocks]:
        raise RemoteDiffers(
            f"remote {name}: messages are not copied because of differences in "
            f"{', '.join(dict.fromkeys(each.topic or each.what for each in blocking))}"
        )


@app.command()
def remove(name: Name, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Remove remote NAME, and what is remembered of topics there. Refused while a policy names it."""
    request = pb.RemoveRemoteRequest(name=name)
    response = run(admin, lambda client: client.call(client.replication.RemoveRemote, request))
    print_answer(response, output, f"remote {name} removed")
