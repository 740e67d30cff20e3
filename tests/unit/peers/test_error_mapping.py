"""Errors keep their type across the wire, by code and number, never by text."""

from __future__ import annotations

import pytest

from sava.errors import SavaError
from sava.metadata import errors
from sava.metadata.errors import Compacted, LeaseNotFound, OutcomeUnknown
from sava.metadata.peer import (
    Failed,
    code_of,
    detail_of,
    error_from,
    error_of,
)
from sava.raft.types import (
    Busy,
    LearnerLagging,
    MembershipBusy,
    MembershipRefused,
    NodeId,
    NotLeader,
    Transferring,
)
from sava.wal.errors import DiskFull

KNOWN: list[SavaError] = [
    LeaseNotFound(7),
    Compacted(9),
    NotLeader(NodeId(3)),
    Transferring(NodeId(4)),
    Busy("full"),
    MembershipBusy("one at a time"),
    MembershipRefused("last voter"),
    DiskFull("no room"),
    *(
        kind("text")
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, SavaError)
        and hasattr(kind, "code")
        and kind not in (LeaseNotFound, Compacted)
    ),
]


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_wire(error: SavaError) -> None:
    again = error_from(code_of(error), str(error), detail_of(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert detail_of(again) == detail_of(error)


def test_codes_are_distinct() -> None:
    codes = [code_of(error) for error in KNOWN]
    assert len(set(codes)) == len(codes)


def test_a_special_case_arrives_as_its_kind() -> None:
    assert type(error_from(code_of(LearnerLagging(NodeId(1), 5)), "lags")) is MembershipBusy


def test_a_code_of_the_future_is_no_guess() -> None:
    assert type(error_from("from_the_future", "text")) is SavaError


def test_a_failure_after_the_append_is_unknown_whatever_its_code() -> None:
    assert isinstance(error_of(Failed("not_leader", "gone", 0, maybe_applied=True)), OutcomeUnknown)
