"""``sava cluster``: create, inspect and change the cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from sava.api.recovery import recover
from sava.cli.connection import MAX_ID, AdminSession, command, is_id, raft_auth_from_environment, run_to_end
from sava.cli.output import as_dict, print_fields, print_json, print_line, print_rows, print_unconfirmed
from sava.metadata.bootstrap import ForceReport, NotConfirmed
from sava.proto import admin_pb2 as pb

app = typer.Typer(no_args_is_help=True)

OPERATION_TIMEOUT_S = 40.0

Address = Annotated[str, typer.Option("--addr", metavar="HOST:PORT", help="Raft address of the node.")]
NodeId = Annotated[
    int, typer.Option("--node-id", min=0, max=MAX_ID, help="Id of the node, instead of its address.")
]


@command(app)
def init(
    session: AdminSession,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="A:7650,B:7650,…", help="Raft addresses of all founding nodes.")
    ],
) -> None:
    """Create a cluster from running brokers, once. Repeating it with the same list is harmless."""
    request = pb.InitRequest(nodes=[part.strip() for part in nodes.split(",") if part.strip()])
    response = session.ask(request, timeout=OPERATION_TIMEOUT_S)
    done = "AlreadyInitialized" if response.already_initialized else "Cluster initialized"
    session.answer(
        response,
        f"{done}: cluster={response.cluster_id} leader={response.leader_id}, {len(response.voters)} voters",
    )


@command(app)
def status(session: AdminSession) -> None:
    """Show what the asked broker knows: leader, term, positions, members. Says so if no majority confirms
    it."""
    response = session.ask(pb.StatusRequest(confirm=True))
    if response.unconfirmed:
        print_unconfirmed(response.unconfirmed)
    if session.is_json:
        print_json(as_dict(response))
        return
    print_fields({name: getattr(response, name) or "-" for name in _STATUS})
    print_rows(
        response.members,
        *("node_id", "raft_addr", "role"),
        match=_progress("match"),
        progress=_progress("progress"),
        active=_progress("recently_active"),
    )


_STATUS: Final = (
    *("cluster_name", "cluster_id", "membership_state", "self_node_id", "raft_addr", "role", "leader_id"),
    *("current_term", "commit", "last_applied", "snapshot_index", "revision", "keys"),
)


def _progress(name: str) -> Callable[[pb.MemberStatus], object]:
    """The leader alone knows how far members are."""
    return lambda member: getattr(member, name) if member.HasField("match") else "-"


@command(app)
def add_node(session: AdminSession, addr: Address) -> None:
    """Add a running, pristine broker as a learner. Promote it once it has caught up."""
    request = pb.AddNodeRequest(addr=addr)
    response = session.ask(request, timeout=OPERATION_TIMEOUT_S)
    done = "is already a member" if response.already_member else "added as a learner"
    session.answer(response, f"node {response.node_id} at {response.raft_addr} {done}")


@command(app)
def promote_node(session: AdminSession, addr: Address = "", node_id: NodeId = 0) -> None:
    """Make a learner a voter. Refused while it lags behind."""
    _require_one(addr, node_id)
    request = pb.PromoteNodeRequest(node_id=node_id, addr=addr)
    response = session.ask(request, timeout=OPERATION_TIMEOUT_S)
    session.answer(
        response,
        f"node {response.node_id} {'is already' if response.already_voter else 'is now'} a voter",
    )


@command(app)
def remove_node(
    session: AdminSession,
    addr: Address = "",
    node_id: NodeId = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Even when it has topics, or the remaining reachable voters are no majority."
        ),
    ] = False,
) -> None:
    """Take a node out of the cluster; its data directory may then be deleted. Refused while it has topics, or
    may get some: `sava brokers drain` comes first."""
    _require_one(addr, node_id)
    request = pb.RemoveNodeRequest(node_id=node_id, addr=addr, force=force)
    response = session.ask(request, timeout=OPERATION_TIMEOUT_S)
    session.answer(
        response,
        f"node {response.node_id} removed; it can be shut down and its data directory deleted",
    )


@command(app)
def transfer_leader(
    session: AdminSession,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="HOST:PORT|ID",
            help="Address or id of the next leader; by default the most up-to-date voter.",
        ),
    ] = "",
) -> None:
    """Hand leadership over."""
    request = pb.TransferLeaderRequest(node_id=int(to)) if is_id(to) else pb.TransferLeaderRequest(addr=to)
    response = session.ask(request, timeout=OPERATION_TIMEOUT_S)
    session.answer(response, f"leadership handed to node {response.leader_id}")


@command(app)
def snapshot(session: AdminSession) -> None:
    """Take a snapshot on the asked broker now."""
    response = session.ask(pb.SnapshotRequest(), timeout=OPERATION_TIMEOUT_S)
    session.answer(
        response, f"snapshot at index {response.index} (term {response.term}), {response.size} bytes"
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
        run_to_end(recover(data_dir, addr, raft_auth_from_environment(), confirm))
    except NotConfirmed as error:
        raise NotConfirmed(f"{error}; repeat with --yes to do it") from error
    print_line("done: start the broker, then wipe the given-up members and add them as new nodes")


def _require_one(addr: str, node_id: int) -> None:
    if bool(addr) == bool(node_id):
        raise typer.BadParameter("give either --addr or --node-id")
