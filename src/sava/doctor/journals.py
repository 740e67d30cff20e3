"""Judgements about journals whose brokers are gone, or were taken for that: whether enough of the disks that
hold one are there to know how far it goes. It is recovered from them by itself; with too few its topics wait
for an operator."""

from __future__ import annotations

from collections.abc import Iterator

from sava.doctor.findings import Finding, error, note
from sava.doctor.observation import Observation
from sava.ledger.protocol import Fragment, StorageId
from sava.ledger.protocol.record import recovery_quorum, suffices
from sava.proto import journals_pb2 as pb


def name_of(journal: pb.Journal) -> str:
    """As `sava journals list` writes it."""
    return f"{journal.broker_id}/{journal.incarnation}"


def waiting(seen: Observation) -> Iterator[pb.Journal]:
    """Those that cannot be recovered, or read, with the disks that are there."""
    for journal in seen.journals:
        if journal.state == "closed" and not any(
            member.broker_id for member in journal.members if member.is_owner or member.is_holder
        ):
            yield journal
        # While it is recovered nobody writes it, even if its broker is back with the disk.
        is_written = journal.state == "open" and any(
            member.is_owner and member.broker_id for member in journal.members
        )
        if journal.state != "closed" and not is_written and journal.fragments:
            present = {StorageId(member.storage_id) for member in journal.members if member.broker_id}
            if not suffices(_end_of(journal), present):
                yield journal


def check_journals(seen: Observation) -> Iterator[Finding]:
    if seen.journals_error:
        yield note("journals", "cluster", f"not known: journals cannot be listed: {seen.journals_error}")
    for journal in waiting(seen):
        if journal.state == "closed":
            yield _without_copies(journal)
            continue
        end = _end_of(journal)
        silent = [
            member.storage_id[:8]
            for member in journal.members
            if not member.broker_id and member.storage_id in end.members
        ]
        present = len(end.members) - len(silent)
        yield error(
            "journals",
            f"journal {name_of(journal)}",
            f"its broker is or was gone, and of the {len(end.members)} disks that hold its end {present} are "
            f"there (not {', '.join(silent)}): nobody knows what was acknowledged last, and topics whose "
            "last messages are in it wait",
            f"start brokers with these disks again, until {recovery_quorum(end)} are there; if the disks are "
            f"lost for good, {give_up(journal)}",
        )


def _without_copies(journal: pb.Journal) -> Finding:
    held = [member.storage_id[:8] for member in journal.members if member.is_owner or member.is_holder]
    return error(
        "journals",
        f"journal {name_of(journal)}",
        f"it is closed, and none of the disks that hold all of it is there ({', '.join(held)}): topics whose "
        "last messages are in it and in no segment wait",
        f"start a broker with one of these disks again; if they are lost for good, {give_up(journal)}",
    )


def give_up(journal: pb.Journal) -> str:
    return (
        f"`sava journals recover {name_of(journal)}` shows what would be lost, and gives it up with --yes; "
        "then the topics go on"
    )


def _end_of(journal: pb.Journal) -> Fragment:
    """Only who holds the end knows how far it goes."""
    last = journal.fragments[-1]
    return Fragment(last.start, tuple(map(StorageId, last.storage_ids)), last.ack_quorum)
