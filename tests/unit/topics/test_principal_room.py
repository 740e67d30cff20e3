"""How many topics and subscriptions a principal may have in the cluster, by its quota."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sava.config import Auth, Config, TokenIssuerSettings
from sava.security.principal import Principal, current
from sava.security.quotas import EVERY, Quota, QuotaExceeded, Quotas
from sava.topics.names import TopicName
from sava.topics.registry import PrincipalRoom
from sava.topics.specs import LATEST, SubscriptionType
from sava.topics.topic import SubscribeOptions
from tests.support.topics import World

ALICE, BOB = Principal("user", "alice"), Principal("user", "bob")


def enforced(directory: Path) -> Config:
    secret = directory / "secret"
    secret.write_text("x" * 64)
    return Config(auth=Auth(tokens=(TokenIssuerSettings(secret_file=secret),)))


@contextmanager
def as_caller(principal: Principal) -> Iterator[None]:
    token = current.set(principal)
    try:
        yield
    finally:
        current.reset(token)


def name(number: int, namespace: str = "default") -> TopicName:
    return TopicName(namespace, f"topic-{number}")


def options(subscription: str) -> SubscribeOptions:
    return SubscribeOptions(
        subscription=subscription,
        type=SubscriptionType.SHARED,
        consumer_name="c",
        key_filters=(),
        start=LATEST,
        credits=1,
    )


async def test_topics_count_for_the_principal_that_creates_them(tmp_path: Path) -> None:
    quotas = Quotas()
    async with World(tmp_path).topics(enforced(tmp_path), quotas=quotas) as topics:
        quotas.set([Quota("user:alice", max_topics=2)])
        with as_caller(ALICE):
            await topics.create(name(1), reliable=True)
            await topics.ensure(name(2), None)
            await topics.ensure(name(2), None)  # it is there
            for attempt in (
                topics.create(name(3), reliable=True),
                topics.ensure(name(3), None),
                topics.create(name(3), reliable=True, partitions=2),
                topics.create(name(3).partition(0), reliable=True),
            ):
                with pytest.raises(QuotaExceeded, match="2 topics that its quota allows"):
                    await attempt
        with as_caller(BOB):
            await topics.create(name(3), reliable=True)
        assert (await topics.registry.need(name(3))).owner == "user:bob"


async def test_a_partitioned_topic_counts_once_and_a_deleted_one_no_more(tmp_path: Path) -> None:
    quotas = Quotas()
    async with World(tmp_path).topics(enforced(tmp_path), quotas=quotas) as topics:
        quotas.set([Quota(EVERY, max_topics=1)])
        with as_caller(ALICE):
            await topics.create(name(1), reliable=True, partitions=8)
            with pytest.raises(QuotaExceeded, match=r"the quota of \* allows"):
                await topics.create(name(2), reliable=True)
            await topics.registry.finish_delete(await topics.registry.begin_delete(name(1)))
            await topics.create(name(2), reliable=True)


async def test_subscriptions_count_over_all_topics(tmp_path: Path) -> None:
    quotas = Quotas()
    async with World(tmp_path).topics(enforced(tmp_path), quotas=quotas) as topics:
        for number in (1, 2):
            await topics.create(name(number), reliable=True)
        quotas.set([Quota("user:alice", max_subscriptions=2)])
        first, second = await topics.get(name(1)), await topics.get(name(2))
        with as_caller(ALICE):
            (await first.subscribe(options("a"))).close()
            (await second.subscribe(options("b"))).close()
            with pytest.raises(QuotaExceeded, match="2 subscriptions that its quota allows"):
                await first.subscribe(options("c"))
            (await first.subscribe(options("a"))).close()  # it is there
        with as_caller(BOB):
            (await first.subscribe(options("c"))).close()


async def test_without_a_quota_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> int:
        raise AssertionError("counted")

    monkeypatch.setattr(PrincipalRoom, "_count", never)
    quotas = Quotas()
    async with World(tmp_path).topics(enforced(tmp_path), quotas=quotas) as topics:
        quotas.set([Quota("user:bob", max_topics=2)])
        with as_caller(ALICE):
            await topics.create(name(1), reliable=True)
