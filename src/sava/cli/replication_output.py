"""What ``sava remotes`` and ``sava replication`` print alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sava.cli.output import print_line, print_table
from sava.proto import replication_pb2 as pb


def show_differences(found: Mapping[str, Iterable[pb.Difference]]) -> None:
    rows = [
        (remote, each.topic or "-", each.what, each.local or "-", each.remote or "-", each.consequence)
        for remote, differences in found.items()
        for each in differences
    ]
    if rows:
        print_table(("REMOTE", "TOPIC", "DIFFERS_IN", "HERE", "THERE", "CONSEQUENCE"), rows)
    else:
        print_line("no differences")


def show_status(topics: Iterable[pb.LinkTopic]) -> None:
    print_table(
        (
            *("TOPIC", "REMOTE", "PARTITION", "STATE", "POSITION", "END"),
            *("BACKLOG", "SECONDS", "RATE", "RESTARTS", "REASON"),
        ),
        [
            (
                *(topic.topic, topic.remote, each.partition if topic.partition_count else "-", each.state),
                *(each.position, each.end),
                *(_known(each.backlog, "d"), _known(each.backlog_seconds, ".1f")),
                *(f"{each.rate:.1f}", each.restarts, each.reason or "-"),
            )
            for topic in topics
            for each in topic.partitions
        ],
    )


def _known(value: float, form: str) -> str:
    return "?" if value < 0 else format(value, form)
