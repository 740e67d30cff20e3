"""Pipelines on real Spark: what a runner that dies leaves undone another one does, and nothing twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.client.blocking import Client
from tests.spark.runner_process import Pipelines, RunnerProcess
from tests.spark.sink_topics import create, read
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.waiting import PATIENCE_S

MODULE = "tests.spark.runner_functions"
UPPER = f"{MODULE}:upper"
LIVES = 8
TOGETHER = 2


@pytest.fixture
def runners() -> Iterator[list[RunnerProcess]]:
    started: list[RunnerProcess] = []
    yield started
    for each in started:
        each.sweep()


@pytest.fixture
def pipelines(broker: Standalone) -> Iterator[Pipelines]:
    found = Pipelines(broker.admin)
    yield found
    found.close()


def _publish(broker: Standalone, topic: str, numbers: range) -> None:
    with Client(broker.url, timeout=PATIENCE_S) as client, client.producer(topic) as producer:
        producer.send_many(
            [f"m{number}".encode() for number in numbers], keys=[str(number % 7) for number in numbers]
        )


def _shouted(broker: Standalone, topic: str) -> Counter[bytes]:
    return Counter(message.payload for message in read(broker, topic))


def _expected(count: int) -> Counter[bytes]:
    return Counter(f"M{number}".encode() for number in range(count))


@only_long("two runners, each with its own Spark")
def test_nothing_is_lost_or_repeated_when_a_runner_is_killed(
    broker: Standalone, pipelines: Pipelines, tmp_path: Path, runners: list[RunnerProcess]
) -> None:
    source, target = "/default/runner-in", "/default/runner-out"
    create(broker, source, partitions=2)
    create(broker, target, partitions=2)

    def written() -> int:
        return sum(_shouted(broker, target).values())

    def state() -> str:
        return pipelines.status("shout").state

    _publish(broker, source, range(100))
    begin = {"topic": source, "startingOffsets": "earliest", "maxMessagesPerTrigger": 40}
    pipelines.apply("shout", from_=begin, function=UPPER, to={"topic": target})
    assert state() == "waiting"

    # Killed in the midst of its work: more has come than it can do in a batch.
    first = RunnerProcess(tmp_path, broker.admin, "first")
    runners.append(first)
    first.reached(lambda: written() > 0, "the first batch is written")
    _publish(broker, source, range(100, 400))
    seen = written()
    first.reached(lambda: written() > seen, "there is more")
    first.kill()
    _publish(broker, source, range(400, 500))

    second = RunnerProcess(tmp_path, broker.admin, "second")
    runners.append(second)
    second.reached(lambda: written() >= 500, "everything is written")
    first.wait_gone()
    second.reached(lambda: pipelines.status("shout").lag_messages == 0, "and known to be")
    assert _shouted(broker, target) == _expected(500)
    now = pipelines.status("shout")
    assert (now.state, now.restarts, now.last_error, now.lag_seconds) == ("running", 0, "", 0)
    assert now.rows > 0

    # Paused, nothing is done; resumed, it goes on where it was.
    pipelines.pause("shout")
    second.reached(lambda: state() == "paused", "it is paused")
    _publish(broker, source, range(500, 550))
    assert written() == 500
    pipelines.resume("shout")
    second.reached(lambda: written() >= 550, "it goes on")

    # A function that cannot be used is told, and the pipeline recovers when it is corrected.
    pipelines.apply("shout", from_=begin, function=f"{MODULE}:nothing", to={"topic": target})
    second.reached(lambda: "returned NoneType" in pipelines.status("shout").last_error, "it fails")
    assert state() == "failing"
    pipelines.apply("shout", from_=begin, function=UPPER, to={"topic": target})
    _publish(broker, source, range(550, 600))
    second.reached(lambda: written() >= 600, "the corrected one goes on")

    assert second.stop() == 0, second.said
    second.wait_gone()
    assert state() == "waiting"
    assert pipelines.runners == []
    assert _shouted(broker, target) == _expected(600)
    pipelines.delete("shout")


@only_long("a runner with its own Spark")
def test_a_runner_does_only_what_its_operator_allows(
    broker: Standalone, pipelines: Pipelines, tmp_path: Path, runners: list[RunnerProcess]
) -> None:
    """The attacks of a stranger on the admin port: each of them ran, as the runner's user."""
    source, target = "/default/refused-in", "/default/refused-out"
    create(broker, source)
    create(broker, target)
    _publish(broker, source, range(10))
    begin = {"topic": source, "startingOffsets": "earliest"}
    stolen, planted = tmp_path / "stolen", tmp_path / "planted"
    (tmp_path / "out").mkdir()
    attacks: dict[str, dict[str, Any]] = {
        "code": {"function": "subprocess:getoutput", "to": {"topic": target}},
        "imported": {"function": f"{MODULE}:DataFrame", "to": {"topic": target}},
        "files": {"to": {"format": "json", "path": str(stolen)}},
        "outside": {"to": {"format": "parquet", "path": f"{tmp_path}/out/../stolen"}},
        "planted": {"to": {"topic": target}, "checkpoint": str(planted)},
        "other": {"to": {"topic": target}, "checkpoint": str(tmp_path / "checkpoints" / "good")},
        "service": {"from_": {**begin, "service": "127.0.0.1:9"}, "to": {"topic": target}},
        "writer": {"to": {"topic": target, "writerId": "good"}},
    }
    for name, settings in attacks.items():
        pipelines.apply(name, **{"from_": begin, **settings})
    pipelines.apply("good", from_=begin, function=UPPER, to={"topic": target})
    pipelines.apply("export", from_=begin, to={"format": "parquet", "path": str(tmp_path / "out" / "orders")})

    allow = ("--allow-format", "parquet", "--allow-path", str(tmp_path / "out"))
    runner = RunnerProcess(tmp_path, broker.admin, "runner", *allow)
    runners.append(runner)

    def are_refused() -> bool:
        return all(pipelines.status(name).state == "failed" for name in attacks)

    runner.reached(are_refused, "what is not allowed has failed")
    runner.reached(lambda: sum(_shouted(broker, target).values()) == 10, "what is allowed is done")
    runner.reached(lambda: any((tmp_path / "out" / "orders").glob("*.parquet")), "files are written there")
    for name in attacks:
        status = pipelines.status(name)
        assert (status.state, status.restarts, status.rows) == ("failed", 0, 0), name
        assert "this runner does not allow" in status.last_error
    assert _shouted(broker, target) == _expected(10)
    assert not stolen.exists()
    assert not planted.exists()
    assert runner.stop() == 0, runner.said
    for name in (*attacks, "good", "export"):
        pipelines.delete(name)


@only_long("runners are killed for minutes")
@pytest.mark.timeout(900)
def test_runners_that_are_killed_again_and_again_lose_and_repeat_nothing(
    broker: Standalone, pipelines: Pipelines, tmp_path: Path, runners: list[RunnerProcess]
) -> None:
    """Two runners with three pipelines, one of them killed every now and then and followed by a new one,
    while messages come all the time."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    source = "/default/killed-in"
    create(broker, source, partitions=2)
    targets = [f"/default/killed-out-{number}" for number in range(3)]
    for number, target in enumerate(targets):
        create(broker, target, partitions=2)
        begin = {"topic": source, "startingOffsets": "earliest"}
        pipelines.apply(f"killed-{number}", from_=begin, function=UPPER, to={"topic": target})
    over = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        while not over.wait(0.2):
            _publish(broker, source, range(published, published + 10))
            published += 10

    def written(target: str) -> int:
        return sum(_shouted(broker, target).values())

    def start() -> RunnerProcess:
        runner = RunnerProcess(tmp_path, broker.admin, f"r{len(runners)}")
        runners.append(runner)
        return runner

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        alive = [start() for _ in range(TOGETHER)]
        for _ in range(LIVES):
            seen = written(targets[0])
            alive[0].reached(lambda seen=seen: written(targets[0]) > seen, "something is done")  # type: ignore[misc]
            time.sleep(chance.uniform(0, 8))
            victim = alive.pop(chance.randrange(TOGETHER))
            victim.kill()
            alive.append(start())
    finally:
        over.set()
        publishing.join()
    for number, target in enumerate(targets):
        alive[0].reached(
            lambda target=target: written(target) >= published,  # type: ignore[misc]
            f"everything is in {target}",
        )
        assert _shouted(broker, target) == _expected(published)
        pipelines.delete(f"killed-{number}")
