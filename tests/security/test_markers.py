"""Secrets stay where they belong. A secured cluster is used as usual, and misused; then every place where a
secret could end up is searched: logs, what commands print, command lines, everything on the brokers' disks,
metrics, the audit, and the texts of errors."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from sava.client import Client, ClientError
from sava.errors import SavaError
from sava.proto import admin_pb2 as pb
from sava.proto import security_pb2
from sava.proto import topics_admin_pb2 as topics_pb
from sava.security import audit
from sava.security.principal import Principal
from sava.security.tokens import create_token
from sava.tasks import spread
from tests.security.secured_cluster import SecuredCluster
from tests.support.processes import PIPE, start_child, start_sava
from tests.support.waiting import PATIENCE_S

TOPIC: Final = "/default/orders"
FOREIGN_KEY: Final = b"another issuer's secret, which signs tokens that are refused"
OWN_FILES: Final = frozenset(("cluster_secret", "tokens.secret"))
"""The files that hold secrets on purpose."""
COMMANDS: Final = (
    ("cluster", "status", "-o", "json"),
    ("brokers", "list", "-o", "json"),
    ("topics", "list", "-o", "json"),
    ("topics", "describe", TOPIC, "-o", "json"),
    ("auth", "whoami", "-o", "json"),
    ("auth", "bindings", "list", "-o", "json"),
    ("auth", "quotas", "list", "-o", "json"),
    ("meta", "range", "/", "-o", "json"),
    ("ledgers", "list", "-o", "json"),
    ("doctor", "-o", "json"),
    ("topics", "describe", "/default/missing", "-o", "json"),
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Searched:
    """The places, by name, with what was found there."""

    def __init__(self) -> None:
        self.places: dict[str, bytes] = {}

    def add(self, place: str, content: str | bytes) -> None:
        self.places[place] = self.places.get(place, b"") + (
            content.encode() if isinstance(content, str) else content
        )

    def where(self, marker: str) -> list[str]:
        return [place for place, content in self.places.items() if marker.encode() in content]


class Use:
    """A cluster in use."""

    def __init__(self, cluster: SecuredCluster) -> None:
        self._cluster = cluster
        self.found = Searched()
        self.tokens = {name: cluster.token_of(name) for name in ("root", "alice", "eve")}
        self.tokens["broken"] = self.tokens["alice"][:-8] + "AAAAAAAA"
        self.tokens["foreign"] = create_token("sava", Principal("user", "alice"), 3600, FOREIGN_KEY)
        self.tokens["expired"] = create_token(
            "sava", Principal("user", "alice"), 60, cluster.secret.encode(), now=1_600_000_000
        )

    async def run(self) -> None:
        cluster = self._cluster
        await cluster.create(TOPIC)
        await cluster.bind("alice", "producer", topic=TOPIC)
        await cluster.bind("alice", "consumer", topic=TOPIC)
        await cluster.limit(security_pb2.Quota(principal="user:alice", max_streams=100))
        await self._publish_and_consume()
        await self._misuse()
        await spread(COMMANDS, lambda command: self._command("root", *command), parallel=4)
        await spread(COMMANDS[:4], lambda command: self._command("eve", *command), parallel=4)
        await self._follow()
        await self._search()

    async def _publish_and_consume(self) -> None:
        async with self._client("alice") as client:
            async with client.producer(TOPIC) as producer:
                for number in range(20):
                    await producer.send(f"{number}".encode())
            async with client.consumer(TOPIC, subscription="all", start="earliest") as consumer:
                for _ in range(20):
                    message = await asyncio.wait_for(anext(aiter(consumer)), PATIENCE_S)
                    await consumer.ack(message)

    async def _misuse(self) -> None:
        """Calls that are refused, with every kind of token, on both ports."""
        for name in ("eve", "broken", "foreign", "expired"):
            with pytest.raises(ClientError) as refused:
                async with self._client(name) as client, client.producer(TOPIC) as producer:
                    await producer.send(b"x")
            self.found.add(f"the error of {name}", f"{refused.value!r} {refused.value}")
            admin = self._cluster.admin_of("root")
            admin._credentials.token = self.tokens[name]
            async with admin:
                with pytest.raises(SavaError) as denied:
                    await admin.ask(topics_pb.DeleteTopicRequest(name=TOPIC))
                self.found.add(f"the error of {name}", f"{denied.value!r} {denied.value}")
                with suppress(SavaError):
                    await admin.ask(pb.PutRequest(key="/security/x", value=b"x"))

    def _client(self, name: str) -> Client:
        urls = [broker.client_url for broker in self._cluster.brokers]
        return Client(urls, tls=self._cluster.tls, token=self.tokens[name], timeout=3)

    def _environment(self, name: str) -> dict[str, str]:
        broker = self._cluster.brokers[0]
        ca = {"SAVA_TLS_CA": str(self._cluster.tls.ca)} if self._cluster.tls else {}
        given = {
            "SAVA_ADMIN": broker.admin,
            "SAVA_SERVICE": broker.client_url,
            "SAVA_TOKEN": self.tokens[name],
        }
        return {**os.environ, **given, **ca}

    async def _command(self, name: str, *arguments: str) -> None:
        child = await start_sava(
            *arguments, stdout=PIPE, stderr=PIPE, env=self._environment(name), limit=1 << 24
        )
        async with asyncio.timeout(PATIENCE_S):
            out, err = await child.communicate()
        self.found.add(f"sava {' '.join(arguments)} as {name}", out + err)

    async def _follow(self) -> None:
        """A command that runs, and what ``ps`` shows of it and of the brokers."""
        arguments = ("consume", TOPIC, "--follow", "-o", "json")
        # Not a fork of the tests' own server, whose command line would be shown.
        program = (sys.executable, "-m", "sava.cli", *arguments)
        child = await start_child(*program, stdout=PIPE, stderr=PIPE, env=self._environment("root"))
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await child.stdout.readline()
        self.found.add(
            "command lines", await asyncio.to_thread(Path(f"/proc/{child.pid}/cmdline").read_bytes)
        )
        for broker in self._cluster.brokers:
            self.found.add("command lines", " ".join(broker._arguments))
        child.terminate()
        await child.communicate()

    async def _search(self) -> None:
        cluster, found = self._cluster, self.found
        for broker in cluster.brokers:
            found.add("metrics", (await broker.http("/metrics"))[1])
            for path in ("/healthz", "/readyz", "/nothing"):
                found.add("HTTP", (await broker.http(path))[1])
        async with cluster.client_of("root") as client, client.reader(audit.TOPIC) as reader:
            with suppress(TimeoutError):
                while True:
                    message = await asyncio.wait_for(anext(reader), 1)
                    found.add("the audit", bytes(message.payload) + repr(message.attributes).encode())
        for broker in cluster.brokers:
            assert await broker.stop() == 0
            found.add(f"the log of broker {broker.number}", "\n".join(broker.lines))
        for file in files_below(cluster.brokers[0].data_dir.parent):
            found.add(str(file), await asyncio.to_thread(file.read_bytes))


def files_below(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name not in OWN_FILES and path.suffix != ".key":
            yield path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def use(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Use]:
    async with SecuredCluster(2, tmp_path_factory.mktemp("markers")) as cluster:
        used = Use(cluster)
        await used.run()
        yield used


async def test_every_place_was_searched(use: Use) -> None:
    """The search is worth nothing if the places are empty."""
    places = use.found.places
    assert b"user:eve" in places["the audit"]
    assert b"sava_audit_denied_total" in places["metrics"]
    assert b"sava.audit" in places["the log of broker 1"]
    assert b"--config" in places["command lines"]
    assert b"--follow" in places["command lines"]
    assert any("raft" in place and b"user:alice" in content for place, content in places.items())
    assert b'"/security' in places["sava auth bindings list -o json as root"] or (
        b"user:alice" in places["sava auth bindings list -o json as root"]
    )


async def test_no_token_is_anywhere(use: Use) -> None:
    for name, token in use.tokens.items():
        assert use.found.where(token) == [], name
        # The signature alone is as good: the rest can be made up.
        assert use.found.where(token.rpartition(".")[2]) == [], name


async def test_the_secret_that_signs_tokens_is_nowhere(use: Use) -> None:
    assert use.found.where(use._cluster.secret) == []


async def test_the_secret_of_the_cluster_is_nowhere(use: Use) -> None:
    directory = use._cluster.brokers[0].data_dir.parent
    files = [path for path in directory.rglob("*") if path.name == "cluster_secret"]
    assert files
    for file in files:
        secret = (await asyncio.to_thread(file.read_text)).split()[0]
        assert len(secret) >= 32
        assert use.found.where(secret) == []


async def test_files_with_secrets_are_their_owners_alone(use: Use) -> None:
    directory = use._cluster.brokers[0].data_dir.parent
    kept = [path for path in directory.rglob("*") if path.name in OWN_FILES]
    assert kept
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
