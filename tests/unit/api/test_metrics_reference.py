"""docs/reference/metrics.md has what an operator who watches a cluster needs, part by part, and each line of
it can be understood alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w*) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)

PARTS = {
    "metadata: leader": ("sava_raft_is_leader", "sava_raft_has_leader"),
    "metadata: term": ("sava_raft_term",),
    "metadata: commit lag": ("sava_raft_commit_lag", "sava_raft_apply_lag"),
    "metadata: proposal latency": ("sava_raft_proposal_seconds", "sava_raft_wal_sync_seconds"),
    "journal: sync latency": ("sava_journal_sync_seconds",),
    "journal: batch size": ("sava_journal_sync_bytes",),
    "journal: mirror lag": ("sava_ledger_mirror_lag_bytes", "sava_ledger_degraded"),
    "topics": ("sava_topic_messages_total", "sava_topic_unstored_messages", "sava_topics_served"),
    "subscriptions: lag": ("sava_subscription_backlog_messages", "sava_subscription_unacked_messages"),
    "subscriptions: redeliveries": ("sava_subscription_redelivered_messages_total",),
    "moves": ("sava_topic_move_downtime_seconds", "sava_controller_moves_total"),
    "replication": (
        *(
            "sava_replication_backlog",
            "sava_replication_delay_seconds",
            "sava_replication_disconnected_count",
        ),
        "sava_replication_messages_total",
    ),
    "disks": ("sava_disk_free_bytes", "sava_disk_size_bytes"),
}


def rows() -> dict[str, tuple[str, str]]:
    """Kind and meaning by name."""
    return {name: (kind, meaning) for name, kind, _, meaning in ROW.findall(PAGE.read_text())}


@pytest.mark.parametrize("part", PARTS)
def test_the_part_is_measured(part: str) -> None:
    assert [name for name in PARTS[part] if name not in rows()] == []


def test_durations_and_sizes_with_percentiles_are_histograms() -> None:
    for name in (
        "sava_raft_proposal_seconds",
        "sava_journal_sync_seconds",
        "sava_topic_move_downtime_seconds",
    ):
        assert rows()[name][0] == "histogram"
    assert rows()["sava_journal_sync_bytes"][0] == "histogram"


def test_no_line_leans_on_another() -> None:
    """They are sorted by name, so that "of these" would be of something else."""
    leaning = r"\b(Of these|of these|of them|Time that these|Their)\b"
    alone = [name for name, (_, meaning) in rows().items() if re.match(leaning, meaning)]
    assert alone == []
