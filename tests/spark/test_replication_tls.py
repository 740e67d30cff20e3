"""Replication between clusters that show certificates, each of an authority of its own: nothing of one side
opens the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sava.client.errors import ClientError
from sava.client.loop_thread import LoopThread
from sava.config import Auth
from tests.spark.runner_process import Pipelines, RunnerProcess
from tests.support.brokers import Standalone
from tests.support.certificates import make_certificates
from tests.support.long import only_long
from tests.support.replication import Side

T = TypeVar("T")

LINK = "replicate-west"
NAMES = ["/default/orders-part-0", "/default/orders-part-1", "/default/prices"]


class Clusters:
    def __init__(self, east: Side, west: Side) -> None:
        self.east, self.west = east, west
        self._loop = LoopThread("clusters")

    def close(self) -> None:
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def copied(self, name: str) -> list[str]:
        try:
            return self.west.payloads(name)
        except ClientError:
            return []  # there is no such topic yet


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clusters]:
    """Whoever is started by the test, commands and runners, shows the certificate of east."""
    auths: dict[str, Auth] = {}
    for name in ("east", "west"):
        (tmp_path / name).mkdir()
        auths[name] = make_certificates(tmp_path / name / "certificates")
    files = auths["east"].tls
    assert files is not None
    for name, file in (("CERT", files.cert_file), ("KEY", files.key_file), ("CA", files.ca_file)):
        monkeypatch.setenv(f"SAVA_TLS_{name}", str(file))

    def side(name: str) -> Standalone:
        settings = {"SAVA__CLUSTER_NAME": name, "SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS": "1"}
        return Standalone(tmp_path / name, auths[name], **settings)

    with side("east") as east, side("west") as west:
        found = Clusters(Side(east, auths["east"]), Side(west, auths["west"]))
        found.do(_ready(found))
        yield found
        found.close()


async def _ready(clusters: Clusters) -> None:
    await asyncio.gather(clusters.east.ready(), clusters.west.ready())


def numbers(name: str, start: int, end: int) -> list[str]:
    return [f"{name} {number}" for number in range(start, end)]


@only_long("a runner, and certificates")
def test_a_runner_copies_between_clusters_that_ask_for_certificates(
    clusters: Clusters, tmp_path: Path
) -> None:
    east, west = clusters.east, clusters.west
    assert west.auth.tls is not None
    address = ("--service", f"https://{west.service}")
    ca = ("--tls-ca", str(west.auth.tls.ca_file))
    own = ("--tls-cert", str(west.auth.tls.cert_file), "--tls-key", str(west.auth.tls.key_file))

    # What does not open the other side is refused when it is given, with the reason.
    for wrong in ((), ca, own, ("--tls-ca", str(tmp_path / "nothing.pem"))):
        _, err = clusters.do(east.command("remotes", "add", "west", *address, *wrong, code=1))
        assert "remote west was not added" in err
    assert "nothing.pem cannot be read by this broker" in err

    clusters.do(east.command("remotes", "add", "west", *address, *ca, *own, "--token", "secret"))
    clusters.do(east.command("remotes", "test", "west"))
    listed, _ = clusters.do(east.command("remotes", "list"))
    assert listed.split()[-2:] == ["yes", "any"]  # TLS, and at any rate

    clusters.do(east.create("/default/orders", 2))
    clusters.do(east.create("/default/prices"))
    for name in NAMES:
        east.publish(name, numbers(name, 0, 500))
    clusters.do(east.command("replication", "set", "default", "--remote", "west"))
    runner = RunnerProcess(tmp_path, east.broker.admin, "runner")
    pipelines = Pipelines(east.broker.admin, east.tls)
    try:

        def are_copied(count: int) -> bool:
            return all(len(clusters.copied(name)) >= count for name in NAMES)

        runner.reached(lambda: are_copied(500), "history is copied")
        for name in NAMES:
            east.publish(name, numbers(name, 500, 600))
        runner.reached(lambda: are_copied(600), "and what comes")
        for name in NAMES:
            assert clusters.copied(name) == numbers(name, 0, 600)
        runner.reached(lambda: pipelines.status(LINK).lag_messages == 0, "the link says so")
        assert (pipelines.status(LINK).state, pipelines.status(LINK).restarts) == ("running", 0)
        verify = ("replication", "verify", "/default/orders", "--remote", "west", "-o", "json")
        verdicts = json.loads(clusters.do(east.command(*verify))[0])
        assert [verdict["compared"] for verdict in verdicts] == [600, 600]
        assert runner.stop() == 0, runner.said
    finally:
        runner.sweep()
        pipelines.close()
