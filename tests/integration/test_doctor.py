"""``sava doctor`` on clusters that are really broken: it must find that, and say what to do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sava.client import Client
from tests.support.brokers import Brokers, Standalone, sava
from tests.support.certificates import make_certificates
from tests.support.long import only_long
from tests.support.network import free_ports
from tests.support.objects import S3Server
from tests.support.processes import PIPE, start_child
from tests.support.waiting import PATIENCE_S, until

Findings = list[dict[str, Any]]


async def doctor(admin: str, *arguments: str) -> tuple[int, Findings]:
    """The exit code, and what is not as it should be."""
    code, out, err = await sava(
        "doctor", "--watch", "0.5", "-o", "json", *arguments, admin=admin, check=False
    )
    assert out, err
    told = json.loads(out)
    assert told["healthy"] is (code == 0)
    return code, [finding for finding in told["findings"] if finding["level"] != "ok"]


def found(findings: Findings, level: str, check: str, text: str) -> dict[str, Any]:
    for finding in findings:
        if (finding["level"], finding["check"]) == (level, check) and text in finding["text"]:
            assert finding["remedy"]
            return finding
    raise AssertionError(f"no {level} of {check} with {text!r} in {findings}")


async def ready(broker: Standalone, topic: str = "/default/orders") -> None:
    async with Client(broker.url, timeout=60) as client, client.producer(topic) as producer:
        await producer.send(b"hello")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Standalone]:
    with Standalone(tmp_path) as running:
        await ready(running)
        yield running


@contextmanager
def two_clusters(directory: Path) -> Iterator[list[Standalone]]:
    with ExitStack() as running:
        clusters = []
        for name in ("east", "west"):
            (directory / name).mkdir()
            clusters.append(running.enter_context(Standalone(directory / name, SAVA__CLUSTER_NAME=name)))
        yield clusters


@only_long("a cluster of three, and a lease that runs out")
async def test_a_broker_that_is_down(tmp_path: Path) -> None:
    """Its topic goes on elsewhere, from the mirrors of its journal."""
    async with Brokers(3, tmp_path, upload_interval_s=3600) as cluster:
        await cluster.create("/default/orders")
        address = cluster.brokers[0].client_url
        async with Client(address, timeout=60) as client, client.producer("/default/orders") as producer:
            await producer.send(b"only here")
        code, findings = await doctor(cluster.brokers[0].admin)
        assert (code, findings) == (0, [])

        owner = await cluster.owner("/default/orders")
        lost = await cluster.id_of(owner)
        owner.kill()
        await owner.ended()
        asked = cluster.running[0]
        code, findings = await doctor(asked.admin)
        assert code == 1
        gone = next(finding for finding in findings if finding["check"] == "reachability")
        assert str(lost) in gone["subject"]

        async def is_replaced() -> bool:
            listed = {each.broker_id: each.status for each in await cluster.list_brokers()}
            return listed[lost] == "unreachable" and await cluster.owner("/default/orders") is not owner

        await until(is_replaced, "the others know that it is gone, and serve its topic")
        code, findings = await doctor(asked.admin)
        assert code == 1
        gone = found(findings, "error", "reachability", "is not there")
        assert gone["remedy"].startswith("start it again; if it runs, its log says what keeps it away")
        assert f"if it is gone for ever, `sava cluster remove-node --node-id {lost}" in gone["remedy"]
        found(findings, "warning", "quorum", "2 of 3 voters")
        assert {finding["check"] for finding in findings} == {"reachability", "quorum"}


async def test_a_disk_that_fills(broker: Standalone) -> None:
    """However much room this machine has, some of it is in use."""
    code, findings = await doctor(broker.admin, "--min-free", "100")
    assert code == 1
    told = [finding for finding in findings if finding["check"] == "disks"]
    assert len(told) == 3
    assert all("is free" in finding["text"] and "room" in finding["remedy"] for finding in told)


@only_long("a broker that is started twice")
async def test_a_wrong_advertised_address(tmp_path: Path) -> None:
    """The broker listens on 127.0.0.1, and after a restart it tells everybody that it is 127.0.0.9."""
    broker = Standalone(tmp_path)
    with broker:
        await ready(broker)
    broker.set(SAVA__BROKER__ADVERTISED_HOST="127.0.0.9")
    with broker:

        async def is_registered() -> bool:
            _, out, _ = await sava("brokers", "list", "-o", "json", admin=broker.admin, check=False)
            return bool(out) and json.loads(out)[0]["client_addr"] == f"127.0.0.9:{broker.port}"

        await until(is_registered, "the broker is there")
        code, findings = await doctor(broker.admin)
        assert code == 1
        told = found(findings, "error", "reachability", f"client 127.0.0.9:{broker.port}")
        assert f"it runs, for it answers at {broker.admin}" in told["remedy"]
        assert "broker.advertised_host" in told["remedy"]


async def test_an_object_store_that_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "s3"
    directory.mkdir()
    server = S3Server(directory)
    server.start()
    try:
        environment = {f"AWS_{name.upper()}": value for name, value in server.options.items()}
        broker = Standalone(tmp_path, **environment)
        broker.add_arguments("--storage-url", f"{server.url}/segments")
        with broker:
            await ready(broker)
            code, findings = await doctor(broker.admin)
            assert (code, findings) == (0, [])
            server.kill()
            code, findings = await doctor(broker.admin)
            assert code == 1
            told = found(findings, "error", "object store", f"cannot use {server.url}/segments")
            assert "see that the store runs" in told["remedy"]
    finally:
        server.kill()


async def test_consumers_that_do_not_get_on(broker: Standalone) -> None:
    async with Client(broker.url) as client:
        async with client.consumer("/default/orders", subscription="stuck") as consumer:
            batch = await consumer.receive_batch(timeout=PATIENCE_S)
            assert batch is not None
            code, findings = await doctor(broker.admin)
            assert code == 1
            told = found(findings, "warning", "subscriptions", "none was acked")
            assert told["subject"] == "stuck of /default/orders"
        code, findings = await doctor(broker.admin)
        assert code == 0
        found(findings, "note", "subscriptions", "it has no consumer")


async def test_a_client_that_is_told_the_wrong_service(broker: Standalone) -> None:
    [port] = free_ports(1)
    code, findings = await doctor(broker.admin, "--service", f"http://127.0.0.1:{port}")
    assert code == 1
    found(findings, "error", "clients", "learns nothing")


async def test_a_service_is_asked_also_where_there_is_no_topic(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with Standalone(tmp_path) as broker:
        await asyncio.to_thread(broker.ready)
        assert await doctor(broker.admin) == (0, [])
        code, findings = await doctor(broker.admin, "--service", f"http://127.0.0.1:{port}")
        assert code == 1
        found(findings, "error", "clients", "learns nothing")


async def test_the_service_of_another_cluster(tmp_path: Path) -> None:
    """SAVA_ADMIN and SAVA_SERVICE name two clusters, neither of which has a topic: all looked well."""
    with two_clusters(tmp_path) as (east, west):
        await asyncio.gather(*(asyncio.to_thread(each.ready) for each in (east, west)))
        assert await doctor(east.admin, "--service", f"{east.url},{east.url}") == (0, [])
        code, findings = await doctor(east.admin, "--service", west.url)
        assert code == 1
        found(findings, "error", "clients", "is of another")
        code, findings = await doctor(east.admin, "--service", f"http://{east.admin}")
        assert code == 1
        found(findings, "error", "clients", "that is not the client port of a broker")


async def test_what_needs_a_runner_and_has_none(tmp_path: Path) -> None:
    """Both are found, with the reason that their own commands give."""
    with two_clusters(tmp_path) as (east, west):
        await asyncio.gather(ready(east), asyncio.to_thread(west.ready))
        await sava("remotes", "add", "west", "--service", west.address, admin=east.admin)
        await sava("replication", "set", "default", "--remote", "west", admin=east.admin)
        ends = "--from", "topic=/default/orders", "--to", "topic=/default/copy"
        await sava("pipelines", "create", "copy", *ends, admin=east.admin)
        code, findings = await doctor(east.admin)
        assert code == 1
        found(findings, "error", "replication", "no runner has pipeline replicate-west")
        told = found(findings, "error", "pipelines", "no runner has it")
        assert (told["subject"], len(findings)) == ("copy", 2)


async def test_nobody_is_there() -> None:
    [port] = free_ports(1)
    code, findings = await doctor(f"127.0.0.1:{port}")
    assert code == 1
    found(findings, "error", "reachability", "no broker answers")


async def test_certificates_that_end_soon(tmp_path: Path) -> None:
    """Those of the tests hold for thirty days, and a little less when they are looked at."""
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    async with Brokers(1, tmp_path, auth=auth) as cluster:
        await cluster.create("/default/orders")
        files = {"CERT": auth.tls.cert_file, "KEY": auth.tls.key_file, "CA": auth.tls.ca_file}
        process = await start_child(
            *(sys.executable, "-m", "sava.cli", "doctor", "--watch", "0.5", "-o", "json"),
            stdout=PIPE,
            stderr=PIPE,
            env={
                **os.environ,
                "SAVA_ADMIN": cluster.brokers[0].admin,
                **{f"SAVA_TLS_{name}": str(path) for name, path in files.items()},
            },
        )
        out, err = await process.communicate()
        assert out, err.decode()
        findings = [each for each in json.loads(out)["findings"] if each["level"] != "ok"]
        assert [finding["check"] for finding in findings] == ["certificates"], findings
        assert "ends in 30 days" in findings[0]["text"]
