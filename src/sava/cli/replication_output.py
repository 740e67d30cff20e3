"""What ``sava remotes`` and ``sava replication`` print alike."""

from __future__ import annotations

import math
import time
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
    """All but the reason fits a terminal of 120 columns."""
    now_ms = time.time_ns() // 1_000_000
    print_table(
        (
            *("TOPIC", "REMOTE", "PART", "STATE", "POSITION", "END", "BACKLOG", "SECONDS"),
            *("RATE", "BYTES/S", "RESTARTS", "DISCONNECTED", "REASON"),
        ),
        [
            (
                *(topic.topic, topic.remote, each.partition if topic.partition_count else "-", each.state),
                *(each.position, each.end),
                *(_known(each.backlog, "d"), _known(each.backlog_seconds, ".1f")),
                *(f"{each.rate:.1f}", _short(each.bytes_rate), each.restarts),
                f"{topic.disconnected_count} of {len(topic.partitions)}",
                _reason(each, now_ms),
            )
            for topic in topics
            for each in topic.partitions
        ],
    )


def _reason(partition: pb.LinkPartition, now_ms: int) -> str:
    wait_ms = partition.next_retry_ms - now_ms
    retry = f" (next try in {math.ceil(wait_ms / 1000)} s)" if wait_ms > 0 else ""
    return f"{partition.reason}{retry}".strip() or "-"


def _short(size: float) -> str:
    for unit in ("", "k", "M"):
        if size < 1000:
            return f"{size:.1f}{unit}" if unit else f"{size:.0f}"
        size /= 1000
    return f"{size:.1f}G"


def _known(value: float, form: str) -> str:
    return "?" if value < 0 else format(value, form)
