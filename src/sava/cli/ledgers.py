"""``sava ledgers``: which disks hold the ledgers of brokers, how far they are, and how to end a ledger of
which too few copies are left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, id_of, is_id, run
from sava.cli.output import Format, Output, as_dict, print_json, print_line, print_table
from sava.errors import RetryableError
from sava.proto import ledgers_pb2 as pb

app = typer.Typer(no_args_is_help=True)

RECOVER_TIMEOUT_S = 120.0
"""All that is there of a ledger is read, to tell which messages it holds."""

LedgerName = Annotated[
    str, typer.Argument(metavar="LEDGER", help="BROKER/NUMBER as `sava ledgers list` shows it.")
]


class LossChanged(RetryableError):
    """What would be lost is not what it was a moment ago."""


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List ledgers: those that are written, and those of brokers that are gone."""
    response: pb.ListLedgersResponse = run(
        admin, lambda client: client.call(client.ledgers.ListLedgers, pb.ListLedgersRequest())
    )
    if output is Format.JSON:
        print_json([as_dict(ledger) for ledger in response.ledgers])
        return
    print_table(
        ("LEDGER", "STATE", "STATUS", "ACKS", "MEMBERS", "LOST"),
        [
            (
                *(_name(each), each.state, each.status),
                f"{each.ack_quorum}/{each.write_quorum}{' degraded' if each.degraded else ''}",
                *(" ".join(_member(member) for member in each.members), _ranges(each.lost) or "-"),
            )
            for each in response.ledgers
        ],
    )


@app.command()
def describe(
    ledger: Annotated[
        str,
        typer.Argument(
            metavar="LEDGER",
            help="BROKER/NUMBER, or a broker's id or the address of one of its ports for its newest.",
        ),
    ],
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Show one ledger: members, fragments, and how far each disk is."""

    async def work(client: AdminClient) -> pb.Ledger:
        broker, number = _parse(ledger) if "/" in ledger else (await id_of(client, ledger), 0)
        request = pb.DescribeLedgerRequest(broker_id=broker, incarnation=number)
        described: pb.Ledger = await client.call(client.ledgers.DescribeLedger, request)
        return described

    found = run(admin, work)
    if output is Format.JSON:
        print_json(as_dict(found))
        return
    for name, value in _facts(found):
        print_line(f"{name:<14} {value}")
    print_line("")
    print_table(
        ("DISK", "BROKER", "ROLE", "DURABLE", "BEHIND"),
        [
            (
                *(each.storage_id, each.broker_id or "not there", _role(each)),
                *((each.durable, each.behind) if found.HasField("positions") else ("-", "-")),
            )
            for each in found.members
        ],
    )
    print_line("")
    print_table(
        ("FROM", "ACKS", "DISKS"),
        [
            (each.start, f"{each.ack_quorum}/{len(each.storage_ids)}", " ".join(each.storage_ids))
            for each in found.fragments
        ],
    )


@app.command()
def recover(
    ledger: LedgerName,
    yes: Annotated[
        bool, typer.Option("--yes", help="Give up what is shown, and end the ledger with what is there.")
    ] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """End a ledger with too few copies left. Shows what would be lost; changes nothing without --yes.

    A ledger whose broker is gone is recovered by itself as soon as enough of its disks answer. This is for
    disks that will never come back."""
    broker, number = _parse(ledger)

    async def work(client: AdminClient) -> tuple[pb.RecoverLedgerResponse, bool]:
        request = pb.RecoverLedgerRequest(broker_id=broker, incarnation=number)
        shown = await client.call(client.ledgers.RecoverLedger, request, timeout=RECOVER_TIMEOUT_S)
        if not yes:
            return shown, False
        request.accepted.CopyFrom(shown.loss)
        done = await client.call(client.ledgers.RecoverLedger, request, timeout=RECOVER_TIMEOUT_S)
        return shown, done.accepted

    shown, is_done = run(admin, work)
    if output is Format.JSON:
        print_json({**as_dict(shown), "accepted": is_done})
    else:
        _show_loss(ledger, shown)
        if is_done:
            print_line(f"given up; ledger {ledger} ends with what is there")
        elif not yes:
            print_line("nothing was done; --yes gives up what is shown above, for good")
    if yes and not is_done:
        raise LossChanged(f"ledger {ledger}: what would be lost has changed meanwhile; nothing was done")


def _show_loss(ledger: str, shown: pb.RecoverLedgerResponse) -> None:
    loss = shown.loss
    silent = ", ".join(loss.silent) or "-"
    print_line(f"ledger {ledger} waits for {shown.answers_needed} more of these disks: {silent}")
    print_line("")
    print_line("without them would be lost:")
    for part in loss.missing:
        print_line(f"  positions {part.start}..{part.end}: no disk that answers has them intact")
    if loss.HasField("unknown_from"):
        print_line(f"  all that was acknowledged from position {loss.unknown_from} on")
    if not loss.missing and not loss.HasField("unknown_from"):
        print_line("  nothing; until its messages are in segments, fewer disks have them than were asked for")
    print_line("")
    print_table(
        ("TOPIC", "IN SEGMENTS", "KEPT UP TO", "LOST"),
        [(each.topic, each.stored, each.kept, _lost(each, loss)) for each in shown.topics],
    )


def _lost(topic: pb.TopicLoss, loss: pb.LedgerLoss) -> str:
    if loss.HasField("unknown_from"):
        return f"all from {topic.kept} on that was acknowledged"
    return f"{topic.kept}..{topic.found}" if topic.found else "-"


def _facts(ledger: pb.Ledger) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("ledger", _name(ledger)),
        ("state", ledger.state),
        ("status", ledger.status),
        ("copies", f"{ledger.write_quorum}, of which {ledger.ack_quorum} before an acknowledgement"),
        ("degraded", f"yes: {_fewest(ledger)} is enough" if ledger.degraded else "no"),
    ]
    if ledger.HasField("positions"):
        at = ledger.positions
        facts += [
            ("in segments", at.floor),
            ("committed", at.committed),
            ("durable here", at.durable),
            ("end", at.end),
        ]
    if ledger.state == "closed":
        facts += [
            ("in segments", ledger.floor),
            ("end", ledger.end),
            ("lost", _ranges(ledger.lost) or "-"),
        ]
    if ledger.error:
        facts.append(("error", ledger.error))
    return facts


def _fewest(ledger: pb.Ledger) -> str:
    enough = ledger.fragments[-1].ack_quorum
    return "one copy" if enough == 1 else f"{enough} copies"


def _name(ledger: pb.Ledger) -> str:
    return f"{ledger.broker_id}/{ledger.incarnation}"


def _member(member: pb.LedgerMember) -> str:
    return str(member.broker_id) if member.broker_id else f"({member.storage_id[:8]})"


def _role(member: pb.LedgerMember) -> str:
    return ("owner" if member.is_owner else "mirror") + (", holds all" if member.is_holder else "")


def _ranges(ranges: Iterable[pb.PositionRange]) -> str:
    return " ".join(f"{part.start}..{part.end}" for part in ranges)


def _parse(ledger: str) -> tuple[int, int]:
    broker, _, number = ledger.partition("/")
    if not is_id(broker) or not is_id(number):
        raise typer.BadParameter(f"{ledger!r} is not BROKER/NUMBER as `sava ledgers list` shows it")
    return int(broker), int(number)
