"""What the stories about the log share: opening it, and a ledger of what was promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from sava.wal import Disk, Log, LogOptions, Record

SMALL_FILES = LogOptions(file_bytes=1024)

_ids = count(1)


def open_log(
    disk: Disk,
    *,
    owner: str = "node-1",
    options: LogOptions = LogOptions(),  # noqa: B008 (frozen)
    replay: Callable[[Record], None] | None = None,
) -> Log:
    return Log.open(
        disk, owner=owner, new_storage_id=lambda: f"storage-{next(_ids)}", options=options, replay=replay
    )


def recovered_payloads(disk: Disk, *, options: LogOptions = SMALL_FILES) -> list[bytes]:
    """Open and close the log; what replay has seen."""
    seen: list[bytes] = []
    open_log(disk, options=options, replay=lambda record: seen.append(record.payload)).close()
    return seen


def append(log: Log, *payloads: bytes, is_synced_next: bool = False) -> list[int]:
    return log.append_many([(1, [payload]) for payload in payloads], is_synced_next=is_synced_next)


@dataclass
class Ledger:
    """What a caller of the log knows: what it has appended, how much of it was promised to it, what it gave
    up.

    Indices count appended records from the beginning of time."""

    appended: list[bytes] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    promised: int = 0
    given_up: int = 0
    incarnation: int = 0
    storage_id: str | None = None

    def append(self, log: Log, *payloads: bytes, is_synced_next: bool = False) -> None:
        first = len(self.appended)
        self.appended += payloads
        positions = append(log, *payloads, is_synced_next=is_synced_next)
        self.positions |= dict(enumerate(positions, first))

    def sync(self, log: Log) -> None:
        log.sync()
        self.promised = len(self.appended)

    def trim(self, log: Log, index: int) -> None:
        self.given_up = max(self.given_up, index)
        log.trim(self.positions[index])

    def open(self, disk: Disk, options: LogOptions = SMALL_FILES) -> Log:
        """Open the log and check all that recovery owes: a gapless part of what was appended, from a record
        not yet given up at the latest, to the last promised one at the earliest, each at its old position."""
        seen: list[Record] = []
        log = open_log(disk, options=options, replay=seen.append)
        payloads = [record.payload for record in seen]
        first = self.appended.index(payloads[0]) if payloads else self.promised
        assert first <= self.given_up, "a record is gone that was not given up"
        assert first + len(payloads) >= self.promised, "a promised record is lost"
        assert payloads == self.appended[first : first + len(payloads)], "not a prefix of what was appended"
        for index, record in enumerate(seen, first):
            assert self.positions.get(index, record.position) == record.position
        assert list(log.scan(log.first)) == seen
        assert log.identity.incarnation > self.incarnation
        assert self.storage_id in (None, log.identity.storage_id)
        self._adopt(seen, first, log)
        return log

    def _adopt(self, seen: list[Record], first: int, log: Log) -> None:
        del self.appended[first + len(seen) :]
        self.positions = {index: record.position for index, record in enumerate(seen, first)}
        self.promised = len(self.appended)
        self.incarnation = log.identity.incarnation
        self.storage_id = log.identity.storage_id
