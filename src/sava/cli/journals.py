"""``sava journals``: which disks hold the journals of brokers, how far they are, and how to end a journal of
which too few copies are left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from sava.api.admin_client import AdminClient
from sava.cli.connection import DEFAULT_ADMIN, AdminOption, id_of, is_id, run
from sava.cli.output import Format, Output, as_dict, print_json, print_line, print_table
from sava.errors import RetryableError
from sava.proto import journals_pb2 as pb

app = typer.Typer(no_args_is_help=True)

RECOVER_TIMEOUT_S = 120.0
"""All that is there of a journal is read, to tell which messages it holds."""

Journal = Annotated[
    str, typer.Argument(metavar="JOURNAL", help="BROKER/NUMBER as `sava journals list` shows it.")
]


class LossChanged(RetryableError):
    """What would be lost is not what it was a moment ago."""


@app.command(name="list")
def list_(output: Output = Format.TABLE, admin: AdminOption = DEFAULT_ADMIN) -> None:
    """List journals: those that are written, and those of brokers that are gone."""
    response: pb.ListJournalsResponse = run(
        admin, lambda client: client.call(client.journals.ListJournals, pb.ListJournalsRequest())
    )
    if output is Format.JSON:
        print_json([as_dict(journal) for journal in response.journals])
        return
    print_table(
        ("JOURNAL", "STATE", "STATUS", "ACKS", "MEMBERS", "LOST"),
        [
            (
                *(_name(each), each.state, each.status),
                f"{each.ack_quorum}/{each.write_quorum}{' degraded' if each.degraded else ''}",
                *(" ".join(_member(member) for member in each.members), _ranges(each.lost) or "-"),
            )
            for each in response.journals
        ],
    )


@app.command()
def describe(
    journal: Annotated[
        str,
        typer.Argument(
            metavar="JOURNAL",
            help="BROKER/NUMBER, or a broker's id or the address of one of its ports for its newest.",
        ),
    ],
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Show one journal: members, fragments, and how far each disk is."""

    async def work(client: AdminClient) -> pb.Journal:
        broker, number = _parse(journal) if "/" in journal else (await id_of(client, journal), 0)
        request = pb.DescribeJournalRequest(broker_id=broker, incarnation=number)
        described: pb.Journal = await client.call(client.journals.DescribeJournal, request)
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
    journal: Journal,
    yes: Annotated[bool, typer.Option("--yes", help="Give up what is shown, and end the journal.")] = False,
    output: Output = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """End a journal with too few copies left. Shows what would be lost; changes nothing without --yes.

    A journal whose broker is gone is recovered by itself as soon as enough of its disks answer. This is for
    disks that will never come back."""
    broker, number = _parse(journal)

    async def work(client: AdminClient) -> tuple[pb.RecoverJournalResponse, bool]:
        request = pb.RecoverJournalRequest(broker_id=broker, incarnation=number)
        shown = await client.call(client.journals.RecoverJournal, request, timeout=RECOVER_TIMEOUT_S)
        if not yes:
            return shown, False
        request.accepted.CopyFrom(shown.loss)
        done = await client.call(client.journals.RecoverJournal, request, timeout=RECOVER_TIMEOUT_S)
        return shown, done.accepted

    shown, is_done = run(admin, work)
    if output is Format.JSON:
        print_json({**as_dict(shown), "accepted": is_done})
    else:
        _show_loss(journal, shown)
        if is_done:
            print_line(f"given up; journal {journal} ends with what is there")
        elif not yes:
            print_line("nothing was done; --yes gives up what is shown above, for good")
    if yes and not is_done:
        raise LossChanged(f"journal {journal}: what would be lost has changed meanwhile; nothing was done")


def _show_loss(journal: str, shown: pb.RecoverJournalResponse) -> None:
    loss = shown.loss
    silent = ", ".join(loss.silent) or "-"
    print_line(f"journal {journal} waits for {shown.answers_needed} more of these disks: {silent}")
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


def _lost(topic: pb.TopicLoss, loss: pb.JournalLoss) -> str:
    if loss.HasField("unknown_from"):
        return f"all from {topic.kept} on that was acknowledged"
    return f"{topic.kept}..{topic.found}" if topic.found else "-"


def _facts(journal: pb.Journal) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("journal", _name(journal)),
        ("state", journal.state),
        ("status", journal.status),
        ("copies", f"{journal.write_quorum}, of which {journal.ack_quorum} before an acknowledgement"),
        ("degraded", f"yes: {_fewest(journal)} is enough" if journal.degraded else "no"),
    ]
    if journal.HasField("positions"):
        at = journal.positions
        facts += [
            ("in segments", at.floor),
            ("committed", at.committed),
            ("durable here", at.durable),
            ("end", at.end),
        ]
    if journal.state == "closed":
        facts += [
            ("in segments", journal.floor),
            ("end", journal.end),
            ("lost", _ranges(journal.lost) or "-"),
        ]
    if journal.error:
        facts.append(("error", journal.error))
    return facts


def _fewest(journal: pb.Journal) -> str:
    enough = journal.fragments[-1].ack_quorum
    return "one copy" if enough == 1 else f"{enough} copies"


def _name(journal: pb.Journal) -> str:
    return f"{journal.broker_id}/{journal.incarnation}"


def _member(member: pb.JournalMember) -> str:
    return str(member.broker_id) if member.broker_id else f"({member.storage_id[:8]})"


def _role(member: pb.JournalMember) -> str:
    return ("owner" if member.is_owner else "mirror") + (", holds all" if member.is_holder else "")


def _ranges(ranges: Iterable[pb.PositionRange]) -> str:
    return " ".join(f"{part.start}..{part.end}" for part in ranges)


def _parse(journal: str) -> tuple[int, int]:
    broker, _, number = journal.partition("/")
    if not is_id(broker) or not is_id(number):
        raise typer.BadParameter(f"{journal!r} is not BROKER/NUMBER as `sava journals list` shows it")
    return int(broker), int(number)
