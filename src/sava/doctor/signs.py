"""Judgements about what brokers say of themselves in metrics. A part of the broker that has a figure which
must be zero joins by a line here; one that is not there says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sava.doctor.findings import Finding, Level
from sava.doctor.observation import Observation


@dataclass(frozen=True, slots=True)
class Sign:
    metric: str
    level: Level
    text: str
    """With the value."""
    remedy: str


SIGNS: Final = (
    Sign(
        "sava_controller_unplaced_topics",
        Level.ERROR,
        "{value:.0f} topics cannot be given to any broker",
        "activate a broker (`sava brokers activate`), or start one more",
    ),
    Sign(
        "sava_journal_degraded",
        Level.ERROR,
        "its journal has fewer mirrors than it should: what is acknowledged now is on fewer disks",
        "bring back the brokers that are missing",
    ),
    Sign(
        "sava_journal_refusing",
        Level.ERROR,
        "it refuses messages: too few mirrors of its journal are there to acknowledge anything",
        "bring back the brokers that are missing (`sava journals list` shows who holds the journal), or "
        "start others; a smaller journal.ack_quorum, or journal.degraded: allow, is content with fewer "
        "copies",
    ),
    Sign(
        "sava_journal_recoveries_waiting",
        Level.ERROR,
        "{value:.0f} journals of brokers that are gone wait for disks which do not answer; topics whose last "
        "messages are in them are not served",
        "`sava journals list` names them and their disks: start a broker with one of these again; if they "
        "are lost for good, `sava journals recover BROKER/NUMBER` shows what would be lost, and gives it up "
        "with --yes",
    ),
)


def check_signs(seen: Observation) -> Iterator[Finding]:
    for broker in seen.brokers:
        for sign in SIGNS:
            for _, value in broker.metrics.get(sign.metric, ()):
                if value:
                    text = sign.text.format(value=value)
                    yield Finding(sign.level, "metrics", broker.name, text, sign.remedy)
