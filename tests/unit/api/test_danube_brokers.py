"""Danube's calls that move topics: answered before ``danube-admin`` gives them up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from sava.api.danube import admin as danube_admin
from sava.api.danube.admin import BrokerAdmin
from sava.cluster.drains import DrainStatus
from sava.cluster.rebalancer import Balance, PlannedMove, Rebalanced
from sava.proto import danube_admin_pb2 as pb
from sava.topics.names import TopicName

BALANCE = Balance("fair", 1.0, 0.3, 1.0, 2.0, 0.0, 1.0, (), True, 0)
PLAN = Rebalanced((PlannedMove(TopicName("default", "orders"), 1, 2, 0.5),), BALANCE, BALANCE)


class NoDeadline:
    """The context of a call as ``danube-admin`` makes it."""

    def time_remaining(self) -> None:
        return None


class StuckController:
    """Everything that it begins takes until ``finish``."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.round: asyncio.Task[Rebalanced] | None = None

    async def drain(self, broker: int, mode: object) -> AsyncIterator[DrainStatus]:
        yield DrainStatus(total=3, succeeded=1, failed=0, pending=2)
        await self.finish.wait()
        yield DrainStatus(total=3, succeeded=3, failed=0, pending=0, is_done=True)

    async def rebalance(self, *, dry_run: bool, max_moves: int) -> Rebalanced:
        assert dry_run
        return PLAN

    def begin_rebalance(self, *, max_moves: int) -> asyncio.Task[Rebalanced]:
        async def stuck() -> Rebalanced:
            await self.finish.wait()
            return PLAN

        self.round = asyncio.create_task(stuck())
        return self.round


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> tuple[BrokerAdmin, StuckController]:
    monkeypatch.setattr(danube_admin, "ANSWER_S", 0.05)
    controller = StuckController()
    return BrokerAdmin(cast(Any, None), cast(Any, controller), cast(Any, None)), controller


def test_the_answer_comes_before_danube_admin_gives_up() -> None:
    assert danube_admin.ANSWER_S <= 4.0


async def test_a_drain_without_a_deadline_is_answered_as_far_as_it_has_come(
    admin: tuple[BrokerAdmin, StuckController],
) -> None:
    """The call used to wait for the whole drain, and ended in the client's timeout of 5 s."""
    service, controller = admin
    request = pb.UnloadBrokerRequest(broker_id="7")
    response = await service.UnloadBroker(request, NoDeadline())
    assert (response.started, response.succeeded, response.pending) == (True, 1, 2)
    controller.finish.set()
    assert (await service.UnloadBroker(request, NoDeadline())).pending == 0


async def test_a_rebalance_without_a_deadline_answers_its_plan_and_continues(
    admin: tuple[BrokerAdmin, StuckController],
) -> None:
    service, controller = admin
    response = await service.TriggerRebalance(pb.RebalanceRequest(), NoDeadline())
    assert (response.success, response.moves_executed) == (True, 0)
    assert [move.topic_name for move in response.proposed_moves] == ["/default/orders"]
    assert "continue" in response.error_message
    assert controller.round is not None
    assert not controller.round.done(), "the round does not end with the call"
    controller.finish.set()
    assert await controller.round == PLAN
