"""``sava namespaces``: where topics live, and the limits that hold there."""

from __future__ import annotations

from typing import Annotated

import typer

from sava.cli import limits
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run
from sava.cli.output import Format, Output, as_dict, print_answer, print_json, print_line, print_table
from sava.cli.topics import show_topics
from sava.errors import CallerError
from sava.proto import topics_admin_pb2 as pb

app = typer.Typer(no_args_is_help=True)

Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="A namespace, such as default.")]


class NamespaceTaken(CallerError):
    """A namespace of that name exists already."""


@app.command()
def create(
    namespace: Namespace,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="A namespace that exists already is no error.")
    ] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Create NAMESPACE."""
    request = pb.CreateNamespaceRequest(namespace=namespace)
    response = run(admin, lambda client: client.call(client.namespaces.CreateNamespace, request))
    if response.already_existed and not if_absent:
        raise NamespaceTaken(f"namespace {namespace} exists already")
    print_answer(
        response,
        output,
        f"namespace {namespace} {'exists already' if response.already_existed else 'created'}",
    )


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List the namespaces."""
    response = run(
        admin, lambda client: client.call(client.namespaces.ListNamespaces, pb.ListNamespacesRequest())
    )
    if output is Format.JSON:
        print_json(list(response.namespaces))
    else:
        print_table(("NAMESPACE",), [(name,) for name in response.namespaces])


@app.command()
def describe(namespace: Namespace, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show NAMESPACE: how many topics it has, and its limits."""
    _show(_describe(namespace, admin), output)


@app.command()
def topics(namespace: Namespace, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List the topics of NAMESPACE."""
    show_topics(namespace, output, admin)


@app.command()
def policies(namespace: Namespace, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show the limits of NAMESPACE: its own and the effective ones."""
    description = _describe(namespace, admin)
    if output is Format.JSON:
        fields = as_dict(description)
        print_json({name: fields[name] for name in ("namespace", "policy", "effective_policy")})
    else:
        limits.show(description.policy, description.effective_policy)


@app.command()
def set_policy(
    context: typer.Context,
    namespace: Namespace,
    max_producers_per_topic: limits.MaxProducers = None,
    max_subscriptions_per_topic: limits.MaxSubscriptions = None,
    max_consumers_per_topic: limits.MaxConsumers = None,
    max_consumers_per_subscription: limits.MaxSubscriptionConsumers = None,
    max_publish_rate: limits.MaxPublishRate = None,
    max_subscription_dispatch_rate: limits.MaxDispatchRate = None,
    max_message_size: limits.MaxMessageSize = None,
    retention_time_minutes: limits.RetentionTime = None,
    retention_size_mb: limits.RetentionSize = None,
    clear: limits.Clear = None,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Set limits of NAMESPACE. They hold for its topics unless these have their own; 0 means no limit."""
    policy, cleared = limits.change(context.params)
    request = pb.SetNamespacePolicyRequest(namespace=namespace, policy=policy, clear=cleared)
    _show(run(admin, lambda client: client.call(client.namespaces.SetNamespacePolicy, request)), output)


@app.command()
def delete(namespace: Namespace, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Delete NAMESPACE. Refused while it has topics."""
    request = pb.DeleteNamespaceRequest(namespace=namespace)
    response = run(admin, lambda client: client.call(client.namespaces.DeleteNamespace, request))
    print_answer(response, output, f"namespace {namespace} deleted")


def _describe(namespace: str, admin: str) -> pb.NamespaceDescription:
    request = pb.DescribeNamespaceRequest(namespace=namespace)
    description: pb.NamespaceDescription = run(
        admin, lambda client: client.call(client.namespaces.DescribeNamespace, request)
    )
    return description


def _show(description: pb.NamespaceDescription, output: Format) -> None:
    if output is Format.JSON:
        print_json(as_dict(description))
        return
    print_line(f"namespace {description.namespace}, {description.topics} topics")
    limits.show(description.policy, description.effective_policy)
