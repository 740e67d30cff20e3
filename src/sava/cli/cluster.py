"""``sava cluster``: create, inspect and change the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sava.api.recovery import recover
from sava.cli.connection import (
    DEFAULT_ADMIN,
    MAX_ID,
    AdminOption,
    auth_from_environment,
    is_id,
    run,
    run_to_end,
)
from sava.cli.output import (
    Format,
    Output,
    as_dict,
    print_answer,
    print_json,
    print_line,
    print_table,
    print_unconfirmed,
)
from sava.metadata.bootstrap import ForceReport, NotConfirmed
from sava.proto import admin_pb2 as pb

app = typer.Typer(no_args_is_help=True)

OPERATION_TIMEOUT_S = 40.0

Address = Annotated[str, typer.Option("--addr", metavar="HOST:PORT", help="Raft address of the node.")]
NodeId = Annotated[
    int, typer.Option("--node-id", min=0, max=MAX_ID, help="Id of the node, instead of its address.")
]


@app.command()
def init(
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="A:7650,B:7650,…", help="Raft addresses of all founding nodes.")
    ],
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Create a cluster from running brokers, once. Repeating it with the same list is harmless."""
    request = pb.InitRequest(nodes=[part.strip() for part in nodes.split(",") if part.strip()])
    response = run(
        admin, lambda client: client.call(client.cluster.Init, request, timeout=OPERATION_TIMEOUT_S)
    )
    done = "AlreadyInitialized" if response.already_initialized else "Cluster initialized"
    print_answer(
        response,
        output,
        f"{done}: cluster={response.cluster_id} leader={response.leader_id}, {len(response.voters)} voters",
    )


@app.command()
def status(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Show what the asked broker knows: leader, term, positions, members. Says so if no majority confirms
    it."""
    request = pb.StatusRequest(confirm=True)
    response = run(admin, lambda client: client.call(client.cluster.Status, request))
    if response.unconfirmed:
        print_unconfirmed(response.unconfirmed)
    if output is Format.JSON:
        print_json(as_dict(response))
        return
    for name in (
        "cluster_name",
        "cluster_id",
        "membership_state",
        "self_node_id",
        "raft_addr",
        "role",
        "leader_id",
        "current_term",
        "commit",
        "last_applied",
        "snapshot_index",
        "revision",
        "keys",
    ):
        print_line(f"{name:<17} {getattr(response, name) or '-'}")
    columns = ("NODE_ID", "RAFT_ADDR", "ROLE", "MATCH", "PROGRESS", "ACTIVE")
    print_table(columns, [_member_row(member) for member in response.members])


def _member_row(member: pb.MemberStatus) -> tuple[object, ...]:
    told = member.HasField("match")
    progress = (member.match, member.progress, member.recently_active) if told else ("-", "-", "-")
    return (member.node_id, member.raft_addr, member.role, *progress)


@app.command()
def add_node(addr: Address, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Add a running, pristine broker as a learner. Promote it once it has caught up."""
    request = pb.AddNodeRequest(addr=addr)
    response = run(
        admin, lambda client: client.call(client.cluster.AddNode, request, timeout=OPERATION_TIMEOUT_S)
    )
    done = "is already a member" if response.already_member else "added as a learner"
    print_answer(response, output, f"node {response.node_id} at {response.raft_addr} {done}")


@app.command()
def promote_node(
    addr: Address = "", node_id: NodeId = 0, output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN
) -> None:
    """Make a learner a voter. Refused while it lags behind."""
    _require_one(addr, node_id)
    request = pb.PromoteNodeRequest(node_id=node_id, addr=addr)
    response = run(
        admin, lambda client: client.call(client.cluster.PromoteNode, request, timeout=OPERATION_TIMEOUT_S)
    )
    print_answer(
        response,
        output,
        f"node {response.node_id} {'is already' if response.already_voter else 'is now'} a voter",
    )


@app.command()
def remove_node(
    addr: Address = "",
    node_id: NodeId = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Even when it has topics, or the remaining reachable voters are no majority."
        ),
    ] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Take a node out of the cluster; its data directory may then be deleted. Refused while it has topics, or
    may get some: `sava brokers drain` comes first."""
    _require_one(addr, node_id)
    request = pb.RemoveNodeRequest(node_id=node_id, addr=addr, force=force)
    response = run(
        admin, lambda client: client.call(client.cluster.RemoveNode, request, timeout=OPERATION_TIMEOUT_S)
    )
    print_answer(
        response,
        output,
        f"node {response.node_id} removed; it can be shut down and its data directory deleted",
    )


@app.command()
def transfer_leader(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="HOST:PORT|ID",
            help="Address or id of the next leader; by default the most up-to-date voter.",
        ),
    ] = "",
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Hand leadership over."""
    request = pb.TransferLeaderRequest(node_id=int(to)) if is_id(to) else pb.TransferLeaderRequest(addr=to)
    response = run(
        admin, lambda client: client.call(client.cluster.TransferLeader, request, timeout=OPERATION_TIMEOUT_S)
    )
    print_answer(response, output, f"leadership handed to node {response.leader_id}")


@app.command()
def snapshot(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """Take a snapshot on the asked broker now."""
    response = run(
        admin,
        lambda client: client.call(
            client.cluster.Snapshot, pb.SnapshotRequest(), timeout=OPERATION_TIMEOUT_S
        ),
    )
    print_answer(
        response, output, f"snapshot at index {response.index} (term {response.term}), {response.size} bytes"
    )


@app.command(name="force-new-cluster")
def force(
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Data directory of the stopped broker.")],
    addr: Address = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this, only show what may be lost.")
    ] = False,
) -> None:
    """Offline, the last resort after a lost majority: make one survivor a cluster of its own."""

    def confirm(report: ForceReport) -> bool:
        print_line(str(report))
        return yes

    try:
        run_to_end(recover(data_dir, addr, auth_from_environment(), confirm))
    except NotConfirmed as error:
        raise NotConfirmed(f"{error}; repeat with --yes to do it") from error
    print_line("done: start the broker, then wipe the given-up members and add them as new nodes")


def _require_one(addr: str, node_id: int) -> None:
    if bool(addr) == bool(node_id):
        raise typer.BadParameter("give either --addr or --node-id")
