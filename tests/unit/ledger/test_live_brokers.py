"""Which disks mirror a journal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sava.ledger.protocol import StorageId
from sava.ledger.registry import LiveBroker, choose


def disk(broker: int, rack: str = "", mirrored: int = 0) -> LiveBroker:
    return LiveBroker(StorageId(f"d{broker}"), broker, f"host-{broker}:7650", rack, mirrored)


def chosen(
    candidates: Sequence[LiveBroker],
    *,
    own: int = 1,
    keep: str = "",
    avoid: str = "",
    count: int = 2,
    needed: int = 1,
) -> list[str]:
    return list(
        choose(
            candidates,
            own=StorageId(f"d{own}"),
            keep=[StorageId(each) for each in keep.split()],
            avoid=[StorageId(each) for each in avoid.split()],
            count=count,
            needed=needed,
        )
    )


def test_never_the_owner() -> None:
    assert chosen([disk(1)]) == []
    assert chosen([disk(1), disk(2)]) == ["d2"]


def test_what_works_stays() -> None:
    brokers = [disk(1), disk(2, mirrored=9), disk(3), disk(4)]
    assert chosen(brokers, keep="d2") == ["d2", "d3"]
    assert chosen(brokers, keep="d2 d4") == ["d2", "d4"]
    assert chosen(brokers, keep="d2 d3 d4") == ["d2", "d3"]


def test_who_is_gone_is_not_kept() -> None:
    assert chosen([disk(1), disk(3), disk(4)], keep="d2 d3") == ["d3", "d4"]


def test_who_is_to_be_avoided_is_replaced_or_left_out() -> None:
    brokers = [disk(1), disk(2), disk(3), disk(4)]
    assert chosen(brokers, keep="d3", avoid="d2") == ["d3", "d4"]
    assert chosen(brokers[:3], keep="d3", avoid="d2") == ["d3"]
    assert chosen(brokers, keep="d3", avoid="d2 d4") == ["d3"]
    assert chosen(brokers[:3], avoid="d2") == ["d3"]


def test_an_avoided_broker_is_taken_when_an_acknowledgement_needs_it() -> None:
    """In the given order, and all for whom there is a place: whichever is well first completes the quorum."""
    brokers = [disk(1), disk(2), disk(3), disk(4)]
    assert chosen(brokers[:2], avoid="d2") == ["d2"]
    assert chosen(brokers, keep="d3", avoid="d4 d2", needed=2) == ["d3", "d4"]
    assert chosen(brokers[:3], avoid="d3 d2") == ["d3", "d2"]
    assert chosen(brokers[:3], avoid="d3 d2", count=1) == ["d3"]
    assert chosen(brokers[:3], avoid="d9 d2 d3", count=1) == ["d2"], "who is gone is nobody's mirror"
    assert chosen(brokers[:2], avoid="d2", needed=0) == [], "a journal that may go on alone does"


def test_other_racks_first() -> None:
    brokers = [
        disk(1, "r1"),
        disk(2, "r1"),
        disk(3, "r2", mirrored=7),
        disk(4, "r2"),
        disk(5, "r3", mirrored=9),
    ]
    assert chosen(brokers) == ["d4", "d5"]
    assert chosen(brokers, keep="d3") == ["d3", "d5"]
    assert chosen(brokers, count=3) == ["d4", "d5", "d2"]


def test_a_broker_without_a_label_shares_no_rack() -> None:
    assert chosen([disk(1, "r1"), disk(2, "r1"), disk(3), disk(4)]) == ["d3", "d4"]


def test_those_who_mirror_fewest_first() -> None:
    assert chosen([disk(1), disk(2, mirrored=2), disk(3, mirrored=1), disk(4, mirrored=1)]) == ["d3", "d4"]


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_brokers_that_start_together_do_not_all_choose_the_same(size: int) -> None:
    brokers = [disk(number) for number in range(1, size + 1)]
    loads: dict[str, int] = {}
    for own in range(1, size + 1):
        for each in chosen(brokers, own=own):
            loads[each] = loads.get(each, 0) + 1
    assert set(loads.values()) == {2}


def test_racks_that_come_later_get_a_copy() -> None:
    """One mirror at a time, and nobody is given up for nothing."""
    brokers = [disk(1, "r1"), disk(2, "r1"), disk(3, "r1")]
    assert chosen(brokers, keep="d2 d3") == ["d2", "d3"]
    brokers += [disk(4, "r2"), disk(5, "r3")]
    assert chosen(brokers, keep="d2 d3") == ["d2", "d4"]
    assert chosen(brokers, keep="d2 d4") == ["d4", "d5"]
    assert chosen(brokers, keep="d4 d5") == ["d4", "d5"]
    assert chosen(brokers, keep="d2 d3", avoid="d4 d5") == ["d2", "d3"]
    assert chosen([*brokers[:2], disk(4, "r2")], keep="d2") == ["d2", "d4"]
