"""What a task of a link copies, from real brokers into real brokers: every message once, in order and as it
was."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pytest
from msgspec.structs import replace

from sava.client.blocking import Client
from sava.client.errors import ClientError
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.translation import REPLICATE
from sava.proto import danube_schema_pb2, danube_schema_pb2_grpc
from sava.records import Message, Origin
from sava.storage.source_positions import PATH
from tests.support.brokers import REPOSITORY, Standalone
from tests.support.copying import Copier, Several, Site, bare, numbered, payloads
from tests.support.long import IS_LONG
from tests.support.waiting import PATIENCE_S

COPYING = """
import pickle, sys
from sava.pipeline.replicate.copying import copy
copy(pickle.load(sys.stdin.buffer))
"""


class Standing(Site):
    """One broker, which can be killed."""

    def __init__(self, name: str, directory: Path, **settings: str) -> None:
        directory.mkdir()
        uploads = {"SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS": "1"}
        self.broker = Standalone(directory, SAVA__CLUSTER_NAME=name, **uploads, **settings)
        self.broker.start()
        try:
            super().__init__(name, ClusterAccess(self.broker.url))
        except ClientError:
            self.broker.kill()
            print(self.broker.log.read_text()[-4000:])
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.broker.kill()
        self.close()
        if error is not None:
            print(self.broker.log.read_text()[-4000:])

    @contextmanager
    def schemas(self) -> Iterator[danube_schema_pb2_grpc.SchemaRegistryStub]:
        with grpc.insecure_channel(f"127.0.0.1:{self.broker.port}") as channel:
            yield danube_schema_pb2_grpc.SchemaRegistryStub(channel)

    def register(self, subject: str, kind: str, definition: object) -> tuple[int, int]:
        """Id and version."""
        request = danube_schema_pb2.RegisterSchemaRequest(
            subject=subject, schema_type=kind, schema_definition=json.dumps(definition).encode()
        )
        with self.schemas() as stub:
            found = stub.RegisterSchema(request, timeout=PATIENCE_S)
        return found.schema_id, found.version


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Standing]]:
    directory = tmp_path_factory.mktemp("sites")
    large = {"SAVA__POLICIES__MAX_MESSAGE_SIZE": str(40 << 20)}
    with (
        Standing("eu", directory / "eu", **large) as eu,
        Standing("us", directory / "us") as us,
        Standing("asia", directory / "asia", **large) as asia,
    ):
        yield {"eu": eu, "us": us, "asia": asia}


# -- content ---------------------------------------------------------------------------------------


def test_history_and_tail_are_copied_as_they_are(sites: dict[str, Standing]) -> None:
    eu, us, topic = sites["eu"], sites["us"], "/default/history"
    copier = Copier(eu, us, topic)
    eu.publish(topic, numbered("old", 0, 4000))
    with Client(eu.broker.url) as client, client.producer(topic, name="web") as producer:
        for number in range(50):
            producer.send(f"single-{number}".encode(), attributes={"a": str(number)} if number % 2 else None)
    eu.stored(topic)
    pieces = copier.errand().pieces
    assert all(piece.segment is not None for piece in pieces)
    eu.publish(topic, numbered("new", 0, 3000))
    assert copier.finish() == 7050
    given = eu.messages(topic)
    assert given[4000].producer == "web"
    assert bare(us.messages(topic)) == copier.expected(given)


def test_small_rounds_come_to_the_same_end(sites: dict[str, Standing]) -> None:
    """Each round sends one range; from the owner first, and what is left from wherever it is by then."""
    eu, us, topic = sites["eu"], sites["us"], "/default/rounds"
    copier = Copier(eu, us, topic)
    for part in range(40):
        eu.publish(topic, numbered("m", part * 2000, (part + 1) * 2000))
    outcome = copier.round(0.0, from_tail=True)
    assert 0 < outcome.position < 80_000
    assert copier.finish(0.0) == 80_000 - outcome.messages
    assert payloads(us.messages(topic)) == [f"m-{number}" for number in range(80_000)]


def test_what_is_not_to_be_copied_leaves_holes(sites: dict[str, Standing]) -> None:
    eu, topic = sites["eu"], "/default/filtered"
    where = ["us", "asia", "us,asia", "none", ""]
    given = [
        Message(b"%d" % number, None, {REPLICATE: where[number % 6]} if number % 6 < 5 else {}, 1)
        for number in range(600)
    ]
    eu.create(topic)
    eu.publish(topic, given)
    for name in ("us", "asia"):
        copier = Copier(eu, sites[name], topic)
        copier.finish()
        wanted = [n for n in range(600) if n % 6 == 5 or name in where[n % 6].split(",")]
        found = sites[name].messages(topic)
        assert [int(message.payload) for message in found] == wanted
        assert [message.origin for message in found] == [Origin("eu", number) for number in wanted]
        assert copier.round().position == 600


def test_a_range_of_nothing_but_holes_moves_the_position(sites: dict[str, Standing]) -> None:
    eu, us, topic = sites["eu"], sites["us"], "/default/nothing"
    copier = Copier(eu, us, topic)
    eu.publish(topic, numbered("m", 0, 500, **{REPLICATE: "none"}))
    outcome = copier.round()
    assert (outcome.position, outcome.messages, outcome.skipped) == (500, 0, 500)
    eu.publish(topic, numbered("m", 500, 510))
    assert copier.finish() == 10
    assert us.extent(topic).end == 10


def test_large_messages(sites: dict[str, Standing]) -> None:
    """Up to what the target takes; the first beyond that stops the copy there."""
    eu, us, asia, topic = sites["eu"], sites["us"], sites["asia"], "/default/large"
    sizes = [10, 7 << 20, 100, 8 << 20, 3, 20 << 20, 5]
    copier = Copier(eu, us, topic)
    for size in sizes:
        eu.publish(topic, [Message(bytes([size % 251]) * size, None, {}, 1)])
    outcome = copier.round()
    assert (outcome.code, outcome.may_pass, outcome.position) == ("message_too_large", False, 5)
    assert f"offset 5 has {20 << 20} bytes" in outcome.reason
    assert [len(message.payload) for message in us.messages(topic)] == sizes[:5]
    all_of_it = Copier(eu, asia, topic)
    all_of_it.finish()
    assert [len(message.payload) for message in asia.messages(topic)] == sizes


def test_many_topics_are_copied_together_as_they_are(sites: dict[str, Standing]) -> None:
    """With keys, attributes, schemas and messages that are not for the target; and one has a message that the
    target does not take."""
    eu, us = sites["eu"], sites["us"]
    topics = [f"/default/together-{number}" for number in range(20)]
    several = Several(eu, us, topics)
    typed = eu.register("together", "json_schema", OBJECT)
    for topic in topics:
        eu.publish(topic, [*numbered("old", 0, 20), Message(b"{}", None, {}, 1, *typed)])
    several.finish()
    assert several.together == 0, "copies are begun one by one"
    for turn in range(3):
        for topic in topics:
            eu.publish(topic, numbered("new", turn * 10, turn * 10 + 10))
            eu.publish(topic, [Message(b"{}", None, {}, 1, *typed)])
            eu.publish(topic, numbered("kept", 0, 3, **{REPLICATE: "none"}))
        if turn == 2:
            eu.publish(topics[0], [Message(b"x" * (20 << 20), None, {}, 1)])
        told = {(outcome.code, outcome.messages, outcome.skipped) for outcome in several.round()}
        assert told == {("", 11, 3)}
    assert several.together == 3 * len(topics)
    assert [outcome.code for outcome in several.round()] == ["message_too_large", *[""] * 19]
    (schema_id,) = {message.schema_id for message in us.messages(topics[1])} - {None}
    assert schema_id is not None
    assert us.link.schema_of(schema_id, None).subject == "together"
    for copier in several.copiers:
        given = eu.messages(copier.topic)[: 21 + 3 * 14]
        expected = [
            replace(message, schema_id=schema_id) if message.schema_id else message
            for message in copier.expected(given)
            if REPLICATE not in message.attributes
        ]
        assert bare(us.messages(copier.topic)) == expected


# -- clusters --------------------------------------------------------------------------------------


def settle(copiers: list[Copier]) -> None:
    """Until a turn brings nothing new anywhere."""
    for _ in range(10):
        if not sum(copier.finish() for copier in copiers):
            return
    raise AssertionError("it goes round and round")


def test_both_ways_without_a_loop(sites: dict[str, Standing]) -> None:
    eu, us, topic = sites["eu"], sites["us"], "/default/both"
    copiers = [Copier(eu, us, topic), Copier(us, eu, topic)]
    for turn in range(3):
        eu.publish(topic, numbered("eu", turn * 50, turn * 50 + 50))
        us.publish(topic, numbered("us", turn * 50, turn * 50 + 50))
        settle(copiers)
    for site in (eu, us):
        found = payloads(site.messages(topic))
        for name in ("eu", "us"):
            of_name = [each for each in found if each.startswith(name)]
            assert of_name == [f"{name}-{number}" for number in range(150)]
        assert len(found) == 300


def test_a_ring_of_three_that_forwards(sites: dict[str, Standing]) -> None:
    topic, names = "/default/ring", ["eu", "us", "asia"]
    following = zip(names, names[1:] + names[:1], strict=True)
    copiers = [Copier(sites[a], sites[b], topic, forward=True) for a, b in following]
    for turn in range(2):
        for name in names:
            sites[name].publish(topic, numbered(name, turn * 40, turn * 40 + 40))
        settle(copiers)
    for site in sites.values():
        found = site.messages(topic)
        assert len(found) == 240
        for name in names:
            of_name = [each for each in payloads(found) if each.startswith(name)]
            assert of_name == [f"{name}-{number}" for number in range(80)]
    from_asia = [each for each in sites["us"].messages(topic) if each.payload.startswith(b"asia")]
    assert {each.attributes[PATH] for each in from_asia} == {"asia,eu"}
    assert {each.origin.cluster for each in from_asia if each.origin} == {"asia"}


def test_two_paths_bring_each_message_once(sites: dict[str, Standing]) -> None:
    eu, us, asia = (sites[name] for name in ("eu", "us", "asia"))
    topic = "/default/paths"
    direct, there, onward = (
        Copier(eu, asia, topic, forward=True),
        Copier(eu, us, topic, forward=True),
        Copier(us, asia, topic, forward=True),
    )
    eu.publish(topic, numbered("eu", 0, 100))
    settle([there, onward])
    eu.publish(topic, numbered("eu", 100, 150))
    outcome = direct.round()
    assert (outcome.messages, outcome.duplicates) == (50, 100)
    settle([there, onward, direct])
    assert payloads(asia.messages(topic)) == [f"eu-{number}" for number in range(150)]


# -- schemas ---------------------------------------------------------------------------------------

RECORD = {"type": "record", "name": "Order", "fields": [{"name": "n", "type": "long"}]}
LONGER = {
    **RECORD,
    "fields": [*RECORD["fields"], {"name": "note", "type": "string", "default": ""}],
}
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(("kind", "versions"), [("avro", (RECORD, LONGER)), ("json_schema", (OBJECT,))])
def test_schemas_are_called_as_the_target_calls_them(
    sites: dict[str, Standing], kind: str, versions: tuple[object, ...]
) -> None:
    eu, asia, topic, subject = sites["eu"], sites["asia"], f"/default/typed-{kind}", f"{kind}-orders"
    for number in range(3):
        asia.register(f"{kind}-other-{number}", "json_schema", OBJECT)
    named = [eu.register(subject, kind, definition) for definition in versions]
    copier = Copier(eu, asia, topic)
    with Client(eu.broker.url) as client, client.producer(topic, schema=subject):
        pass  # the topic follows it from now on
    given = [Message(b"{}", None, {}, 1, *named[number % len(named)]) for number in range(60)]
    given += [Message(b"{}", None, {}, 1, named[0][0], None)]
    eu.publish(topic, given)
    copier.finish()
    assert asia.link.partitions(topic).schema_subject == subject
    found = asia.messages(topic)
    assert len(found) == 61
    assert found[0].schema_id != named[0][0], "each cluster has its own ids"
    assert (found[60].schema_id, found[60].schema_version) == (found[0].schema_id, None)
    for message, (_, version) in zip(found, [named[n % len(named)] for n in range(60)], strict=False):
        assert message.schema_id is not None
        here = asia.link.schema_of(message.schema_id, message.schema_version)
        there = eu.link.schema(subject, version)
        assert here.subject == subject
        assert json.loads(here.schema_definition) == json.loads(there.definition)


def test_a_schema_that_the_target_does_not_take(sites: dict[str, Standing]) -> None:
    eu, us, topic, subject = sites["eu"], sites["us"], "/default/conflict", "conflicting"
    us.register(subject, "avro", {**RECORD, "fields": [{"name": "x", "type": "string"}]})
    schema_id, version = eu.register(subject, "avro", RECORD)
    copier = Copier(eu, us, topic)
    eu.publish(topic, numbered("free", 0, 30))
    eu.publish(topic, [Message(b"m", None, {}, 1, schema_id, version)])
    copier.position = 0
    outcome = copier.round()
    assert (outcome.code, outcome.may_pass, outcome.position) == ("schema_refused", False, 30)
    assert subject in outcome.reason
    assert "the target says" in outcome.reason
    request = danube_schema_pb2.SetCompatibilityModeRequest(subject=subject, compatibility_mode="none")
    with us.schemas() as stub:
        stub.SetCompatibilityMode(request, timeout=PATIENCE_S)
    copier.finish()
    found = us.messages(topic)
    assert len(found) == 31
    assert found[30].schema_version == 2


def test_a_message_that_the_target_refuses_among_many_loses_nothing(sites: dict[str, Standing]) -> None:
    """Ranges are on their way when one of them is refused. Those behind it are not taken, the position is
    before it, and when the target takes it after all, everything is there once."""
    eu, us, topic, subject = sites["eu"], sites["us"], "/default/refused", "strict"
    schema_id, version = eu.register(subject, "json_schema", OBJECT)
    us.register(subject, "json_schema", OBJECT)
    copier = Copier(eu, us, topic)
    named = [Message(b'{"n": %d}' % number, None, {}, 1, schema_id, version) for number in range(60_000)]
    named[41_000] = Message(b'{"n": 41000}', None, {}, 1)
    for first in range(0, 60_000, 5000):
        eu.publish(topic, named[first : first + 5000])
    with us.schemas() as stub:
        request = danube_schema_pb2.ConfigureTopicSchemaRequest(
            topic_name=topic, schema_subject=subject, validation_policy="enforce"
        )
        stub.ConfigureTopicSchema(request, timeout=PATIENCE_S)
        outcome = copier.round()
        assert (outcome.code, outcome.may_pass) == ("schema_refused", False)
        assert 0 < outcome.position <= 41_000
        assert us.extent(topic).end == outcome.position
        stub.UpdateTopicValidationPolicy(
            danube_schema_pb2.UpdateTopicValidationPolicyRequest(topic_name=topic, validation_policy="none"),
            timeout=PATIENCE_S,
        )
    copier.finish()
    assert [json.loads(each.payload)["n"] for each in us.messages(topic)] == list(range(60_000))


# -- troubles --------------------------------------------------------------------------------------


def test_two_at_once_copy_each_message_once(sites: dict[str, Standing]) -> None:
    eu, us, topic = sites["eu"], sites["us"], "/default/at-once"
    copiers = [Copier(eu, us, topic) for _ in range(2)]
    for part in range(60):
        eu.publish(topic, numbered("m", part * 1000, (part + 1) * 1000))
    appended = []
    threads = [
        threading.Thread(target=lambda copier=copier: appended.append(copier.finish(0.05)))
        for copier in copiers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(appended) == 2
    assert payloads(us.messages(topic)) == [f"m-{number}" for number in range(60_000)]


def test_whoever_copies_is_killed(sites: dict[str, Standing]) -> None:
    """SIGKILL at any moment, and somebody else goes on."""
    eu, us, topic = sites["eu"], sites["us"], "/default/killed"
    copier = Copier(eu, us, topic)
    for part in range(100):
        eu.publish(topic, numbered("m", part * 2000, (part + 1) * 2000))
    for wanted in (1, 50_000):
        # Not multiprocessing: it leaves a process behind that tracks its resources.
        with subprocess.Popen(
            [sys.executable, "-c", COPYING], stdin=subprocess.PIPE, cwd=REPOSITORY
        ) as child:
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(copier.share(30.0)))
            child.stdin.close()
            deadline = time.monotonic() + PATIENCE_S
            while us.extent(topic).end < wanted and child.poll() is None:
                assert time.monotonic() < deadline
            child.kill()
        assert us.extent(topic).end < 200_000, "killed while it was at it"
    copier.finish()
    assert payloads(us.messages(topic)) == [f"m-{number}" for number in range(200_000)]


def test_brokers_are_killed_while_many_are_copied_together(tmp_path: Path) -> None:
    topics, turns = [f"/default/troubled-{number}" for number in range(12)], 60 if IS_LONG else 24
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Standing("eu", tmp_path / "eu") as eu, Standing("us", tmp_path / "us") as us:
        several = Several(eu, us, topics)
        kills = chance.sample(range(5, turns - 5), 4 if IS_LONG else 2)
        for turn in range(turns):
            for topic in topics:
                eu.publish(topic, numbered("m", turn * 10, turn * 10 + 10))
            share = several.share(0.2)
            killing = threading.Timer(chance.uniform(0, 0.05), chance.choice((eu, us)).broker.kill)
            if turn in kills:
                killing.start()
            several.copy(share)
            if turn in kills:
                killing.join()
                for site in (eu, us):
                    site.broker.kill()
                    site.broker.start()
        several.finish()
        for topic in topics:
            assert payloads(us.messages(topic)) == [f"m-{number}" for number in range(10 * turns)]
        assert several.together > turns // 6 * len(topics)


def test_both_brokers_are_killed_while_it_goes_on(tmp_path: Path) -> None:
    topic, total = "/default/troubled", 120_000
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Standing("eu", tmp_path / "eu") as eu, Standing("us", tmp_path / "us") as us:
        copier = Copier(eu, us, topic)
        for first in range(0, total, 2000):
            eu.publish(topic, numbered("m", first, first + 2000))
        worker = threading.Thread(target=copier.finish, args=(0.2,))
        worker.start()
        for site in (us, eu):
            time.sleep(chance.uniform(0.05, 0.4))
            site.broker.kill()
            site.broker.start()
        worker.join(6 * PATIENCE_S)
        assert not worker.is_alive()
        assert payloads(us.messages(topic)) == [f"m-{number}" for number in range(total)]
