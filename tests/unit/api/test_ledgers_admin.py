"""What is said of journals whose brokers are gone."""

from __future__ import annotations

from typing import Any

import pytest

from sava.api.admin.ledgers import LedgersService
from sava.ledger.protocol import (
    Fragment,
    LedgerId,
    LedgerRecord,
    LedgerState,
    StorageId,
)

OWNER, FIRST, SECOND = map(StorageId, ("owner", "first", "second"))


class Disks:
    """Those that are registered."""

    def __init__(self, *present: StorageId) -> None:
        self._present = present

    def find(self, storage: StorageId) -> Any:
        return type("LiveBroker", (), {"broker": 1}) if storage in self._present else None


class Attempts:
    def __init__(self, *, lacks_bytes: bool) -> None:
        self._lacks_bytes = lacks_bytes

    def lacks_bytes(self, _: StorageId) -> bool:
        return self._lacks_bytes

    def trouble(self, *_: object) -> str:
        return ""


@pytest.mark.parametrize(
    ("present", "lacks_bytes", "waits"),
    [((FIRST,), False, False), ((), False, True), ((FIRST,), True, True)],
    ids=["a holder is there", "no holder is there", "the holder lacks a part"],
)
def test_a_closed_journal_without_its_last_copies_waits(
    present: tuple[StorageId, ...], lacks_bytes: bool, waits: bool
) -> None:
    record = LedgerRecord(
        state=LedgerState.CLOSED,
        fragments=(Fragment(0, (OWNER, FIRST, SECOND), 2),),
        qw=3,
        qa=2,
        end=100,
        holders=(FIRST, SECOND),
    )
    attempts: Any = Attempts(lacks_bytes=lacks_bytes)
    disks: Any = Disks(*present)
    unused: Any = None
    service = LedgersService(unused, attempts, unused, disks, unused, unused)
    assert ("waits" in service._describe(LedgerId(1, 1), record).status) is waits
