"""How a doctor looks: it ends in time, whatever hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sava.api.admin_client import AdminClient
from sava.doctor import observation
from sava.doctor.observation import CALL_S, PARALLEL, ROUND_S, Access, Looking
from sava.metadata.errors import Unavailable
from sava.security.credentials import PLAIN


class Hanging:
    """A broker that is stopped has the topics: every question takes the time that a call has."""

    topics: Any = SimpleNamespace(DescribeTopic=None)

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    async def call(self, method: object, request: object, *, timeout: float) -> object:
        self.calls += 1
        self.now += timeout / PARALLEL
        raise Unavailable("did not answer within the deadline")


async def test_a_hanging_broker_costs_one_round_and_no_call_for_each_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five hundred topics of a broker that was stopped took five minutes."""
    broker = Hanging()
    monkeypatch.setattr(observation, "time", SimpleNamespace(monotonic=lambda: broker.now))
    looking = Looking(Access(admin="a:1", credentials=PLAIN), watch_s=1, tell=lambda _: None)
    names = [f"/default/{number}" for number in range(500)]
    assert await looking._describe_all(cast(AdminClient, broker), names) == {}
    assert broker.calls == ROUND_S / CALL_S * PARALLEL
    assert broker.now == ROUND_S
