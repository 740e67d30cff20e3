"""A link ends when its cluster has none of the brokers any more that it began with."""

from __future__ import annotations

import pytest

from sava.pipeline.replicate.background import BrokersReplaced, FollowingControl
from sava.proto import replication_pb2 as pb


class Control:
    def __init__(self) -> None:
        self.reports: list[pb.ReportLinkRequest] = []
        self.is_closed = False

    def link(self, remote: str) -> pb.Link:
        return pb.Link(cluster_name=remote)

    def report(self, request: pb.ReportLinkRequest) -> None:
        self.reports.append(request)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("now", ["", "a:1,b:1", "b:1,a:1", "b:1,c:1", "b:1"])
def test_as_long_as_one_is_left_or_nothing_is_known_it_goes_on(now: str) -> None:
    inner = Control()
    control = FollowingControl(inner, "a:1,b:1", lambda: now)
    assert control.link("west").cluster_name == "west"
    control.report(pb.ReportLinkRequest())
    control.close()
    assert (len(inner.reports), inner.is_closed) == (1, True)


def test_when_none_is_left_the_link_is_told_where_the_others_are() -> None:
    brokers = "a:1,b:1"
    control = FollowingControl(Control(), brokers, lambda: brokers)
    control.link("west")
    brokers = "c:1,d:1"
    with pytest.raises(BrokersReplaced) as error:
        control.link("west")
    assert "a:1,b:1" in str(error.value)
    assert "c:1,d:1" in str(error.value)
