"""A link ends when its cluster has none of the brokers any more that it began with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from sava.pipeline.replicate.background import AdminLinkControl, BrokersReplaced
from sava.proto import replication_pb2 as pb


class Control(AdminLinkControl):
    def refresh(self) -> None: ...

    def ask(self, method: str, request: Any, service: Callable[[Any], Any]) -> Any:
        return pb.Link(cluster_name=request.remote)


@pytest.mark.parametrize("now", ["", "a:1,b:1", "b:1,a:1", "b:1,c:1", "b:1"])
def test_as_long_as_one_is_left_or_nothing_is_known_it_goes_on(now: str) -> None:
    places = iter(["a:1,b:1", now])
    with closing(Control("a:1", client_addresses=lambda: next(places))) as control:
        assert control.link("west").cluster_name == "west"


def test_when_none_is_left_the_link_is_told_where_the_others_are() -> None:
    brokers = "a:1,b:1"
    with closing(Control("a:1", client_addresses=lambda: brokers)) as control:
        control.link("west")
        brokers = "c:1,d:1"
        with pytest.raises(BrokersReplaced) as error:
            control.link("west")
    assert "a:1,b:1" in str(error.value)
    assert "c:1,d:1" in str(error.value)
